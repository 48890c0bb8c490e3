"""`publisher.extract`: an adapter from two folders, and what it refuses."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from peft import PeftModel

import publisher
from publisher.manifest.new import new_manifest


def temporary(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let scratch folders go there."""
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def extracted(models: Path, **options: Any) -> publisher.ExtractedAdapter:
    return publisher.extract(tuned=models / "tuned", base=models / "base", device="cpu", **options)


def test_the_adapter_that_was_merged_comes_out_with_its_figures(models: Path) -> None:
    result = extracted(models)
    assert (result.summary.rank, result.summary.linears, result.summary.layers) == (8, 12, "0-3")
    assert [module.rank for module in result.modules] == [8] * 12
    assert 0 < result.modules[0].relative_error < 0.01
    assert result.validation.modules == 12
    assert result.validation.function is not None
    assert result.validation.function.ratio < 0.05
    assert {"PEFT", "vLLM"} <= {one.loader for one in result.loaders if one.loads == "yes"}
    assert result.extraction.source.name == "tuned"


def test_what_is_saved_loads_with_peft_and_gives_the_tuned_model(models: Path) -> None:
    folder = extracted(models).save("adapters/mine")
    assert folder == Path("adapters/mine")
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "extraction.json"} <= names
    base = transformers.LlamaForCausalLM.from_pretrained(models / "base", dtype=torch.float32)
    tuned = transformers.LlamaForCausalLM.from_pretrained(models / "tuned", dtype=torch.float32)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected, before = tuned(tokens).logits, base(tokens).logits
        found = PeftModel.from_pretrained(base, folder)(tokens).logits
    assert (found - expected).norm() < 0.05 * (before - expected).norm()


def test_the_bytes_are_those_that_a_manifest_gives(models: Path) -> None:
    content = yaml.safe_load(new_manifest(tuned=str(models / "tuned"), base=str(models / "base")))
    Path("pair.yaml").write_text(yaml.safe_dump(content))
    publisher.run("pair.yaml", last="validate", device="cpu")
    folder = extracted(models).save("adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors", "extraction.json"):
        assert (folder / name).read_bytes() == Path("dist/pair", name).read_bytes(), name


def test_rank_method_and_what_is_ignored_are_as_asked_for(models: Path) -> None:
    assert extracted(models, rank=7).summary.rank == 7
    share = extracted(models, rank=0.9)
    assert share.summary.rank < 8
    assert share.summary.energy > 0.9
    exact = extracted(models, method="exact")
    assert exact.summary.recovery is not None
    assert extracted(models, ignore=["*.3.mlp.down_proj.weight"]).summary.linears == 11


def test_scratch_files_live_as_long_as_the_result(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = temporary(monkeypatch, Path("scratch").absolute())
    result = extracted(models)
    assert (result.folder / "adapter_model.safetensors").is_file()
    assert result.folder.is_relative_to(scratch)
    del result
    gc.collect()
    assert not list(scratch.iterdir())


def test_a_folder_for_the_work_keeps_it_for_the_next_call(models: Path) -> None:
    extracting: list[str] = []

    def hear(what: str, done: int = 0, total: int = 0) -> None:
        if what.startswith("extracting"):
            extracting.append(f"{what}, {done} of {total}")

    extracted(models, work="work", progress=hear)
    assert len(extracting) == 12
    again = extracted(models, work="work", progress=hear)
    assert len(extracting) == 12
    assert again.folder.is_relative_to("work")


@pytest.mark.parametrize("make", [lambda path: (path.mkdir(), (path / "x").touch()), Path.touch])
def test_a_folder_that_holds_something_is_left_as_it_is(models: Path, make: Any) -> None:
    make(Path("taken"))
    before = sorted(Path().rglob("*"))
    with pytest.raises(publisher.ManifestError, match="taken is there already"):
        extracted(models).save("taken")
    assert sorted(Path().rglob("*")) == before


def test_an_empty_folder_is_filled(models: Path) -> None:
    Path("empty").mkdir()
    assert (extracted(models).save("empty") / "extraction.json").is_file()


def test_a_save_that_fails_leaves_nothing(models: Path) -> None:
    result = extracted(models)
    (result.folder / "gone").symlink_to("nowhere")  # cannot be copied
    with pytest.raises(publisher.PublisherError):
        result.save("adapter")
    assert [path.name for path in Path().iterdir()] == ["models"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"rank": 0}, r"adapter.rank: 0 is not a rank"),
        ({"rank": 1.5}, r"1.5} is not a rank"),
        ({"method": "qr"}, r"adapter.method: 'qr' is not possible here; use svd or exact"),
        ({"ignore": [""]}, r"adapter.ignore\[0\]: is empty"),
        ({"device": "abacus"}, "abacus"),
        ({"engine": "abacus"}, "abacus"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_words(
    models: Path, options: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = temporary(monkeypatch, Path("scratch").absolute())
    with pytest.raises(publisher.ManifestError, match=what):
        publisher.extract(tuned=models / "tuned", base=models / "base", **options)
    assert not list(scratch.iterdir())


def test_checkpoints_that_hold_no_adapter_are_refused(models: Path) -> None:
    with pytest.raises(publisher.ExtractionError):
        publisher.extract(tuned=models / "base", base=models / "base")
    Path("nothing").mkdir()
    with pytest.raises(publisher.FetchError):
        publisher.extract(tuned="nothing", base=models / "base")


def test_a_library_s_exception_is_told_in_words_with_its_cause(models: Path) -> None:
    with pytest.raises(publisher.SystemTroubleError) as caught:
        extracted(models, work="models/base/config.json")
    assert isinstance(caught.value.__cause__, OSError)


def test_what_the_caller_s_own_callback_raises_is_left_as_it_is(models: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(what: str, done: int = 0, total: int = 0) -> None:
        if what.startswith("extracting"):
            raise EnoughError(what, done, total)

    with pytest.raises(EnoughError):
        extracted(models, progress=stop)


def test_nothing_is_printed(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extracted(models).save("adapter")
    assert capfd.readouterr() == ("", "")
