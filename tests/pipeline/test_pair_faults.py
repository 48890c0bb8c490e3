"""Pairs that hold no LoRA which could be taken out: each is refused, with every tensor concerned in one report.

What a user reads stands in tests/checkpoints_bad/pairs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from publisher.engines.local import Local
from publisher.errors import ExtractionError
from publisher.manifest.schema import AdapterSettings, Expectation, Reference, Variant
from publisher.pipeline.stages.extract import extract
from publisher.pipeline.stages.fetch import fetch
from publisher.records.extraction import Extraction
from publisher.records.progress import silent
from tests.manifests import ADAPTER

MESSAGES = Path(__file__).parents[1] / "checkpoints_bad" / "pairs"
Q, DOWN = "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.down_proj.weight"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
CARRIERS = [part.format(layer) for layer in range(4) for part in (Q, DOWN)]


def weights() -> dict[str, torch.Tensor]:
    """A model in little: linears, and one of each kind of tensor that a LoRA cannot carry."""
    generator = torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(CARRIERS, (24, 16))
    shapes |= {
        "model.embed_tokens.weight": (32, 16),
        "model.norm.weight": (16,),
        "model.layers.0.self_attn.q_proj.bias": (24,),
        "model.layers.0.input_layernorm.weight": (16,),
        "lm_head.weight": (32, 16),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def merged(base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base with a rank-2 update in the linears of the layers."""
    generator = torch.Generator().manual_seed(8)
    update = {
        name: torch.randn(24, 2, generator=generator) @ torch.randn(2, 16, generator=generator) for name in CARRIERS
    }
    return base | {name: (base[name].float() + update[name]).bfloat16() for name in CARRIERS}


@dataclass
class Case:
    """What a recipe may spoil."""

    base: dict[str, torch.Tensor] = field(default_factory=weights)
    source: dict[str, torch.Tensor] = field(default_factory=lambda: merged(weights()))
    ignore: tuple[str, ...] = ()
    rank: object = "auto"
    expect: Expectation = field(default_factory=lambda: Expectation(linears=8, layers="0-3"))


def extracted(case: Case) -> Extraction:
    for name, content in (("base", case.base), ("source", case.source)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(CONFIG))
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, Path(name, "model.safetensors"))
    variant = Variant(
        path="/",
        label="Small",
        source=Reference(path="source"),
        base=Reference(path="base"),
        model_class="LlamaForCausalLM",
        adapter=AdapterSettings.model_validate({**ADAPTER, "rank": case.rank, "ignore": case.ignore}),
        expect=case.expect,
    )
    source, base = (fetch(ref, memo=Path("memo.json"), progress=silent) for ref in (variant.source, variant.base))
    places = {"staged": Path("staged"), "work": Path("work")}
    return extract(variant, base=base, tuned=source, **places, engine=Local(torch.device("cpu")), progress=silent)


@pytest.fixture(autouse=True)
def work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages then name no folder of this machine."""
    monkeypatch.chdir(tmp_path)


def test_the_pair_is_sound_before_it_is_spoilt() -> None:
    summary = extracted(Case()).summary
    assert (summary.linears, summary.layers, summary.layers_total, summary.rank) == (8, "0-3", 4, 2)
    assert summary.tensors_equal == 5


# --- the faults ---------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[Case], None]] = {}


def fault(recipe: Callable[[Case], None]) -> Callable[[Case], None]:
    """Name a recipe that spoils a sound pair."""
    FAULTS[recipe.__name__] = recipe
    return recipe


@fault
def several_mismatches_in_one_report(case: Case) -> None:
    case.source[CARRIERS[0]] = case.source[CARRIERS[0]][:20]
    case.source["lm_head.weight"] = case.source["lm_head.weight"][:, :8]
    case.source["model.norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    case.source["score.weight"] = torch.zeros(2, 16)
    del case.source[CARRIERS[5]]


@fault
def tensor_in_the_source_alone(case: Case) -> None:
    case.source["model.layers.4.self_attn.q_proj.weight"] = torch.zeros(24, 16)


@fault
def one_of_a_family_missing_in_the_source(case: Case) -> None:
    del case.source[CARRIERS[3]]


@fault
def base_equal_to_source(case: Case) -> None:
    case.source = case.base


@fault
def everything_that_differs_is_ignored(case: Case) -> None:
    case.ignore = ("model.layers.*",)


@fault
def changes_that_a_lora_cannot_carry(case: Case) -> None:
    for name in case.source.keys() - set(CARRIERS) - {"lm_head.weight"}:
        case.source[name] = case.source[name] * 2


@fault
def nan_and_infinity(case: Case) -> None:
    spoilt = case.source[CARRIERS[0]].clone()
    spoilt[0, :3], spoilt[1, 0] = torch.nan, torch.inf
    case.source[CARRIERS[0]] = spoilt
    case.base[CARRIERS[0]] = case.base[CARRIERS[0]].clone()
    case.base[CARRIERS[0]][5, 5] = -torch.inf


@fault
def base_too_large_for_the_sources_dtype(case: Case) -> None:
    case.base[CARRIERS[0]] = case.base[CARRIERS[0]] * 1e6
    case.source[CARRIERS[0]] = (1.001 * case.source[CARRIERS[0]].float()).half()  # of values that bfloat16 has not


@fault
def fewer_linears_than_expected(case: Case) -> None:
    case.source[CARRIERS[2]] = case.base[CARRIERS[2]]


@fault
def other_layers_than_expected(case: Case) -> None:
    case.source |= {name: case.base[name] for name in CARRIERS[2:4]}
    case.expect = Expectation(layers="0-3")


@fault
def linears_and_layers_not_as_expected(case: Case) -> None:
    case.expect = Expectation(linears=186, layers="40-63")


@fault
def ignore_that_matches_nothing(case: Case) -> None:
    case.ignore = ("lm_head.*", "visual.*", "model.norm.wieght")


@fault
def an_update_that_is_rounding_noise(case: Case) -> None:
    bits = case.base[CARRIERS[1]].view(torch.int16).clone()
    bits[0, 0] ^= 1
    bits[5, 7] ^= 1
    case.source[CARRIERS[1]] = bits.view(torch.bfloat16)


@pytest.mark.parametrize("recipe", FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_pair_is_refused_in_these_words(
    recipe: Callable[[Case], None], golden: Callable[[Path, str], None]
) -> None:
    case = Case()
    recipe(case)
    with pytest.raises(ExtractionError) as raised:
        extracted(case)
    golden(MESSAGES / f"{recipe.__name__}.txt", f"error: {raised.value}\n")
    assert not Path("staged").exists(), "nothing is staged of a faulty pair"


def test_every_message_on_file_has_a_recipe() -> None:
    assert {path.stem for path in MESSAGES.glob("*.txt")} == FAULTS.keys()


# --- what the manifest leaves out knowingly -----------------------------------------------------------------


def test_tensors_that_the_manifest_ignores_are_left_out_and_named_with_the_reason() -> None:
    case = Case(ignore=("model.norm.*", "*.input_layernorm.weight", "score.weight", "lm_head.weight", CARRIERS[7]))
    case.source["model.norm.weight"] = case.source["model.norm.weight"] * 2
    case.source["model.layers.0.input_layernorm.weight"] = torch.zeros(16, dtype=torch.bfloat16)
    case.source["score.weight"] = torch.zeros(2, 16)
    case.source["lm_head.weight"] = case.source["lm_head.weight"][:, :8]
    case.expect = Expectation(linears=7, layers="0-3")
    extraction = extracted(case)
    assert [(tensor.name, tensor.reason) for tensor in extraction.summary.left_out] == [
        ("lm_head.weight", "is 32x8 in the source and 32x16 in the base"),
        ("score.weight", "is in the source alone"),
        ("model.layers.0.input_layernorm.weight", "differs"),
        (CARRIERS[7], "differs"),
        ("model.norm.weight", "differs"),
    ]
    assert extraction.settings.ignore == case.ignore
    assert CARRIERS[7].removesuffix(".weight") not in {module.name for module in extraction.modules}


def test_tensors_of_a_family_that_the_source_lacks_are_reported_and_no_fault() -> None:
    case = Case()
    case.base |= {"mtp.fc.weight": torch.zeros(2, 2), "mtp.norm.weight": torch.zeros(2)}
    assert extracted(case).summary.tensors_base_only == ("mtp.fc.weight", "mtp.norm.weight")


def test_a_base_in_float32_is_compared_in_the_sources_dtype() -> None:
    case = Case()
    case.base = {name: tensor.float() * (1 + 1e-5) for name, tensor in case.base.items()}
    summary = extracted(case).summary
    assert (summary.linears, summary.rank, summary.tensors_equal) == (8, 2, 5)


def test_a_module_whose_update_is_noise_can_be_carried_by_a_fixed_rank() -> None:
    case = Case(rank=2)
    an_update_that_is_rounding_noise(case)
    assert extracted(case).summary.linears == 8
