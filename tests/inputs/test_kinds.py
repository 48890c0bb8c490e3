"""Every kind of input gets the right result, or one clear error before the long work: docs/inputs.md lists them."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from publisher.adapters.loading import quiet
from publisher.errors import ExtractionError, FetchError
from tests.inputs.pairs import RANK, Pair, Weights, quantise, say_fp8

MakePair = Callable[..., Pair]
ATTENTION = r"self_attn\.[qkvo]_proj"


def refused(pair: Pair, **settings: object) -> str:
    with pytest.raises(ExtractionError) as raised:
        pair.extracted(**settings)
    assert not pair.staged.exists()
    return str(raised.value)


def doubled(*names: str) -> Callable[[Weights], None]:
    def double(weights: Weights) -> None:
        for name in names:
            weights[name] = weights[name] * 2

    return double


# --- architectures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "pattern", "linears"),
    [
        ("Llama", r"_proj", 14),
        ("Qwen2", r"_proj\.weight", 14),
        ("Gemma2", r"_proj", 14),
        ("Qwen3_5Text", r"_proj|in_proj_|out_proj", 15),
        ("Qwen3Moe", ATTENTION, 8),
        ("Qwen3_5MoeText", r"_attn\.(\w_proj|in_proj_qkv|out_proj)|shared_expert\.", 12),
        ("Mamba", r"in_proj|x_proj", 4),
        ("GPT2", r"c_attn|c_proj|c_fc", 8),
    ],
)
def test_a_low_rank_update_comes_out_of_any_architecture_by_the_names_in_its_checkpoint(
    make_pair: MakePair, architecture: str, pattern: str, linears: int
) -> None:
    pair = make_pair(architecture, pattern)
    extraction = pair.extracted()
    assert (extraction.summary.linears, extraction.summary.rank) == (linears, RANK)
    seen = pair.validated(extraction)
    assert seen.function is not None
    assert seen.function.ratio < 0.1


def test_gpt2s_transposed_weights_get_factors_as_peft_has_them_there(make_pair: MakePair) -> None:
    pair = make_pair("GPT2", r"c_attn|attn\.c_proj")
    extraction = pair.extracted()
    assert {module.transposed for module in extraction.modules} == {True}
    assert json.loads((pair.staged / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    adapter = load_file(pair.staged / "adapter_model.safetensors")
    key = "base_model.model.transformer.h.0.attn.c_attn"
    assert adapter[f"{key}.lora_A.weight"].shape == (RANK, 32)
    assert adapter[f"{key}.lora_B.weight"].shape == (96, RANK)
    assert pair.validated(extraction).largest_claim_difference < 1e-5


def test_in_gpt2_a_changed_head_stays_a_linear_beside_transposed_weights(make_pair: MakePair) -> None:
    pair = make_pair("GPT2", r"mlp\.c_fc|lm_head", tie_word_embeddings=False)
    extraction = pair.extracted()
    assert {module.name: module.transposed for module in extraction.modules} == {
        "lm_head": False,
        "transformer.h.0.mlp.c_fc": True,
        "transformer.h.1.mlp.c_fc": True,
    }
    assert pair.validated(extraction).function is not None


def test_only_some_modules_changed_and_only_those_are_in_the_adapter(make_pair: MakePair) -> None:
    pair = make_pair("Llama", r"layers\.1\.self_attn\.[qv]_proj")
    extraction = pair.extracted()
    wanted = [f"model.layers.1.self_attn.{part}_proj" for part in "qv"]
    assert [module.name for module in extraction.modules] == wanted
    assert json.loads((pair.staged / "adapter_config.json").read_text())["target_modules"] == wanted
    assert pair.validated(extraction).tensors == 4


# --- what an adapter cannot hold ----------------------------------------------------------------------------


def test_changed_norms_and_tables_are_named_with_their_share_of_the_update(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    pair.change(doubled("model.norm.weight", "model.embed_tokens.weight"))
    message = refused(pair)
    shares = dict(re.findall(r"  (\S+) \([\dx]+, BF16\), ([\d.]+)% of the update", message))
    assert shares.keys() == {"model.norm.weight", "model.embed_tokens.weight"}
    weights = [load_file(folder / "model.safetensors") for folder in (pair.source, pair.base)]
    squares = {name: float((weights[0][name].float() - weights[1][name].float()).square().sum()) for name in weights[0]}
    for name, share in shares.items():
        assert float(share) == pytest.approx(100 * squares[name] / sum(squares.values()), abs=0.006)
    assert "adapter.ignore" in message
    assert "adapter.carry" in message


def test_what_is_ignored_is_recorded_with_its_share(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    pair.change(doubled("model.norm.weight"))
    (left,) = pair.extracted(ignore=["model.norm.weight"]).summary.left_out
    assert (left.name, left.reason) == ("model.norm.weight", "differs")
    assert left.norm == pytest.approx(32**0.5, rel=1e-5)
    assert left.share is not None
    assert 0 < left.share < 1


def test_modules_of_mamba_that_peft_refuses_are_named_before_the_arithmetic_and_may_be_carried(
    make_pair: MakePair,
) -> None:
    pair = make_pair("Mamba", "in_proj|out_proj")
    message = refused(pair)
    assert message.startswith("PEFT takes no LoRA for 2 changed modules of MambaForCausalLM:\n")
    assert re.search(r"backbone\.layers\.1\.mixer\.out_proj\.weight \(.*, BF16\), [\d.]+% of the update", message)
    extraction = pair.extracted(carry=["*.out_proj.weight"])
    assert (len(extraction.modules), len(extraction.summary.carried)) == (2, 2)
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.05


def test_experts_that_the_class_holds_fused_become_a_lora_of_its_parameter(make_pair: MakePair) -> None:
    pair = make_pair("Qwen3Moe", rf"{ATTENTION}|experts\.1\.up_proj")
    extraction = pair.extracted()
    assert [tensor.name for tensor in extraction.experts] == [
        f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (0, 1)
    ]
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1


def fuse_experts(pair: Pair) -> None:
    """Both checkpoints as Qwen3.5-MoE has them on the Hub: all experts of a layer in one 3-D tensor."""

    def fuse(weights: Weights) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([weights.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(4)])
                for part in ("gate", "up", "down")
            )
            weights |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}

    for side in ("source", "base"):
        pair.change(fuse, side=side)


def test_fused_experts_are_adapted_each_at_its_rank_and_may_be_left_out(make_pair: MakePair) -> None:
    pair = make_pair("Qwen3_5MoeText", r"self_attn\.q_proj|experts\.\d\.down_proj")
    fuse_experts(pair)
    extraction = pair.extracted()
    first, second = extraction.experts
    assert (first.name, first.shape) == ("model.layers.0.mlp.experts.down_proj", (4, 32, 16))
    assert [found.rank for found in (*first.experts, *second.experts)] == 8 * [RANK]
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1
    extraction = pair.extracted(ignore=["*.experts.down_proj"])
    assert sum(left.share or 0 for left in extraction.summary.left_out) > 0.5
    assert extraction.experts == ()


def test_fused_experts_can_be_carried_whole(make_pair: MakePair) -> None:
    pair = make_pair("Qwen3_5MoeText", r"self_attn\.q_proj|experts\.\d\.down_proj")
    fuse_experts(pair)
    extraction = pair.extracted(carry=["*.experts.down_proj"])
    (first, _) = extraction.summary.carried
    assert first.tensors == tuple(f"model.layers.0.mlp.experts.{part}_proj" for part in ("down", "gate_up"))
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.05


def test_rows_for_new_words_are_named_with_the_way_out(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)

    def grow(weights: Weights) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = torch.cat([weights[name], torch.ones(8, 32, dtype=torch.bfloat16)])

    pair.change(grow)
    message = refused(pair)
    assert "model.embed_tokens.weight is 72x32 in the source and 64x32 in the base (8 rows more" in message
    assert "lm_head.weight is 72x32 in the source and 64x32 in the base" in message
    assert "resize_token_embeddings" in message


def test_nan_is_named_with_its_tensor_wherever_it_is(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    pair.change(lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    assert "model.norm.weight (32, BF16), which holds NaN or infinity" in refused(pair)
    assert "model.norm.weight holds NaN or infinity in the source" in refused(pair, carry=["model.norm.weight"])
    (left,) = pair.extracted(ignore=["model.norm.weight"]).summary.left_out
    assert (left.reason, left.share) == ("differs, and holds NaN or infinity", None)


# --- carried whole ------------------------------------------------------------------------------------------


def test_a_carried_norm_bias_and_table_make_the_adapter_whole(make_pair: MakePair) -> None:
    pair = make_pair("Qwen2", r"o_proj\.weight")
    changed = ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight")
    pair.change(lambda weights: [weights[name].add_(0.5) for name in changed])
    extraction = pair.extracted(carry=["*norm.weight", "*.bias", "*embed_tokens*"])
    carried = {module.module: module for module in extraction.summary.carried}
    assert carried.keys() == {"model.norm", "model.layers.0.self_attn.q_proj", "model.embed_tokens"}
    assert carried["model.layers.0.self_attn.q_proj"].tensors == tuple(
        f"model.layers.0.self_attn.q_proj.{part}" for part in ("bias", "weight")
    )
    assert all(module.share for module in carried.values())
    config = json.loads((pair.staged / "adapter_config.json").read_text())
    assert config["modules_to_save"] == sorted(carried)
    assert "ensure_weight_tying" not in config
    adapter, source = (
        load_file(file) for file in (pair.staged / "adapter_model.safetensors", pair.source / "model.safetensors")
    )
    assert adapter["base_model.model.model.norm.weight"].equal(source["model.norm.weight"])
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.05


def test_a_tied_table_is_carried_for_the_head_as_well(make_pair: MakePair) -> None:
    pair = make_pair("Gemma2", ATTENTION)
    pair.change(lambda weights: weights["model.embed_tokens.weight"].add_(0.1))
    assert "model.embed_tokens.weight (64x32, BF16)" in refused(pair)
    extraction = pair.extracted(carry=["model.embed_tokens.weight"])
    (table,) = extraction.summary.carried
    assert (table.tied, table.parameters) == (("lm_head",), 2 * 64 * 32)
    assert json.loads((pair.staged / "adapter_config.json").read_text())["ensure_weight_tying"] is True
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.05


def test_a_parameter_beside_further_modules_cannot_be_carried(make_pair: MakePair) -> None:
    pair = make_pair("Mamba", "in_proj")
    pair.change(doubled("backbone.layers.0.mixer.A_log"))
    message = refused(pair, carry=["*.A_log"])
    assert "  backbone.layers.0.mixer.A_log, a parameter of backbone.layers.0.mixer\n" in message


def test_a_carried_module_of_which_the_source_lacks_a_tensor_is_refused(make_pair: MakePair) -> None:
    pair = make_pair("Qwen2", r"o_proj\.weight")
    weight, bias = (f"model.layers.0.self_attn.q_proj.{part}" for part in ("weight", "bias"))
    pair.change(lambda weights: weights[weight].add_(0.5))
    pair.change(lambda weights: weights.pop(bias))
    message = refused(pair, carry=[weight], ignore=[bias])
    assert f"do not fit the model class:\n  {bias} is not in the source\n" in message
    assert "under adapter.ignore" in message


def test_a_carried_module_of_which_a_tensor_is_ignored_is_refused(make_pair: MakePair) -> None:
    pair = make_pair("Qwen2", r"o_proj\.weight")
    weight, bias = (f"model.layers.0.self_attn.q_proj.{part}" for part in ("weight", "bias"))
    pair.change(lambda weights: weights[weight].add_(0.5))
    pair.change(lambda weights: weights.pop(bias), side="base")
    message = refused(pair, carry=[weight], ignore=[bias])
    assert message.startswith(f"adapter.ignore leaves out tensors of modules that are stored whole:\n  {bias}\n")


def test_a_carried_module_with_another_shape_in_the_source_than_in_the_class_is_refused(make_pair: MakePair) -> None:
    pair = make_pair("Qwen2", r"o_proj\.weight")
    weight, bias = (f"model.layers.0.self_attn.q_proj.{part}" for part in ("weight", "bias"))
    pair.change(lambda weights: weights[weight].add_(0.5))
    pair.change(lambda weights: weights.update({bias: weights[bias][:-1].clone()}))
    message = refused(pair, carry=[weight, bias])
    assert f"  {bias} is (31,) in the source and (32,) in Qwen2ForCausalLM\n" in message


def test_a_pattern_under_carry_that_no_tensor_matches_is_an_error(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    assert refused(pair, carry=["*.nrom.*"]).startswith("adapter.carry names *.nrom.*, which no tensor matches.")


def test_the_adapter_has_the_names_of_the_class_that_the_manifest_gives(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    pair.model_class = "LlamaModel"
    extraction = pair.extracted(task_type="FEATURE_EXTRACTION")
    assert extraction.modules[0].name == "layers.0.self_attn.k_proj"
    assert pair.validated(extraction).function is not None


def test_a_changed_tensor_that_the_class_has_no_place_for_is_named_before_the_arithmetic(make_pair: MakePair) -> None:
    pair = make_pair("Llama", f"{ATTENTION}|lm_head", tie_word_embeddings=False)
    pair.model_class = "LlamaModel"
    message = refused(pair, task_type="FEATURE_EXTRACTION")
    assert message.startswith("LlamaModel has no module for 1 changed tensor of the checkpoint:\n  lm_head.weight ")
    assert "Next: correct model_class" in message


def test_experts_may_be_carried_whole(make_pair: MakePair) -> None:
    pair = make_pair("Qwen3Moe", rf"{ATTENTION}|experts\.1\.up_proj")
    extraction = pair.extracted(carry=["*.experts.*"])
    assert [saved.module for saved in extraction.summary.carried] == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1


# --- how the source was trained -----------------------------------------------------------------------------


def disturbed(weights: Weights) -> None:
    """As after a full fine-tune: every attention weight moves a little in all directions, a few of them more."""
    for name in sorted(weights):
        if re.search(ATTENTION, name):
            rows, columns = weights[name].shape
            spectrum = torch.diag(0.02 * 0.7 ** torch.arange(min(rows, columns)))
            left, right = torch.randn(rows, min(rows, columns)), torch.randn(min(rows, columns), columns)
            weights[name] = (weights[name].float() + left @ spectrum @ right).bfloat16()


def test_a_full_fine_tune_is_refused_under_rank_auto_with_the_way_to_publish_it(make_pair: MakePair) -> None:
    pair = make_pair("Llama", "nothing")
    pair.change(disturbed)
    message = refused(pair)
    assert message.startswith("the update has no low rank in 8 of 8 modules: a full fine-tune, or a source")
    assert "adapter.rank: {energy: 0.8}" in message


@pytest.mark.parametrize("rank", [{"energy": 0.97}, 6])
def test_a_full_fine_tune_becomes_an_approximation_and_says_how_good(make_pair: MakePair, rank: object) -> None:
    pair = make_pair("Llama", "nothing")
    pair.change(disturbed)
    extraction = pair.extracted(rank=rank)
    summary = extraction.summary
    assert summary.approximation
    assert 0.9 < summary.energy < 0.9999
    if rank != 6:
        assert all(module.fit_error**2 <= 0.03 for module in extraction.modules)
        assert len(summary.ranks) > 1
    assert pair.validated(extraction).function is not None


def test_a_merged_lora_is_no_approximation_at_its_own_rank_and_one_below_it(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    whole, half = (pair.extracted(rank=rank).summary for rank in (RANK, 1))
    assert not whole.approximation
    assert whole.energy > 0.999
    assert half.approximation
    assert half.energy < 0.95


def test_a_source_of_another_origin_is_refused_before_the_arithmetic(make_pair: MakePair) -> None:
    pair = make_pair("Llama", "nothing")
    torch.manual_seed(99)
    pair.change(lambda weights: [w.normal_(std=0.02) for name, w in weights.items() if "_proj" in name])
    message = refused(pair, rank=8)
    assert message.startswith("the source's weights have nothing of the base's in them (cosine ")
    assert not list(pair.folder.glob("work/**/*.safetensors"))


def test_a_base_that_was_trained_on_by_itself_leaves_noise_and_is_refused(make_pair: MakePair) -> None:
    pair = make_pair("Llama", "nothing")
    torch.manual_seed(98)
    pair.change(lambda weights: [w.add_(torch.randn_like(w), alpha=0.01) for n, w in weights.items() if "_proj" in n])
    assert refused(pair).startswith("the update has no low rank in 14 of 14 modules")
    assert refused(pair, rank=1).startswith("the fits hold no more of the update than they would of noise in 14 of")


# --- FP8 with block scales ----------------------------------------------------------------------------------


def in_fp8(pair: Pair, side: str, pattern: str = "_proj") -> None:
    """One side as an FP8 release."""
    pair.change(lambda weights: quantise(weights, pattern), side=side)
    say_fp8(pair.folder / side / "config.json")


@pytest.mark.parametrize("side", ["source", "base"])
def test_an_fp8_checkpoint_is_dequantised_and_the_floor_is_that_of_fp8(make_pair: MakePair, side: str) -> None:
    pair = make_pair("Llama", ATTENTION)
    plain = pair.extracted(rank=RANK)
    in_fp8(pair, side)
    extraction = pair.extracted()
    summary = extraction.summary
    assert summary.fp8 == (side,)
    assert (summary.linears, summary.rank) == (8, RANK), "what quantisation alone changed is no update"
    assert summary.rounding_floor.median > 5 * plain.summary.rounding_floor.median
    assert summary.ratio is not None
    assert 0.7 < summary.ratio.median < 1.3
    assert not summary.approximation
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.2


def test_fp8_on_both_sides_is_compared_dequantised(make_pair: MakePair) -> None:
    pair = make_pair("Llama", r"self_attn\.q_proj")
    for side in ("source", "base"):
        in_fp8(pair, side)
    summary = pair.extracted().summary
    assert (summary.linears, summary.fp8) == (2, ("source", "base"))
    assert summary.ratio is not None
    assert 0.7 < summary.ratio.median < 1.3


def test_scales_that_do_not_fit_the_blocks_are_refused(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    in_fp8(pair, "base")
    pair.change(lambda weights: [t.resize_(1, 1) for n, t in weights.items() if n.endswith("scale_inv")], side="base")
    with pytest.raises(FetchError, match=r"scales that do not fit blocks of 16x16: model\.layers\.0\.mlp\.down_proj"):
        pair.extracted()


# --- files and dtypes ---------------------------------------------------------------------------------------


def test_a_base_equal_to_the_source_is_refused(make_pair: MakePair) -> None:
    message = refused(make_pair("Gemma2", "nothing"))
    assert message.startswith("base and source are equal in every tensor, so there is nothing to publish.")


def test_another_architecture_as_base_is_refused_by_its_names(make_pair: MakePair) -> None:
    qwen = make_pair("Qwen2", ATTENTION)
    weights = load_file(qwen.source / "model.safetensors")
    llama = make_pair("Llama", ATTENTION)
    save_file(weights, llama.source / "model.safetensors", metadata={"format": "pt"})
    message = refused(llama)
    assert message.startswith("source and base do not match in 6 tensors:\n")
    assert "model.layers.0.self_attn.q_proj.bias is in the source alone" in message


def cast(weights: Weights, *, dtype: torch.dtype) -> None:
    weights |= {name: tensor.to(dtype) for name, tensor in weights.items()}


@pytest.mark.parametrize(("source", "base"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float32")])
def test_the_two_sides_may_have_dtypes_of_their_own(make_pair: MakePair, source: str, base: str) -> None:
    pair = make_pair("Llama", ATTENTION)
    pair.change(partial(cast, dtype=getattr(torch, source)))
    pair.change(partial(cast, dtype=getattr(torch, base)), side="base")
    extraction = pair.extracted(rank=RANK)
    assert extraction.summary.linears == 8
    assert extraction.summary.relative_error.max < 0.02
    assert pair.validated(extraction).function is not None


def test_shards_on_one_side_alone_make_no_difference(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION)
    whole = pair.extracted()
    with quiet():
        model = LlamaForCausalLM.from_pretrained(pair.base, dtype="auto")
        shutil.rmtree(pair.base)
        model.save_pretrained(pair.base, max_shard_size="20KB")
    assert len(list(pair.base.glob("*.safetensors"))) > 2
    assert pair.extracted().modules == whole.modules


def test_a_matrix_above_the_exact_method_s_size_gives_the_residual_of_the_full_svd(make_pair: MakePair) -> None:
    pair = make_pair("Llama", r"layers\.0\.self_attn\.q_proj", hidden_size=352, head_dim=88)
    (module,) = pair.extracted().modules
    assert (module.method, module.rank) == ("randomized svd", RANK)
    name = "model.layers.0.self_attn.q_proj.weight"
    source, base = (load_file(folder / "model.safetensors")[name].double() for folder in (pair.source, pair.base))
    sigma = torch.linalg.svdvals(source - base)
    assert module.fit_error == pytest.approx(float(sigma[RANK:].norm() / sigma.norm()), rel=1e-3)


# --- the table ----------------------------------------------------------------------------------------------


def test_every_kind_is_in_the_table_of_docs_inputs_and_every_test_named_there_exists() -> None:
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "inputs.md").read_text(encoding="utf-8")))
    every = {
        name for file in root.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    here = set(re.findall(r"def (test_\w+)", Path(__file__).read_text(encoding="utf-8")))
    assert named <= every
    assert here - named == {"test_every_kind_is_in_the_table_of_docs_inputs_and_every_test_named_there_exists"}
