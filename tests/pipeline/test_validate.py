"""Validate: a good adapter passes, and each kind of damage is found and named.

Validation looks at digests first. So where a test means a later check, `spoilt` brings extraction.json's digests in
line with the damage.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from publisher.adapters.function_check import require_function
from publisher.adapters.loading import AdapterLocation, load_adapter, quiet, whole_model
from publisher.checkpoints.headers import read_headers
from publisher.checkpoints.reading import TensorReader
from publisher.engines.local import Local
from publisher.errors import ValidationError
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Variant
from publisher.numerics.merge_quality import merge_quality
from publisher.pipeline.stages.fetch import fetch
from publisher.pipeline.stages.validate import validate
from publisher.records.extraction import Extraction
from publisher.records.files import packaged_folder, sha256_of
from publisher.records.progress import silent
from publisher.records.validation import Validation

FLASH = load_manifest(packaged_folder("manifests") / "demo.yaml").variants[1]
STAGED = Path("dist/demo/clef-flash")
CONFIG, ADAPTER, EXTRACTION = (
    STAGED / name for name in ("adapter_config.json", "adapter_model.safetensors", "extraction.json")
)
MODULE = "model.language_model.layers.3.self_attn.q_proj"
NARROW = "model.language_model.layers.0.linear_attn.in_proj_a"
A, B = (f"base_model.model.{MODULE}.lora_{side}.weight" for side in "AB")

pytestmark = pytest.mark.usefixtures("own_small_run")


def validated(variant: Variant = FLASH) -> Validation:
    source, base = (fetch(ref, memo=Path("memo.json"), progress=silent) for ref in (variant.source, variant.base))
    extraction = Extraction.read(EXTRACTION)
    return validate(
        variant, extraction, base=base, tuned=source, staged=STAGED, engine=Local(torch.device("cpu")), progress=silent
    )


def refused(variant: Variant = FLASH) -> str:
    with pytest.raises(ValidationError) as raised:
        validated(variant)
    return str(raised.value)


def spoilt(
    *,
    tensors: Callable[[dict[str, torch.Tensor]], object] = lambda _: None,
    config: Callable[[dict[str, Any]], object] = lambda _: None,
    extraction: Callable[[dict[str, Any]], object] = lambda _: None,
) -> None:
    """Change the staged files in place, and extraction.json's digests with them."""
    weights, settings, claims = load_file(ADAPTER), json.loads(CONFIG.read_text()), json.loads(EXTRACTION.read_text())
    tensors(weights)
    config(settings)
    extraction(claims)
    save_file(weights, ADAPTER, metadata={"format": "pt"})
    CONFIG.write_text(json.dumps(settings))
    for field, file in (("adapter", ADAPTER), ("config", CONFIG)):
        claims["summary"][field] |= {"size": file.stat().st_size, "sha256": sha256_of(file)}
    EXTRACTION.write_text(json.dumps(claims))


def module_of(claims: dict[str, Any], name: str = MODULE) -> dict[str, Any]:
    found: dict[str, Any] = next(module for module in claims["modules"] if module["name"] == name)
    return found


# --- a good adapter -----------------------------------------------------------------------------------------


def test_a_good_adapter_passes_and_leads_to_the_sources_logits() -> None:
    seen = validated()
    assert (seen.path, seen.modules, seen.tensors) == ("clef-flash/", 31, 62)
    assert seen.largest_claim_difference < 1e-5
    assert seen.function is not None
    assert seen.function.ratio < 0.05
    assert seen.function.base_distance > 10 * seen.function.distance
    assert seen.function_skipped is None


def test_where_memory_does_not_suffice_the_logits_are_skipped_and_that_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("publisher.adapters.function_check._MEMORY_SHARE", 1e-9)
    seen = validated()
    assert seen.function is None
    assert seen.function_skipped is not None
    assert re.fullmatch(
        r"the model needs \d\.\d GB in float32 and 0\.0 GB of memory can be used", seen.function_skipped
    )


# --- damage to the files ------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_weights_is_found_by_digest() -> None:
    content = bytearray(ADAPTER.read_bytes())
    content[-1] ^= 1
    ADAPTER.write_bytes(content)
    expected = Extraction.read(EXTRACTION).summary.adapter.sha256[:12]
    message = refused()
    assert message.startswith(f"{ADAPTER} has SHA-256 {sha256_of(ADAPTER)[:12]}…. Expected {expected}…")
    assert message.endswith("Next: publish extract --manifest MANIFEST.")


@pytest.mark.parametrize("file", [ADAPTER, CONFIG], ids=lambda file: file.name)
def test_a_missing_file_is_named(file: Path) -> None:
    file.unlink()
    assert refused().startswith(f"{file} does not exist. Next: publish extract")


def _other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A] = tensors[A][:8].contiguous()


def _other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A] = tensors[A].float()


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[B][0, 0] = torch.nan


def _zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors[B] = torch.zeros_like(tensors[B])


def _other_prefix(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A.replace("base_model.model.", "base_model.")] = tensors.pop(A)


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (lambda tensors: tensors.pop(A), [f"{A} is missing"]),
        (lambda tensors: tensors.update({"lora.extra": torch.ones(1)}), ["lora.extra belongs to no module"]),
        (_other_shape, [f"{A} is (8, 64) instead of (16, 64)"]),
        (_other_dtype, [f"{A} is torch.float32 instead of bfloat16"]),
        (_nan, [f"{B} holds NaN or infinity"]),
        (_zero, [f"{B} is all zero"]),
        (_other_prefix, [f"{A} is missing", f"base_model.{MODULE}.lora_A.weight belongs to no module"]),
    ],
    ids=["missing", "extra", "shape", "dtype", "nan", "zero", "prefix"],
)
def test_damage_to_a_tensor_is_named(damage: Callable[[dict[str, torch.Tensor]], object], lines: list[str]) -> None:
    spoilt(tensors=damage)
    message = refused().splitlines()
    assert message[0] == f"{ADAPTER} does not hold what extraction.json lists:"
    assert message[1:-1] == [f"  {line}" for line in lines]


def test_all_damaged_tensors_are_named_in_one_report() -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        _nan(tensors)
        _other_shape(tensors)
        tensors.pop(next(iter(tensors)))

    spoilt(tensors=damage)
    assert len(refused().splitlines()) == 5


# --- what PEFT would load in part ---------------------------------------------------------------------------


def test_a_scaling_other_than_one_is_found() -> None:
    spoilt(config=lambda config: config.update(alpha_pattern={}))
    message = refused()
    assert message.startswith(f"PEFT does not load {STAGED} whole on Qwen3_5ForConditionalGeneration:\n")
    assert f"{NARROW} has scaling 2.0 instead of 1" in message
    assert message.count("has scaling 2.0 instead of 1") == 6, "all narrow modules are concerned"


def test_a_target_without_tensors_is_found_though_peft_loads_it() -> None:
    extra = "model.visual.blocks.0.attn.proj"
    spoilt(config=lambda config: config["target_modules"].append(extra))
    message = refused()
    assert f"base_model.model.{extra}.lora_A.weight is a parameter without a tensor in the file" in message


def test_a_tensor_whose_module_is_no_target_is_found() -> None:
    spoilt(config=lambda config: config["target_modules"].remove(MODULE))
    assert f"{A} is in the file and reaches no parameter" in refused()


def test_a_target_that_the_model_does_not_have_is_found() -> None:
    lost = "model.language_model.layers.99.self_attn.q_proj"
    spoilt(
        tensors=lambda t: [t.update({key.replace(MODULE, lost): t.pop(key)}) for key in (A, B)],
        config=lambda c: c.update(target_modules=[lost if name == MODULE else name for name in c["target_modules"]]),
        extraction=lambda claims: module_of(claims).update(name=lost),
    )
    assert f"{lost} is no module of Qwen3_5ForConditionalGeneration that PEFT adapts" in refused()


def test_the_text_only_class_is_refused_and_the_right_one_named() -> None:
    message = refused(FLASH.model_copy(update={"model_class": "Qwen3_5ForCausalLM"}))
    assert message == (
        "Qwen3_5ForCausalLM is not for the base's config.json, which is a Qwen3_5Config. "
        "Expected Qwen3_5ForConditionalGeneration, as config.json says. Next: correct model_class in the manifest."
    )


def test_a_class_without_the_head_is_refused_since_its_modules_go_by_other_names() -> None:
    message = refused(FLASH.model_copy(update={"model_class": "Qwen3_5Model"}))
    assert f"{NARROW} is no module of Qwen3_5Model that PEFT adapts" in message
    assert "Next: correct model_class in the manifest" in message


@pytest.mark.parametrize("name", ["Qwen9ForCausalLM", "Qwen3_5Config", "AutoModelForCausalLM"])
def test_what_is_no_model_class_of_transformers_is_refused(name: str) -> None:
    assert f"has no model class {name}" in refused(FLASH.model_copy(update={"model_class": name}))


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "word"), [("relative_error", "error"), ("exact_share", "exact share")])
def test_an_altered_claim_is_found(field: str, word: str) -> None:
    true = module_of(json.loads(EXTRACTION.read_text()))[field]
    spoilt(extraction=lambda claims: module_of(claims).update({field: true * 0.98}))
    message = refused()
    assert "base + adapter differs from what extraction.json claims" in message
    assert f"{MODULE}: {word} {true:.6g}, claimed {true * 0.98:.6g}" in message


def test_a_summary_that_does_not_follow_from_the_modules_is_found() -> None:
    spoilt(extraction=lambda claims: claims["summary"].update(exact_share=0.99))
    assert "summary.exact_share is 0.99; it comes out as 0.7" in refused()


def test_factors_of_another_module_are_found_by_their_numbers() -> None:
    other = A.replace("q_proj", "k_proj")  # of the same input, and the same rank
    spoilt(tensors=lambda t: t.update({A: t[other].clone()}))
    assert re.search(rf"{re.escape(MODULE)}: error 1\.\d+, claimed 0\.0\d+", refused())


def test_an_adapter_for_another_base_is_found_by_its_numbers() -> None:
    base = Path("other-base")
    base.mkdir()
    for file in Path("demo/clef-flash-base").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    shard = base / json.loads((base / "model.safetensors.index.json").read_text())["weight_map"][f"{MODULE}.weight"]
    weights = load_file(shard)
    weights[f"{MODULE}.weight"] *= 1.25
    save_file(weights, shard, metadata={"format": "pt"})
    message = refused(FLASH.model_copy(update={"base": FLASH.base.model_copy(update={"path": "other-base"})}))
    assert f"{MODULE}: error " in message
    assert len([line for line in message.splitlines() if ": error " in line]) == 1


# --- function -----------------------------------------------------------------------------------------------


def test_an_adapter_that_changes_nothing_is_found_even_if_its_claims_admit_it() -> None:
    def weaken(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            tensor.mul_(1e-6 if ".lora_B." in key else 1)

    def admit(claims: dict[str, Any]) -> None:
        weights = load_file(ADAPTER)
        weaken(weights)
        headers = (read_headers(Path(reference.where)) for reference in (FLASH.base, FLASH.source))
        bases, sources = (TensorReader(header) for header in headers)
        with bases, sources:
            for module in claims["modules"]:
                key, name = f"base_model.model.{module['name']}", f"{module['name']}.weight"
                b, a = (weights[f"{key}.lora_{half}.weight"] for half in "BA")
                quality = merge_quality(base=bases.read(name), tuned=sources.read(name), b=b, a=a)
                share = quality.exact_elements / (module["shape"][0] * module["shape"][1])
                module.update(relative_error=quality.relative_error, exact_share=share)

    spoilt(tensors=weaken, extraction=admit)
    message = refused()
    assert re.match(r"Clef-flash in small: the logits of base \+ adapter are [\d.]+ from the source's", message)
    assert "Expected less than 50% of the base's distance" in message


def test_an_adapter_of_the_wrong_sign_is_further_from_the_source_than_the_base_is() -> None:
    source, base = (fetch(ref, memo=Path("memo.json"), progress=silent) for ref in (FLASH.source, FLASH.base))
    spoilt(tensors=lambda tensors: [tensor.neg_() for key, tensor in tensors.items() if ".lora_B." in key])
    with quiet(), pytest.raises(ValidationError, match="Expected less than 50% of the base's distance"):
        require_function(FLASH, Extraction.read(EXTRACTION), base=base, tuned=source, staged=STAGED)


def test_what_peft_warns_of_is_an_error() -> None:
    spoilt(tensors=lambda tensors: tensors.pop(A))
    with quiet():
        model = whole_model(FLASH.model_class, fetch(FLASH.base, memo=Path("memo.json"), progress=silent).folder)
        complaints = load_adapter(model, AdapterLocation(STAGED))[1]
    assert len(complaints) == 1
    assert "missing adapter keys" in complaints[0]
