"""An audit of a repository: the real client, over HTTP, with the local Hub at the other end."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from publisher.audits import audit
from publisher.errors import FetchError, HubError
from publisher.hub.local import LocalHub
from publisher.records.audit import Audit
from publisher.records.files import canonical_json
from publisher.records.progress import silent

REPO, EVIDENCE = "o/pico", "extraction.json"
Staging = Callable[[Path, dict[str, str], str], Path]


@pytest.fixture(scope="module")
def hub(
    tmp_path_factory: pytest.TempPathFactory, pico_pairs: Path, stage_release: Staging
) -> Iterator[tuple[LocalHub, Path]]:
    """A Hub with o/base, o/one, o/two and the release made from their commits, and the staged tree of that."""
    folder = tmp_path_factory.mktemp("hub")
    with LocalHub(folder / "data") as running, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", running.endpoint)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setenv("HF_TOKEN", running.token)
        pins = {name: publish(f"o/{name}", pico_pairs / name) for name in ("base", "one", "two")}
        references = {name: f"{{repo: o/{name}, revision: {pin}}}" for name, pin in pins.items()}
        staged = stage_release(folder, references, REPO)
        publish(REPO, staged)
        HfApi().create_tag(REPO, tag="v1")
        yield running, staged


@pytest.fixture
def staged(hub: tuple[LocalHub, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the staged tree, to tamper with and to publish under another name."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(hub[1], tmp_path / "staged"))


def publish(repo: str, folder: Path) -> str:
    """The commit that holds the folder."""
    HfApi().create_repo(repo, exist_ok=True)
    return HfApi().upload_folder(repo_id=repo, folder_path=folder).oid


def audited(target: str, *, deep: bool = False) -> Audit:
    return audit(target, deep=deep, work=Path("work"), device="cpu", progress=silent)


def failures(found: Audit) -> dict[str, str]:
    return {f"{check.name} {check.variant}".rstrip(): check.detail for check in found.failed}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(canonical_json(value))


@pytest.mark.usefixtures("staged")
def test_a_published_release_passes_every_check_but_those_of_what_it_does_not_have() -> None:
    found = audited(REPO, deep=True)
    assert failures(found) == {}
    assert {c.name for c in found.checks if c.status == "not checked"} == {"signature", "loaders", "verification"}
    assert found.revision == HfApi().model_info(REPO).sha
    details = {c.name: c.detail for c in found.checks if c.variant in {"", "/"}}
    assert details["download"] == "12 files hold the bytes that the Hub lists"
    assert details["base"].startswith("2 files, as the Hub lists them at o/base@")
    assert details["files"] == "12 files of the release; not part of it: .gitattributes"


@pytest.mark.usefixtures("staged")
def test_a_tag_and_a_commit_name_the_same_release() -> None:
    by_tag = audited(f"{REPO}@v1")
    assert by_tag == audited(f"{REPO}@{by_tag.revision}")


@pytest.mark.usefixtures("staged")
def test_bytes_that_changed_on_the_way_are_found() -> None:
    found = audited("o/pico@v1")
    folder = Path(constants.HF_HUB_CACHE) / "models--o--pico/snapshots" / str(found.revision)
    blob = (folder / "small" / EVIDENCE).resolve()
    content = blob.read_bytes()
    blob.write_bytes(content.replace(b'"label": "Pico two"', b'"label": "Pico 222"'))
    try:
        assert failures(audited("o/pico@v1"))["download"] == "small/extraction.json differs from what the Hub lists"
    finally:
        blob.write_bytes(content)


def test_a_copy_of_a_release_under_another_name_is_called_one(staged: Path) -> None:
    publish("mallory/pico", staged)
    assert failures(audited("mallory/pico")) == {
        "repository": "the manifest is that of o/pico: mallory/pico is a copy of it"
    }


def test_a_checkpoint_digest_that_the_hub_does_not_list_is_found_without_a_download(staged: Path) -> None:
    edit(staged / EVIDENCE, lambda e: e["source"]["files"][-1].update(sha256="0" * 64))
    publish("mallory/digest", staged)
    found = failures(audited("mallory/digest"))
    assert found["source /"].startswith("model.safetensors: the Hub lists another file at o/one@")


def test_a_pin_that_the_hub_does_not_have_is_found(staged: Path) -> None:
    edit(staged / EVIDENCE, lambda e: e["base"].update(revision="d" * 40))
    publish("mallory/pin", staged)
    found = failures(audited("mallory/pin"))
    assert found["base /"] == f"o/base has no revision {'d' * 40}"
    assert "base is o/base@dddd" in found["recipe /"]


def test_an_unknown_file_is_named_and_never_downloaded(staged: Path) -> None:
    (staged / "tokenizer.json").write_text("{}")
    commit = publish("mallory/foreign", staged)
    assert failures(audited("mallory/foreign"))["files"] == "tokenizer.json is no part of the release"
    cached = Path(constants.HF_HUB_CACHE) / "models--mallory--foreign/snapshots" / commit
    assert (cached / "README.md").exists()
    assert not (cached / "tokenizer.json").exists()


def test_an_adapter_without_evidence_is_loaded_on_the_base_that_its_config_pins(staged: Path) -> None:
    for name in ("manifest.yaml", EVIDENCE, f"small/{EVIDENCE}", "README.md"):
        (staged / name).unlink()
    publish("mallory/bare", staged)
    found = audited("mallory/bare", deep=True)
    assert failures(found) == {}
    details = {c.name: c.detail for c in found.checks if c.variant == "/"}
    assert details["loading"] == "PEFT loads 14 modules whole on LlamaForCausalLM"
    assert details["reconstruction"] == "there is no readable source and base"


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("o/absent", HubError, "there is no repository o/absent"),
        ("o/pico@v9", HubError, "o/pico has no revision v9"),
        ("o/base", FetchError, "holds no adapter"),
    ],
)
def test_a_target_that_holds_no_release_is_refused(target: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        audited(target)
