"""adapter.method exact on pairs of the demo's kind: what the card says to do gives the released ones in every bit."""

import contextlib
import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from publisher.adapters.loading import quiet
from publisher.audits import audit
from publisher.errors import ExtractionError, FetchError
from publisher.pipeline.merge import Request, merge
from publisher.pipeline.run import Run, run
from publisher.records.extraction import Extraction
from publisher.records.progress import silent

VARIANTS = {"clef": "", "clef-flash": "clef-flash"}


@pytest.fixture(scope="module")
def exact_run(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ./demo, the demo's manifest for exact factors in ./exact.yaml, and ./dist/exact. Read it only."""
    folder = tmp_path_factory.mktemp("exact")
    (folder / "demo").symlink_to(small_run / "demo")
    shutil.copy(small_run / "demo.yaml", folder / "exact.yaml")
    _write_manifest(folder, dtype="float32", residual=True)
    with contextlib.chdir(folder):
        run(Run(Path("exact.yaml"), Path("dist"), device="cpu", dry_run=True), silent)
    return folder


def _write_manifest(folder: Path, **adapter: object) -> None:
    manifest = yaml.safe_load((folder / "exact.yaml").read_text(encoding="utf-8"))
    for variant in manifest["variants"]:
        variant["adapter"] |= {"method": "exact"} | adapter
    (folder / "exact.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False), encoding="utf-8")


@pytest.fixture
def own_exact_run(exact_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run to spoil, in the working folder."""
    shutil.copytree(exact_run, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _model(folder: Path) -> Any:
    architecture: Any = transformers.Qwen3_5ForConditionalGeneration
    return architecture.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()


def _merged(run_folder: Path, name: str) -> Any:
    """Base + adapter, merged by PEFT, and then what the card says."""
    adapter = run_folder / "dist" / "exact" / VARIANTS[name]
    with quiet():
        merged = peft.PeftModel.from_pretrained(_model(run_folder / "demo" / f"{name}-base"), adapter)
        merged = merged.merge_and_unload()
    with contextlib.chdir(adapter):
        exec(_snippet(run_folder), {"merged": merged})  # noqa: S102 - the card's own code is what is tested
    return merged


def _snippet(run_folder: Path) -> str:
    card = (run_folder / "dist" / "exact" / "README.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "residual.safetensors" in code)
    lines = [line.removeprefix("  ") for line in code.splitlines()]
    assert len(lines) <= 10
    return "\n".join(lines)


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def _checkpoint(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_the_merged_checkpoint_is_the_released_one_in_every_bit_and_so_are_its_logits(
    exact_run: Path, name: str
) -> None:
    merged, released = _merged(exact_run, name), _model(exact_run / "demo" / name)
    found, expected = _digests(merged.state_dict()), _digests(_checkpoint(exact_run / "demo" / name))
    assert {key: found.get(key) for key in expected} == expected
    ids = torch.randint(200, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(merged(input_ids=ids).logits, released(input_ids=ids).logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_publish_merge_writes_the_released_tensors_in_every_bit(own_exact_run: Path, name: str) -> None:
    done = merge(Request(Path("exact.yaml"), Path("dist"), f"{VARIANTS[name]}/", Path("whole")), silent)
    found, expected = _digests(_checkpoint(own_exact_run / "whole")), _digests(_checkpoint(Path("demo", name)))
    assert {key: found.get(key) for key in expected} == expected
    assert done.released


@pytest.mark.parametrize("folder", VARIANTS.values(), ids=VARIANTS)
def test_the_summary_says_how_much_more_than_the_svd_comes_back(exact_run: Path, folder: str) -> None:
    summary = Extraction.read(exact_run / "dist" / "exact" / folder / "extraction.json").summary
    recovery = summary.recovery
    assert recovery is not None
    assert recovery.svd_share < 0.9
    assert recovery.share == recovery.float32_share > 0.9995
    assert (recovery.short, recovery.rank_beyond) == (0, 0)
    assert recovery.arithmetic == {"one rounding": summary.linears}
    assert recovery.residual is not None
    assert recovery.residual_elements is not None
    kept = load_file(exact_run / "dist" / "exact" / folder / "residual.safetensors")
    assert recovery.residual_elements == sum(len(kept[key]) for key in kept if key.endswith(".index"))


@pytest.mark.long
def test_an_audit_finds_nothing_wrong_with_it_not_even_in_depth(own_exact_run: Path) -> None:
    found = audit("dist/exact", deep=True, work=own_exact_run / "work", device="cpu", progress=silent)
    assert found.failed == ()


def test_validation_sees_a_residual_that_was_changed(own_exact_run: Path) -> None:
    path = own_exact_run / "dist" / "exact" / "residual.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith(".value"))
    save_file(tensors | {key: tensors[key] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(FetchError, match=r"residual\.safetensors changed since"):
        run(Run(Path("exact.yaml"), Path("dist"), device="cpu", first="validate", last="validate"), silent)


@pytest.mark.long
def test_a_residual_that_is_not_asked_for_any_more_goes(own_exact_run: Path) -> None:
    _write_manifest(own_exact_run, dtype="float32", residual=False)
    options = Run(
        Path("exact.yaml"), Path("dist"), device="cpu", dry_run=True, variants=("clef-flash/",), last="extract"
    )
    run(options, silent)
    assert not (own_exact_run / "dist" / "exact" / "clef-flash" / "residual.safetensors").exists()


def test_a_source_in_float32_has_no_intervals_to_go_by(own_exact_run: Path) -> None:
    wide = own_exact_run / "wide"
    shutil.copytree(own_exact_run / "demo" / "clef-flash", wide)
    for file in wide.glob("*.safetensors"):
        save_file({key: tensor.float() for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    manifest = yaml.safe_load(Path("exact.yaml").read_text(encoding="utf-8"))
    manifest["variants"][1]["source"] = {"path": "wide"}
    Path("exact.yaml").write_text(yaml.safe_dump(manifest), encoding="utf-8")
    with pytest.raises(ExtractionError, match="of the source in F32") as refused:
        run(Run(Path("exact.yaml"), Path("dist"), device="cpu", variants=("clef-flash/",), last="extract"), silent)
    assert refused.value.next_step == "set adapter.method: svd in the manifest"
