"""Extract, on the demo's pairs: what was planted is found, and written as PEFT reads it."""

import json
import math
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from publisher.cli.demo.checkpoints import RANK, VALUE_HEADS
from publisher.engines.local import Local
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import AdapterSettings, Expectation, Reference, Variant
from publisher.pipeline.stages.extract import extract
from publisher.pipeline.stages.fetch import fetch
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction, ModuleExtraction
from publisher.records.files import packaged_folder
from publisher.records.progress import Progress, silent

FILES = ("adapter_config.json", "adapter_model.safetensors", "extraction.json")
CPU = torch.device("cpu")
DEMO = load_manifest(packaged_folder("manifests") / "demo.yaml")
ROOT, FLASH = (
    variant.model_copy(update={"expect": Expectation(linears=31, layers=layers)})  # as in the small run
    for variant, layers in zip(
        load_manifest(packaged_folder("manifests") / "demo.yaml").variants, ("4-7", "0-3"), strict=True
    )
)


def with_settings(variant: Variant, **settings: Any) -> Variant:
    """The variant with some of its adapter's settings changed."""
    adapter = AdapterSettings.model_validate({**variant.adapter.model_dump(), **settings})
    return variant.model_copy(update={"adapter": adapter})


Extract = Callable[..., tuple[Extraction, Path]]


@pytest.fixture(scope="module")
def extracted(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Extract:
    """Extracts a variant in folders of its own, or in the given ones."""
    memo = tmp_path_factory.mktemp("memo") / "memo.json"

    def run(variant: Variant, *, folder: Path | None = None, progress: Progress = silent) -> tuple[Extraction, Path]:
        place = folder or tmp_path_factory.mktemp("extract")
        source, base = (snapshot(small_run, reference, memo) for reference in (variant.source, variant.base))
        places = {"staged": place / "staged", "work": place / "work"}
        return extract(
            variant, base=base, tuned=source, **places, engine=Local(CPU), progress=progress
        ), place / "staged"

    return run


def snapshot(folder: Path, reference: Reference, memo: Path) -> Snapshot:
    here = reference.model_copy(update={"path": str(folder / reference.where)})
    return fetch(here, memo=memo, progress=silent)


def named(modules: tuple[ModuleExtraction, ...], *ends: str) -> list[ModuleExtraction]:
    return [module for module in modules if module.name.endswith(ends)]


def product(adapter: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    key = f"base_model.model.{name}"
    return adapter[f"{key}.lora_B.weight"].float() @ adapter[f"{key}.lora_A.weight"].float()


# --- what is found ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[ROOT, FLASH], ids=lambda variant: variant.path)
def precise(request: pytest.FixtureRequest, extracted: Extract) -> Extraction:
    """The extraction with factors in float32, so that only the merge's rounding is left in its errors."""
    return extracted(with_settings(request.param, dtype="float32"))[0]


def test_rank_auto_finds_the_planted_rank_in_every_module(precise: Extraction) -> None:
    wide = [module for module in precise.modules if min(module.shape) > RANK]
    assert {module.rank for module in wide} == {RANK}
    assert not any(module.rank_at_least for module in wide)
    assert all(module.sigma_r > 1.25 * module.noise_edge > 1.25 * (module.sigma_next or math.inf) for module in wide)


def test_the_narrow_projections_are_carried_at_full_width_with_no_error_left(precise: Extraction) -> None:
    narrow = named(precise.modules, "in_proj_a", "in_proj_b")
    assert {module.name for module in precise.modules if min(module.shape) <= RANK} == {m.name for m in narrow}
    assert {module.rank for module in narrow} == {VALUE_HEADS}
    assert max(module.relative_error for module in narrow) < 1e-5
    assert {(module.ratio, module.sigma_next, module.expected_error) for module in narrow} == {(None, None, 0.0)}


def test_each_modules_error_is_what_the_merges_rounding_explains(precise: Extraction) -> None:
    wide = [module for module in precise.modules if min(module.shape) > RANK]
    ratios = [module.relative_error / module.expected_error for module in wide]
    assert min(ratios) > 0.9
    assert max(ratios) < 1.1


def test_the_summary_follows_from_the_modules(precise: Extraction) -> None:
    modules, summary = precise.modules, precise.summary
    elements = [math.prod(module.shape) for module in modules]
    assert summary.linears == len(modules)
    assert summary.rank == RANK
    assert [(count.rank, count.modules) for count in summary.ranks] == [
        (RANK, len(modules) - len(named(modules, "in_proj_a", "in_proj_b"))),
        (VALUE_HEADS, len(named(modules, "in_proj_a", "in_proj_b"))),
    ]
    assert summary.ranks[1].names == ("in_proj_a", "in_proj_b")
    assert summary.parameters == sum(module.rank * sum(module.shape) for module in modules)
    assert summary.relative_error.max == max(module.relative_error for module in modules)
    assert summary.rounding_floor.min == min(module.rounding_floor for module in modules)
    shares = sum(module.exact_share * count for module, count in zip(modules, elements, strict=True))
    assert summary.exact_share == pytest.approx(shares / sum(elements), rel=1e-5)


@pytest.mark.parametrize(("variant", "layers", "total"), [(ROOT, "4-7", 8), (FLASH, "0-3", 4)], ids=["/", "flash"])
def test_layers_equal_tensors_and_those_in_the_base_alone_are_told(
    small_run: Path, variant: Variant, layers: str, total: int
) -> None:
    summary = Extraction.read(small_run / "dist" / "demo" / variant.folder / "extraction.json").summary
    assert (summary.layers, summary.layers_total) == (layers, total)
    index = json.loads((small_run / variant.source.where / "model.safetensors.index.json").read_text())
    assert summary.tensors_equal + summary.linears == len(index["weight_map"])
    assert len(summary.tensors_base_only) == 15
    assert all(name.startswith("mtp.") for name in summary.tensors_base_only)


# --- what is written ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pattern(extracted: Extract) -> tuple[Extraction, Path]:
    """The smaller variant."""
    return extracted(FLASH)


@pytest.fixture(scope="module")
def uniform(extracted: Extract) -> tuple[Extraction, Path]:
    """The same in the layout `uniform`."""
    return extracted(with_settings(FLASH, layout="uniform"))


def config_in(staged: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((staged / "adapter_config.json").read_text())
    return config


def test_the_config_names_every_module_in_full_and_sorted(pattern: tuple[Extraction, Path]) -> None:
    extraction, staged = pattern
    names = [module.name for module in extraction.modules]
    assert config_in(staged)["target_modules"] == names == sorted(names)
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_the_config_says_what_peft_needs_and_no_more(pattern: tuple[Extraction, Path]) -> None:
    config = config_in(pattern[1])
    assert (config["peft_type"], config["task_type"]) == ("LORA", "FEATURE_EXTRACTION")
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["use_dora"]) == (RANK, RANK, False, False)
    assert (config["bias"], config["inference_mode"], config["lora_dropout"]) == ("none", True, 0.0)


def test_a_local_base_is_named_without_a_revision(pattern: tuple[Extraction, Path]) -> None:
    config = config_in(pattern[1])
    assert (config["base_model_name_or_path"], config["revision"]) == ("clef-flash-base", None)


def test_a_base_on_the_hub_is_named_with_its_commit(small_run: Path, tmp_path: Path) -> None:
    source, base = (snapshot(small_run, reference, tmp_path / "memo") for reference in (FLASH.source, FLASH.base))
    pinned = base.checkpoint.model_copy(update={"kind": "hub", "name": "owner/base", "revision": "c0ffee11" * 5})
    hub_base = base.model_copy(update={"checkpoint": pinned})
    places = {"staged": tmp_path / "staged", "work": tmp_path / "work"}
    extraction = extract(FLASH, base=hub_base, tuned=source, **places, engine=Local(CPU), progress=silent)
    config = config_in(tmp_path / "staged")
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/base", "c0ffee11" * 5)
    assert extraction.base == pinned


def test_layout_pattern_names_narrower_modules_in_both_patterns(pattern: tuple[Extraction, Path]) -> None:
    extraction, staged = pattern
    config = config_in(staged)
    narrow = {module.name: VALUE_HEADS for module in named(extraction.modules, "in_proj_a", "in_proj_b")}
    assert config["rank_pattern"] == config["alpha_pattern"] == narrow
    assert all(module.alpha == module.rank for module in extraction.modules)


def test_layout_uniform_pads_to_one_rank_and_names_none(uniform: tuple[Extraction, Path]) -> None:
    extraction, staged = uniform
    config = config_in(staged)
    assert (config["rank_pattern"], config["alpha_pattern"], config["r"]) == ({}, {}, RANK)
    assert {module.alpha for module in extraction.modules} == {RANK}
    assert {module.rank for module in extraction.modules} == {RANK, VALUE_HEADS}
    shapes = {tensor.shape[0 if ".lora_A." in key else 1] for key, tensor in load_file(staged / FILES[1]).items()}
    assert shapes == {RANK}
    assert extraction.summary.parameters == sum(RANK * sum(module.shape) for module in extraction.modules)


def test_both_layouts_carry_the_same_update_bit_for_bit(
    pattern: tuple[Extraction, Path], uniform: tuple[Extraction, Path]
) -> None:
    one, other = (load_file(staged / FILES[1]) for _, staged in (pattern, uniform))
    for module in pattern[0].modules:
        assert torch.equal(product(one, module.name), product(other, module.name)), module.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_the_adapter_has_the_manifests_dtype_and_one_metadata_entry(extracted: Extract, dtype: str) -> None:
    extraction, staged = extracted(with_settings(FLASH, dtype=dtype))
    with safe_open(staged / FILES[1], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert len(file.keys()) == 2 * len(extraction.modules)
        assert {file.get_tensor(key).dtype for key in file.keys()} == {getattr(torch, dtype)}  # noqa: SIM118 - a handle


def test_a_fixed_rank_is_kept_and_never_exceeds_a_modules_width(extracted: Extract) -> None:
    extraction, staged = extracted(with_settings(FLASH, rank=12))
    wide, narrow = ([m for m in extraction.modules if (min(m.shape) > 12) is is_wide] for is_wide in (True, False))
    assert {module.rank for module in wide} == {12}
    assert {module.rank for module in narrow} == {VALUE_HEADS}
    assert all(module.rank_at_least for module in wide), "the planted rank is higher, and that shows"
    assert extraction.summary.ratio is not None
    assert extraction.summary.ratio.median > 2
    assert config_in(staged)["r"] == 12


def test_what_the_manifest_ignores_stays_out_of_the_adapter_and_is_stated(extracted: Extract) -> None:
    variant = with_settings(FLASH, ignore=["*.layers.3.mlp.*"])
    variant = variant.model_copy(update={"expect": Expectation(linears=28)})
    extraction, staged = extracted(variant)
    left_out = {tensor.name for tensor in extraction.summary.left_out}
    assert left_out == {f"model.language_model.layers.3.mlp.{part}_proj.weight" for part in ("down", "gate", "up")}
    assert {tensor.reason for tensor in extraction.summary.left_out} == {"differs"}
    assert not any("layers.3.mlp" in key for key in load_file(staged / FILES[1]))
    assert extraction.settings.ignore == variant.adapter.ignore


def test_no_artefact_names_this_machine_or_the_time(pattern: tuple[Extraction, Path], small_run: Path) -> None:
    staged = pattern[1]
    for name in ("adapter_config.json", "extraction.json"):
        text = (staged / name).read_text()
        for place in (str(small_run), str(staged), str(Path.home()), platform.node()):
            assert place not in text
        assert not re.search(r"(?<![\w.])/(?!\")\w|\b20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d|digests", text)


# --- the same bytes, whatever happened on the way -----------------------------------------------------------


def interrupt_at(module: int) -> Progress:
    """Ctrl-C as the module of this number begins."""

    def listen(what: str, done: int = 0, total: int = 0) -> None:
        del total
        if what.startswith("extracting") and done == module:
            raise KeyboardInterrupt

    return listen


def content(staged: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in staged.iterdir()}


def finished(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("work/modules-*/*.safetensors")}


def test_an_interrupted_extraction_goes_on_at_the_next_module_and_ends_with_the_same_bytes(
    extracted: Extract, pattern: tuple[Extraction, Path], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        extracted(FLASH, folder=tmp_path, progress=interrupt_at(20))
    before = finished(tmp_path)
    assert len(before) == 20
    assert not (tmp_path / "staged").exists(), "nothing is staged before every module is done"
    extracted(FLASH, folder=tmp_path)
    after = finished(tmp_path)
    assert len(after) == 31
    assert {name: after[name] for name in before} == before, "finished modules are read, not made again"
    assert content(tmp_path / "staged") == content(pattern[1])


@pytest.mark.parametrize("change", [{"rank": 8}, {"dtype": "float32"}])
def test_modules_finished_with_other_settings_are_cleared_away_and_never_used(
    extracted: Extract, tmp_path: Path, change: dict[str, Any]
) -> None:
    extracted(FLASH, folder=tmp_path)
    before = finished(tmp_path)
    extracted(with_settings(FLASH, **change), folder=tmp_path)
    after = finished(tmp_path)
    assert len(list((tmp_path / "work").glob("modules-*"))) == 1
    assert before.keys() == after.keys()
    assert all(after[name] > before[name] for name in before)
    assert content(tmp_path / "staged") == content(extracted(with_settings(FLASH, **change))[1])


def test_modules_finished_from_another_checkpoint_are_never_used(
    small_run: Path, pattern: tuple[Extraction, Path], tmp_path: Path
) -> None:
    source, base = (snapshot(small_run, reference, tmp_path / "memo") for reference in (FLASH.source, FLASH.base))
    places = {"staged": tmp_path / "staged", "work": tmp_path / "work"}
    other = source.model_copy(update={"checkpoint": source.checkpoint.model_copy(update={"revision": "0" * 64})})
    with pytest.raises(KeyboardInterrupt):
        extract(FLASH, base=base, tuned=other, **places, engine=Local(CPU), progress=interrupt_at(3))
    for file in tmp_path.glob("work/modules-*/*.safetensors"):
        file.write_bytes(b"what this holds must not be read")
    extract(FLASH, base=base, tuned=source, **places, engine=Local(CPU), progress=silent)
    assert content(tmp_path / "staged") == content(pattern[1])


def test_another_layout_takes_the_finished_modules_as_they_are(
    extracted: Extract, uniform: tuple[Extraction, Path], pattern: tuple[Extraction, Path], tmp_path: Path
) -> None:
    shutil.copytree(pattern[1].parent, tmp_path, dirs_exist_ok=True)
    before = finished(tmp_path)
    extracted(with_settings(FLASH, layout="uniform"), folder=tmp_path)
    assert finished(tmp_path) == before
    assert content(tmp_path / "staged") == content(uniform[1])
