"""Reading back: a small real adapter on the local Hub, whole and damaged."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, close_session, constants

from publisher.errors import PushError
from publisher.hub.client import Destination
from publisher.hub.local import LocalHub
from publisher.manifest.reading import load_manifest
from publisher.pipeline.run import Run, run
from publisher.pipeline.stages.push import Target, push
from publisher.pipeline.stages.read_back import Published, read_back
from publisher.records.progress import silent
from publisher.records.publication import ReadBack
from publisher.release.commitplan import staged_files
from tests.models import add_update, small_llama

REPO = "team/adapter"
ADAPTER = "small/adapter_model.safetensors"
MANIFEST = """
version: 1
repo: team/adapter
license: mit
variants:
  - path: small/
    label: Tuned
    source: {path: tuned}
    base: {path: base}
    model_class: LlamaForCausalLM
    adapter: {method: svd, rank: 2, dtype: bfloat16, layout: uniform, task_type: CAUSAL_LM}
card: {template: lora_card.md.j2, title: tuned-lora, summary: Taken back out.}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a fine-tune of rank 2 and, in dist/m, the release made from them."""
    folder = tmp_path_factory.mktemp("readback")
    model = small_llama({"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, seed=0)
    model.save_pretrained(folder / "base")
    add_update(model, r"[qo]_proj", rank=2, scale=0.1)
    model.save_pretrained(folder / "tuned")
    (folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(Run(Path("m.yaml"), Path("dist"), device="cpu", last="card"), silent)
    return folder


@pytest.fixture
def hub(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub without the release; large files go by LFS."""
    monkeypatch.chdir(work)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with LocalHub(tmp_path / "hub") as running:
        yield running
        close_session()


def publish(hub: LocalHub, staged: Path) -> Callable[[], ReadBack]:
    """Push the staged tree; gives what reads back the head."""
    manifest = load_manifest(Path("m.yaml"))
    at = Destination(hub.endpoint, hub.token, rehearsal=True)
    push(manifest, staged, target=Target(at))
    files = staged_files(manifest, staged)
    return lambda: read_back(
        manifest,
        staged,
        published=Published(REPO, hub.repository(REPO).head(), files=files, at=at),
        progress=silent,
    )


def commit(hub: LocalHub, operation: CommitOperationAdd | CommitOperationDelete) -> None:
    HfApi(endpoint=hub.endpoint, token=hub.token).create_commit(REPO, [operation], commit_message="damage")


# huggingface_hub's LFS upload hands httpx2 a file in a way that httpx2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def test_a_release_is_read_back_whole_and_its_adapter_loads_by_repository_id(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look = publish(hub, Path("dist/m"))
    before = len(hub.requests)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "never"))
    assert look() == ReadBack(files=8, adapters=1)
    fetched = [line for line in hub.requests[before:] if "resolve" in line and "small/adapter" in line]
    assert {line.split()[1].rpartition("/")[2] for line in fetched} == {ADAPTER[6:], "adapter_config.json"}
    assert not (tmp_path / "never").exists()


def test_a_file_that_is_gone_is_named(hub: LocalHub) -> None:
    look = publish(hub, Path("dist/m"))
    commit(hub, CommitOperationDelete("small/extraction.json"))
    with pytest.raises(PushError, match=r"is published, but(?s:.*)small/extraction\.json is missing"):
        look()


@pytest.mark.parametrize("path", ["README.md", ADAPTER])
def test_a_file_of_the_same_size_with_other_bytes_is_named(hub: LocalHub, path: str) -> None:
    look = publish(hub, Path("dist/m"))
    content = bytearray(Path("dist/m", path).read_bytes())
    content[-2] ^= 1
    commit(hub, CommitOperationAdd(path, bytes(content)))
    with pytest.raises(PushError, match=rf"{path}(: the Hub lists \d+ bytes, SHA-256| has other bytes)"):
        look()


def test_bytes_that_are_not_those_the_hub_lists_are_found(hub: LocalHub, tmp_path: Path) -> None:
    look = publish(hub, Path("dist/m"))
    (stored,) = (path for path in (tmp_path / "hub/lfs").rglob("*") if path.is_file())
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.chmod(0o600)
    stored.write_bytes(content)
    with pytest.raises(PushError, match=f"{ADAPTER} has other bytes than the staged file"):
        look()


@pytest.mark.usefixtures("quick_read_back")
def test_an_adapter_that_peft_loads_in_part_is_found(hub: LocalHub, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    for path in ("README.md", "manifest.yaml", "small/extraction.json", ADAPTER):
        (staged / path).parent.mkdir(parents=True, exist_ok=True)
        (staged / path).write_bytes(Path("dist/m", path).read_bytes())
    config = json.loads(Path("dist/m/small/adapter_config.json").read_text())
    config["target_modules"] = [name for name in config["target_modules"] if not name.endswith("q_proj")]
    (staged / "small/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(PushError, match=r"q_proj\.lora_A\.weight is in the file and reaches no parameter"):
        publish(hub, staged)()


def test_a_process_that_dies_is_told_with_its_last_line(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look = publish(hub, Path("dist/m"))
    (tmp_path / "peft.py").write_text("raise ImportError('no peft today')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PushError, match=r"ended with 1: ImportError: no peft today.*the commit is published"):
        look()
