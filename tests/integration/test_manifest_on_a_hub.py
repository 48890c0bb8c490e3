"""`new` and `pin` against a Hub: the real client, over HTTP, with the local Hub at the other end."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import save_file

from publisher.errors import FetchError, HubError
from publisher.hub.client import resolve_revision
from publisher.hub.local import LocalHub
from publisher.manifest.new import new_manifest
from publisher.manifest.pin import pin
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Manifest, Reference
from publisher.pipeline.stages.fetch import fetch
from publisher.records.progress import Octets, silent

WEIGHTS = {"model.layers.0.q_proj.weight": (8, 4), "lm_head.weight": (6, 4)}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    """A Hub that holds o/tuned (two shards, a licence), o/base (one file, tag v1) and o/pickled (no safetensors)."""
    folder = tmp_path_factory.mktemp("hub")
    with LocalHub(folder / "data") as running, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", running.endpoint)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setenv("HF_TOKEN", running.token)
        _upload("o/tuned", _sharded(folder / "tuned"))
        _upload("o/base", _single(folder / "base"))
        HfApi().create_tag("o/base", tag="v1")
        (folder / "pickled").mkdir()
        (folder / "pickled/pytorch_model.bin").write_bytes(b"")
        _upload("o/pickled", folder / "pickled")
        yield running


def _upload(repo: str, folder: Path) -> None:
    HfApi().create_repo(repo)
    HfApi().upload_folder(repo_id=repo, folder_path=folder)


def _single(folder: Path) -> Path:
    folder.mkdir()
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in WEIGHTS.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


def _sharded(folder: Path) -> Path:
    _single(folder)
    (folder / "model.safetensors").unlink()
    for index, (name, shape) in enumerate(WEIGHTS.items()):
        save_file({name: torch.ones(shape, dtype=torch.bfloat16)}, folder / f"model-{index}.safetensors")
    weight_map = {name: f"model-{index}.safetensors" for index, name in enumerate(WEIGHTS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tuned\n")
    return folder


def written(text: str, folder: Path) -> Manifest:
    (folder / "m.yaml").write_text(text, encoding="utf-8")
    return load_manifest(folder / "m.yaml")


@pytest.mark.usefixtures("hub")
def test_a_download_is_told_in_bytes_until_all_of_them_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    reference = Reference(repo="o/tuned", revision=resolve_revision("o/tuned", "main"))
    told: list[tuple[str, int, int]] = []

    def listen(what: str, done: int = 0, total: int = 0) -> None:
        told.append((what, done, total))

    found = fetch(reference, memo=tmp_path / "memo.json", progress=listen)
    size = sum(file.size for file in found.checkpoint.files if file.name.startswith("model-"))
    downloads = [(done, total) for what, done, total in told if what.startswith("downloading o/tuned model-")]
    assert downloads[0] == (0, size)
    assert downloads[-1] == (size, size)
    assert all(isinstance(total, Octets) for _, total in downloads)
    again: list[str] = []
    fetch(reference, memo=tmp_path / "memo.json", progress=lambda what, _done=0, _total=0: again.append(what))
    assert [what for what in again if "downloading" in what] == []


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("sharded", [True, False], ids=["shards", "one file"])
def test_what_a_repository_is_gets_named_before_its_weights_are_downloaded(sharded: bool, tmp_path: Path) -> None:
    packed, repo = (_sharded if sharded else _single)(tmp_path / "packed"), f"o/packed-{sharded}".lower()
    name = "model.layers.0.q_proj.weight.absmax"
    save_file({name: torch.ones(8)}, packed / ("model-0.safetensors" if sharded else "model.safetensors"))
    if sharded:
        index = {"weight_map": {name: "model-0.safetensors", "lm_head.weight": "model-1.safetensors"}}
        (packed / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "README.md").write_text("---\nbase_model: [o/base]\n---\n")
    _upload(repo, packed)
    told = rf"{repo}@[0-9a-f]{{8}} is quantised: bitsandbytes \(4-bit\).*\(its card names o/base\)"
    reference = Reference(repo=repo, revision=resolve_revision(repo, "main"))
    for read in (
        lambda: new_manifest(tuned="o/tuned", base=repo),
        lambda: new_manifest(tuned=repo, base="o/base"),
        lambda: fetch(reference, memo=tmp_path / "memo.json", progress=silent),
        lambda: fetch(reference, memo=tmp_path / "memo.json", progress=silent, stream=True),
    ):
        with pytest.raises(FetchError, match=told):
            read()
    assert not list(Path(constants.HF_HUB_CACHE).glob(f"models--o--{repo[2:]}/snapshots/*/*.safetensors"))


@pytest.mark.usefixtures("hub")
def test_an_adapters_repository_is_named_though_it_has_no_config(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    _upload("o/adapter", tmp_path / "adapter")
    reference = Reference(repo="o/adapter", revision=resolve_revision("o/adapter", "main"))
    for read in (
        lambda: new_manifest(tuned="o/adapter", base="o/base"),
        lambda: fetch(reference, memo=tmp_path / "memo.json", progress=silent),
        lambda: fetch(reference, memo=tmp_path / "memo.json", progress=silent, stream=True),
    ):
        with pytest.raises(FetchError, match=r"o/adapter@[0-9a-f]{8} holds a PEFT adapter"):
            read()


@pytest.mark.usefixtures("hub")
def test_new_pins_what_it_reads_and_takes_the_stated_licence(tmp_path: Path) -> None:
    manifest = written(new_manifest(tuned="o/tuned", base="o/base@v1"), tmp_path)
    variant = manifest.variants[0]
    assert manifest.license == "mit"
    assert (variant.model_class, variant.adapter.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert variant.source.revision == resolve_revision("o/tuned", "main")
    assert variant.base.revision == resolve_revision("o/base", "v1")


def test_new_downloads_no_weight(hub: LocalHub) -> None:
    before = len(hub.requests)
    new_manifest(tuned="o/tuned", base="o/base")
    weights = [line for line in hub.requests[before:] if line.startswith("GET /lfs/")]
    assert len(weights) == 2 * 3, "of each file the length of its header, and the header"
    assert all(line.endswith(" 206") for line in weights)


@pytest.mark.usefixtures("hub")
def test_new_compares_a_local_source_with_a_base_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _single(tmp_path / "mine")
    variant = written(new_manifest(tuned="mine", base="o/base"), tmp_path).variants[0]
    assert (variant.source.path, variant.base.repo) == ("mine", "o/base")


@pytest.mark.usefixtures("hub")
def test_new_says_what_a_repository_lacks() -> None:
    with pytest.raises(HubError, match="no repository o/none"):
        new_manifest(tuned="o/none", base="o/base")
    with pytest.raises(HubError, match="o/base has no revision v9"):
        new_manifest(tuned="o/tuned", base="o/base@v9")
    with pytest.raises(FetchError, match=r"o/pickled@[0-9a-f]{8} holds only pickled weights.*pytorch_model\.bin"):
        new_manifest(tuned="o/pickled", base="o/base")


@pytest.mark.usefixtures("hub")
def test_pin_restores_the_manifest_that_new_wrote(tmp_path: Path) -> None:
    text = new_manifest(tuned="o/tuned", base="o/base")
    source, base = resolve_revision("o/tuned", "main"), resolve_revision("o/base", "v1")
    path = tmp_path / "m.yaml"
    path.write_text(text.replace(f"\n      revision: {source}", "").replace(base, "v1"), encoding="utf-8")
    assert [(done.field, done.name, done.commit) for done in pin(path, resolve_revision)] == [
        ("variants[0].source", "main", source),
        ("variants[0].base", "v1", base),
    ]
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.usefixtures("hub")
def test_a_tag_that_does_not_exist_leaves_the_manifest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(
        new_manifest(tuned="o/tuned", base="o/base").replace(resolve_revision("o/base", "main"), "v9"), encoding="utf-8"
    )
    before = path.read_bytes()
    with pytest.raises(HubError, match="o/base has no revision v9"):
        pin(path, resolve_revision)
    assert path.read_bytes() == before
