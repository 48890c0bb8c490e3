"""Experts that lie in one tensor become LoRA by PEFT's target_parameters, each with its own rank and error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from publisher.adapters.loading import AdapterLocation, load_adapter, quiet
from publisher.adapters.merged_checkpoint import open_inputs, write_merged
from publisher.errors import ExtractionError, ValidationError
from publisher.loaders import judge
from publisher.loaders.subject import Base, read_subject
from publisher.records.extraction import Extraction
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG
from publisher.records.progress import silent
from tests.experts import (
    CLASSES,
    RANKS,
    add_rounded,
    save_as_class,
    save_as_transformers,
    small_experts,
    update_experts,
)
from tests.inputs.pairs import Pair, quantise, say_fp8

MakeExperts = Callable[..., Pair]
EXPERTS = [expert for expert, rank in enumerate(RANKS) if rank]
PLANTED = [rank for rank in RANKS if rank]


@pytest.fixture
def make_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeExperts:
    """`make_experts(model_class, change)`: a base with experts, and a fine-tune that `change` makes of it.

    Files have the class's own names, unless `save` is another way to write them.
    """
    monkeypatch.chdir(tmp_path)

    def make(
        model_class: str,
        change: Callable[[Any], object] = update_experts,
        *,
        save: Callable[[Any, Path], object] = save_as_class,
    ) -> Pair:
        pair = Pair(tmp_path, model_class)
        with quiet():
            model = small_experts(model_class)
            save(model, pair.base)
            change(model)
            save(model, pair.source)
        return pair

    return make


def loaded(pair: Pair, folder: Path) -> Any:
    with quiet():
        return getattr(transformers, pair.model_class).from_pretrained(folder, dtype=torch.bfloat16).eval()


def merged(pair: Pair) -> Any:
    """The base with the adapter, merged by PEFT."""
    model, complaints = load_adapter(loaded(pair, pair.base), AdapterLocation(pair.staged))
    assert complaints == []
    return model.merge_and_unload()


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found: torch.Tensor = model.float()(input_ids=ids).logits.flatten(0, 1)
    return found


@pytest.mark.parametrize("model_class", CLASSES)
def test_all_experts_are_found_at_their_ranks_and_merged_by_peft_give_the_source(
    make_experts: MakeExperts, model_class: str
) -> None:
    pair = make_experts(model_class)
    extraction = pair.extracted()
    for tensor in extraction.experts:
        assert [(found.expert, found.rank) for found in tensor.experts] == list(zip(EXPERTS, PLANTED, strict=True))
        for found in tensor.experts:
            assert found.ratio == pytest.approx(1, abs=0.15)
            assert 0.8 < found.relative_error / found.rounding_floor < 1.2
            assert found.exact_share > 0.75
    summary = extraction.summary.experts
    assert summary is not None
    assert (summary.tensors, summary.matrices, summary.changed, summary.silent) == (4, 16, 12, 0)
    assert (summary.rank.min, summary.rank.max, summary.share) == (1, 5, 1)
    assert pair.validated(extraction).tensors == 8
    base, source, again = (
        logits(model) for model in (loaded(pair, pair.base), loaded(pair, pair.source), merged(pair))
    )
    missing, whole = (again - source).norm(dim=1), (base - source).norm(dim=1)
    assert float(missing.median()) < 0.01 * float(whole.median())
    assert int((missing < 0.03 * whole).sum()) >= 126  # of 128 tokens: one near a tie may go to another expert


@pytest.mark.parametrize("model_class", ["Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM", "MixtralForCausalLM"])
def test_experts_that_are_stored_one_by_one_give_the_adapter_of_the_stacked_ones(
    make_experts: MakeExperts, model_class: str
) -> None:
    adapters = []
    for save in (save_as_class, save_as_transformers):
        pair = make_experts(model_class, save=save)
        extraction = pair.extracted()
        pair.validated(extraction)
        adapters.append(((pair.staged / ADAPTER).read_bytes(), extraction.experts))
    assert any(".experts.3." in name for name in load_file(pair.base / "model.safetensors"))
    assert adapters[0] == adapters[1]


def test_one_side_may_have_its_experts_one_by_one(make_experts: MakeExperts) -> None:
    stored = {"base": save_as_transformers, "source": save_as_class}
    pair = make_experts("Qwen3MoeForCausalLM", save=lambda model, folder: stored[folder.name](model, folder))
    assert [found.rank for tensor in pair.extracted().experts for found in tensor.experts] == 4 * PLANTED


@pytest.mark.parametrize("model_class", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_merged_checkpoint_keeps_experts_one_by_one(make_experts: MakeExperts, model_class: str) -> None:
    pair = make_experts(model_class, save=save_as_transformers)
    extraction = pair.extracted()
    _, base = pair.snapshots()
    out = pair.folder / "merged"
    with open_inputs(extraction, base, staged=pair.staged) as inputs:
        write_merged(inputs, base, out=out, again_fp8=False, progress=silent)
    before, after = (load_file(folder / "model.safetensors") for folder in (pair.base, out))
    assert after.keys() == before.keys()
    written, theirs = loaded(pair, out).state_dict(), merged(pair).state_dict()
    assert all(torch.equal(written[name], theirs[name]) for name in theirs)


def test_a_pattern_means_a_parameter_by_its_name_or_by_all_of_its_stored_tensors(make_experts: MakeExperts) -> None:
    def change(model: Any) -> None:
        update_experts(model)
        add_rounded(model.model.layers[0].self_attn.o_proj.weight, rank=1)

    pair = make_experts("Qwen3MoeForCausalLM", change, save=save_as_transformers)
    for ignore in (["*.experts.gate_up_proj"], ["*.experts.*.gate_proj.weight", "*.experts.*.up_proj.weight"]):
        extraction = pair.extracted(ignore=[*ignore, "*.experts.*.down_proj.weight"])
        assert extraction.experts == ()
        assert {tensor.name.rpartition(".")[2] for tensor in extraction.summary.left_out} == {
            "down_proj",
            "gate_up_proj",
        }
    with pytest.raises(ExtractionError, match=r"adapter\.ignore names \*\.experts\.3\.\*, which no tensor matches"):
        pair.extracted(ignore=["*.experts.3.*"])


def test_an_expert_that_is_missing_is_named(make_experts: MakeExperts) -> None:
    pair = make_experts("Qwen3MoeForCausalLM", save=save_as_transformers)
    pair.change(lambda weights: weights.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(ExtractionError, match=r"model\.layers\.1\.mlp\.experts"):
        pair.extracted()


@pytest.mark.parametrize("model_class", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_the_evidence_of_each_expert_is_what_peft_makes_of_the_files(
    make_experts: MakeExperts, model_class: str
) -> None:
    pair = make_experts(model_class)
    extraction = pair.extracted()
    base, source = (load_file(folder / "model.safetensors") for folder in (pair.base, pair.source))
    state = merged(pair).state_dict()
    for tensor in extraction.experts:
        for found in tensor.experts:
            before, after, again = (one[tensor.name][found.expert] for one in (base, source, state))
            exact = float((again == after).double().mean())
            assert exact == pytest.approx(found.exact_share, abs=2e-3)
            rounding = float((again.float() - after.float()).norm() / (after.float() - before.float()).norm())
            assert rounding < 2 * found.rounding_floor
        unchanged = RANKS.index(0)
        assert torch.equal(state[tensor.name][unchanged], base[tensor.name][unchanged])


@pytest.mark.parametrize("layout", ["uniform", "pattern"])
def test_linears_a_router_and_experts_of_several_ranks_share_one_adapter(
    make_experts: MakeExperts, layout: str
) -> None:
    def change(model: Any) -> None:
        update_experts(model, ranks=(2, 1, 0, 2), which="down_proj")
        update_experts(model, ranks=(1, 1, 1, 4), which="gate_up_proj")
        for layer in model.model.layers:
            add_rounded(layer.self_attn.o_proj.weight, rank=6)
            add_rounded(layer.mlp.gate.weight, rank=1)

    pair = make_experts("Qwen3MoeForCausalLM", change)
    extraction = pair.extracted(layout=layout)
    assert [(module.name[-6:], module.rank) for module in extraction.modules] == 2 * [("o_proj", 6)]
    ranks = {tensor.name.removeprefix("model.layers.0.mlp."): tensor.rank for tensor in extraction.experts[:3]}
    assert ranks == {"experts.down_proj": 2, "experts.gate_up_proj": 4, "gate.weight": 1}
    config = json.loads((pair.staged / ADAPTER_CONFIG).read_text())
    assert (config["r"], len(config["rank_pattern"])) == (6, 6 if layout == "pattern" else 0)
    assert pair.validated(extraction).modules == 8


def test_an_update_that_rounds_once_is_found_all_the_same(make_experts: MakeExperts) -> None:
    def change(model: Any) -> None:
        wide = small_experts("MixtralForCausalLM", dtype=torch.float32)
        wide.load_state_dict(model.state_dict())
        update_experts(wide)
        model.load_state_dict(wide.bfloat16().state_dict())

    extraction = make_experts("MixtralForCausalLM", change).extracted()
    assert [found.rank for tensor in extraction.experts for found in tensor.experts] == 4 * PLANTED


def test_one_expert_within_rounding_noise_is_no_reason_to_refuse_the_others(make_experts: MakeExperts) -> None:
    def change(model: Any) -> None:
        update_experts(model, ranks=(3, 0, 0, 0))
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                with torch.no_grad():
                    parameter[1, 0, 0] = parameter[1, 0, 0] * 1.01

    pair = make_experts("MixtralForCausalLM", change)
    extraction = pair.extracted()
    silent_ones = [found for tensor in extraction.experts for found in tensor.experts if not found.rank]
    assert [found.relative_error for found in silent_ones] == [1, 1]
    summary = extraction.summary.experts
    assert summary is not None
    assert (summary.silent, summary.relative_error.max < 0.1) == (2, True)
    pair.validated(extraction)


def test_factors_of_b_in_the_order_of_a_are_found(make_experts: MakeExperts) -> None:
    """What Unsloth writes: PEFT loads it without a word, and each expert gets columns of all the others."""
    pair = make_experts("Qwen3MoeForCausalLM")
    extraction = pair.extracted()
    weights = load_file(pair.staged / ADAPTER)
    for tensor in extraction.experts:
        b = weights[tensor.keys[1]]
        by_expert = b.reshape(b.shape[0], tensor.alpha, tensor.number).transpose(1, 2).reshape(b.shape)
        weights[tensor.keys[1]] = by_expert.contiguous()
    save_file(weights, pair.staged / ADAPTER)
    _, complaints = load_adapter(loaded(pair, pair.base), AdapterLocation(pair.staged))
    assert complaints == []
    altered = rewritten(extraction, pair.staged)
    with pytest.raises(ValidationError, match=r"gate_up_proj\[0\]: error .*, claimed 0\.00"):
        pair.validated(altered)


def rewritten(extraction: Extraction, staged: Path) -> Extraction:
    """The same evidence, with the digest of the weights that are there now."""
    from publisher.records.checkpoint import FileDigest

    claims = extraction.model_dump(mode="json")
    claims["summary"]["adapter"] = FileDigest.of(staged / ADAPTER).model_dump(mode="json")
    return Extraction.model_validate(claims)


@pytest.mark.parametrize("model_class", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_a_merged_checkpoint_is_peft_s_own_merge(make_experts: MakeExperts, model_class: str) -> None:
    pair = make_experts(model_class)
    extraction = pair.extracted()
    _, base = pair.snapshots()
    with open_inputs(extraction, base, staged=pair.staged) as inputs:
        done = write_merged(inputs, base, out=pair.folder / "merged", again_fp8=False, progress=silent)
    ours, theirs = load_file(pair.folder / "merged" / "model.safetensors"), merged(pair).state_dict()
    assert ours.keys() <= theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert done.experts == 4
    assert done.share == extraction.summary.exact_share


def test_the_exact_method_restores_experts_by_peft_s_two_roundings(make_experts: MakeExperts) -> None:
    pair = make_experts("MixtralForCausalLM", lambda model: update_experts(model, which="layers.0.mlp.experts.down"))
    extraction = pair.extracted(method="exact")
    (tensor,) = extraction.experts
    for found in tensor.experts:
        assert found.recovery is not None
        assert found.recovery.arithmetic == "update rounded first"
        assert found.recovery.share > 0.99
        assert found.exact_share == pytest.approx(found.recovery.share, abs=1e-5)
    pair.validated(extraction)


def test_what_experts_cannot_have_is_refused_before_the_arithmetic(make_experts: MakeExperts) -> None:
    pair = make_experts("MixtralForCausalLM")
    with pytest.raises(ExtractionError, match=r"adapter\.residual with 4 parameters of experts") as raised:
        pair.extracted(method="exact", residual=True)
    assert "model.layers.1.mlp.experts.gate_up_proj" in str(raised.value)
    assert not pair.staged.exists()


def test_finished_parameters_are_kept_for_the_next_run(
    make_experts: MakeExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_experts("MixtralForCausalLM")
    first = pair.extracted()
    weights = (pair.staged / ADAPTER).read_bytes()
    monkeypatch.setattr("publisher.extraction.experts.extract_expert", None)  # nothing is left to extract
    assert pair.extracted() == first
    assert (pair.staged / ADAPTER).read_bytes() == weights


def test_peft_saves_under_the_names_that_the_evidence_has(make_experts: MakeExperts) -> None:
    pair = make_experts("Qwen3_5MoeForCausalLM")
    extraction = pair.extracted()
    model, _ = load_adapter(loaded(pair, pair.base), AdapterLocation(pair.staged))
    saved = peft.get_peft_model_state_dict(model)
    assert saved.keys() == {key for tensor in extraction.experts for key in tensor.keys}
    for name, tensor in load_file(pair.staged / ADAPTER).items():
        assert torch.equal(saved[name].float(), tensor.float())


@pytest.mark.parametrize("again_fp8", [False, True])
def test_experts_stored_one_by_one_in_fp8_are_dequantised(make_pair: MakeExperts, again_fp8: bool) -> None:
    pair = make_pair("Qwen3Moe", r"experts\.\d\.(up|down)_proj")
    pair.change(lambda weights: quantise(weights, r"mlp\.experts\.\d+\.\w+\.weight$"), side="base")
    say_fp8(pair.base / "config.json")
    extraction = pair.extracted(rank=2)
    assert extraction.summary.fp8 == ("base",)
    for tensor in extraction.experts:
        assert all(found.ratio is not None and found.ratio < 1.3 for found in tensor.experts)
        assert all(found.rounding_floor > 0.01 for found in tensor.experts)
    _, base = pair.snapshots()
    with open_inputs(extraction, base, staged=pair.staged) as inputs:
        write_merged(inputs, base, out=pair.folder / "merged", again_fp8=again_fp8, progress=silent)
    before, after, source = (
        load_file(folder / "model.safetensors") for folder in (pair.base, pair.folder / "merged", pair.source)
    )
    assert after.keys() == (before if again_fp8 else source).keys()
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert after[name].dtype == (torch.float8_e4m3fn if again_fp8 else torch.bfloat16)
    scales = after.get(f"{name}_scale_inv", torch.ones(1, 1)).repeat_interleave(16, 0).repeat_interleave(16, 1)
    found = after[name].float() * (scales if again_fp8 else 1)
    assert float((found - source[name].float()).norm() / source[name].float().norm()) < 0.05


def test_loaders_whose_rules_were_read_for_modules_are_told_nothing_of_experts(make_experts: MakeExperts) -> None:
    def change(model: Any) -> None:
        update_experts(model)
        add_rounded(model.model.layers[0].self_attn.o_proj.weight, rank=2)

    for pair in (make_experts("MixtralForCausalLM"), make_experts("MixtralForCausalLM", change)):
        pair.extracted(layout="uniform")
        subject = read_subject(pair.staged, Base(pair.base, pair.model_class))
        told = {one.loader: (one.loads, one.scale) for one in judge(subject)}
        assert told["PEFT"] == told["transformers"] == ("yes", "right")
        assert told["vLLM"] == ("not told", "not told")
        assert told["SGLang"][0] != "yes"
        assert told["llama.cpp"] == ("not told", "not told")
    assert subject.rank == 5


def test_experts_of_a_base_in_float32_are_found_at_their_ranks(make_experts: MakeExperts) -> None:
    pair = make_experts("MixtralForCausalLM", lambda model: update_experts(model, ranks=(1, 1, 1, 1)))
    with quiet():
        wide = small_experts("MixtralForCausalLM", dtype=torch.float32)
        with torch.no_grad():
            for parameter in wide.parameters():
                parameter.add_(1e-3 * torch.randn(parameter.shape))  # digits that bf16 does not have
        save_as_class(wide, pair.base)
        update_experts(wide)
        save_as_class(wide.bfloat16(), pair.source)
    extraction = pair.extracted()
    for tensor in extraction.experts:
        assert [(found.expert, found.rank) for found in tensor.experts] == list(zip(EXPERTS, PLANTED, strict=True))
        for found in tensor.experts:
            assert found.arithmetic is not None
            assert found.arithmetic.merged_in == "float32"
            assert found.ratio == pytest.approx(1, abs=0.2)
    pair.validated(extraction)


def test_linears_whose_names_peft_takes_for_experts_are_adapted_by_their_parameters(make_experts: MakeExperts) -> None:
    """PEFT reads `mlp.gate_proj` of a dense layer as DeepSeek's experts, and drops it from target_modules."""

    def change(model: Any) -> None:
        update_experts(model, which="gate_up_proj")
        dense, sparse = (layer.mlp for layer in model.model.layers)
        for linear in (dense.gate_proj, dense.up_proj, sparse.shared_experts.down_proj, sparse.gate):
            add_rounded(linear.weight, rank=2)

    pair = make_experts("DeepseekV3ForCausalLM", change)
    extraction = pair.extracted()
    names = {tensor.name.removeprefix("model.layers."): tensor.rank for tensor in extraction.experts}
    assert names == {
        "0.mlp.gate_proj.weight": 2,
        "0.mlp.up_proj.weight": 2,
        "1.mlp.experts.gate_up_proj": 5,
        "1.mlp.gate.weight": 2,
        "1.mlp.shared_experts.down_proj.weight": 2,
    }
    assert extraction.summary.experts is not None
    assert (extraction.summary.experts.tensors, extraction.summary.experts.single) == (5, 4)
    pair.validated(extraction)


def test_a_router_that_is_more_than_a_linear_module_is_adapted_by_its_parameter(make_experts: MakeExperts) -> None:
    def change(model: Any) -> None:
        update_experts(model)
        add_rounded(model.model.layers[0].feed_forward.router.weight, rank=2)

    pair = make_experts("Llama4ForCausalLM", change)
    extraction = pair.extracted()
    assert [(one.name[-13:], one.rank) for one in extraction.experts if len(one.shape) == 2] == [("router.weight", 2)]
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.05


def test_nan_in_one_expert_is_named_with_its_number(make_experts: MakeExperts) -> None:
    def change(model: Any) -> None:
        update_experts(model)
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj[3, 1, 2] = torch.nan

    pair = make_experts("MixtralForCausalLM", change)
    with pytest.raises(
        ExtractionError, match=r"layers\.0\.mlp\.experts\.down_proj\[3\] holds NaN or infinity: 1 element in"
    ):
        pair.extracted()
