"""A verification whose checkpoints, companions and requests lie on a Hub, with the unmodified client."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants

from publisher.errors import HubError
from publisher.hub.local import LocalHub
from publisher.pipeline.run import Run, run
from publisher.records.outcome import Outcome
from publisher.records.progress import silent
from publisher.records.verification import Verification
from tests.clusters import two_machines
from tests.manifests import ADAPTER
from tests.words import write_tokenizer

ROWS = [{"id": f"t{i}", "text": f"w{i} w3"} for i in range(6)]
VERIFICATION = Path("dist/pico/verification.json")


@pytest.fixture
def hub(pico_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub with the pair, the tokenizer in the source, requests in a dataset; the working folder is empty."""
    source = tmp_path / "source"
    shutil.copytree(pico_pairs / "one", source)
    write_tokenizer(source)
    (source / "large.bin").write_bytes(b"weights in another format")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with LocalHub(tmp_path / "data") as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        url = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", running.token)
        api = HfApi()
        for name, folder in (("o/source", source), ("o/base", pico_pairs / "base")):
            api.create_repo(name)
            api.upload_folder(repo_id=name, folder_path=folder)
        api.create_repo("o/rows", repo_type="dataset")
        add = CommitOperationAdd("test/rows.jsonl", tmp_path / "rows.jsonl")
        api.create_commit("o/rows", [add], commit_message="rows", repo_type="dataset")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        yield running


def publish(file: str = "test/rows.jsonl", **options: Any) -> Outcome:
    api = HfApi()
    pins = {name: api.model_info(f"o/{name}").sha for name in ("source", "base")}
    dataset = {"repo": "o/rows", "revision": api.dataset_info("o/rows").sha}
    sets = [{"name": "Rows", "file": file, "dataset": dataset}]
    variant: dict[str, Any] = {side: {"repo": f"o/{side}", "revision": pin} for side, pin in pins.items()}
    variant |= {"path": "/", "label": "Pico", "model_class": "LlamaForCausalLM", "adapter": dict(ADAPTER)}
    variant |= {"verification": {"runner": "logits", "sets": sets}}
    card = {"template": "lora_card.md.j2", "title": "Pico", "summary": "One adapter."}
    manifest = {"version": 1, "repo": "o/pico", "license": "mit", "variants": [variant], "card": card}
    Path("pico.yaml").write_text(json.dumps(manifest))
    return run(Run(Path("pico.yaml"), Path("dist"), device="cpu", dry_run=True, **{"last": "card", **options}), silent)


@pytest.mark.usefixtures("hub")
def test_checkpoints_tokenizer_and_requests_come_from_the_hub_and_a_second_run_reuses_all(tmp_path: Path) -> None:
    publish()
    (rows,) = Verification.read(VERIFICATION).sets
    assert (rows.requests, rows.failed) == (len(ROWS), 0)
    fetched = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert "tokenizer.json" in fetched
    assert "large.bin" not in fetched
    assert publish(last="push").variants[0].reused == ("extract", "validate", "loaders", "verify")


@pytest.mark.long
@pytest.mark.ray
def test_on_a_cluster_the_workers_fetch_what_they_need_and_the_driver_stores_no_weights(
    hub: LocalHub, tmp_path: Path
) -> None:
    cache, theirs = tmp_path / "cache", tmp_path / "worker"
    with two_machines(HF_ENDPOINT=hub.endpoint, HF_TOKEN=hub.token, HF_HOME=str(theirs)):
        publish(engine="ray", stream=True)
    assert not list(cache.rglob("*.safetensors"))
    assert len(list(theirs.rglob("snapshots/*/model.safetensors"))) == 2, "for the models that they ask"
    remote = VERIFICATION.read_bytes()
    shutil.rmtree("dist")
    publish()
    assert VERIFICATION.read_bytes() == remote


@pytest.mark.usefixtures("hub")
def test_a_dataset_without_the_file_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"^o/rows@\w{8} has no file test/none\.jsonl\. Next: correct the manifest"):
        publish("test/none.jsonl")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
