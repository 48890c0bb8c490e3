"""Where llama.cpp and mlx-lm have the weights, held against what their converters do, written out by index."""

import sys
from collections.abc import Mapping
from typing import Any

import gguf
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from publisher.adapters.exports import require_exportable
from publisher.adapters.exports.llamacpp import Swap, places
from publisher.errors import ExtractionError
from publisher.manifest.architectures import KNOWN, LLAMA_CPP

LLAMA: Mapping[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
KEYS, VALUES, KEY_WIDTH, VALUE_WIDTH, HIDDEN = 2, 6, 3, 5, 4
QWEN: Mapping[str, Any] = {
    "text_config": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": KEYS,
        "linear_num_value_heads": VALUES,
        "linear_key_head_dim": KEY_WIDTH,
        "linear_value_head_dim": VALUE_WIDTH,
    }
}
CLASS = "Qwen3_5ForConditionalGeneration"
LAYER = "model.language_model.layers.0."


def whole_numbers(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B (rows, 3) and A (3, columns), whose product float32 has exactly."""
    generator = torch.Generator().manual_seed(7)
    b, a = (torch.randint(-9, 10, shape, generator=generator).float() for shape in ((rows, 3), (3, columns)))
    return b, a


def of_rotation(heads: int, width: int) -> list[int]:
    """Old row of each new one: a head's row i of the first half is followed by row i of the second."""
    return [head * width + half * width // 2 + i for head in range(heads) for i in range(width // 2) for half in (0, 1)]


def of_value_heads(width: int, *, skip: int = 0) -> list[int]:
    """Old row of each new one: the first value head of every key head, then the second of every one, and so on."""
    each = VALUES // KEYS
    heads = [key * each + turn for turn in range(each) for key in range(KEYS)]
    return [*range(skip), *(skip + head * width + i for head in heads for i in range(width))]


@pytest.mark.parametrize(("projection", "heads"), [("q_proj", 4), ("k_proj", 2)])
def test_llamas_q_and_k_follow_the_rows_that_llama_cpp_rotates_in_neighbours(projection: str, heads: int) -> None:
    name, shape = f"model.layers.1.self_attn.{projection}", (heads * 6, HIDDEN)
    found, problems = places("LlamaForCausalLM", {name: shape}, config=LLAMA)
    b, a = whole_numbers(*shape)
    assert not problems
    assert found[name].name == f"blk.1.attn_{projection[0]}.weight"
    assert torch.equal(found[name].b(b) @ found[name].a(a), (b @ a)[of_rotation(heads, 6)])


QKV = 2 * KEYS * KEY_WIDTH
WIDE = VALUES * VALUE_WIDTH
LINEAR_ATTENTION = {
    "in_proj_qkv": ("attn_qkv", (QKV + WIDE, HIDDEN), of_value_heads(VALUE_WIDTH, skip=QKV), None),
    "in_proj_z": ("attn_gate", (WIDE, HIDDEN), of_value_heads(VALUE_WIDTH), None),
    "in_proj_a": ("ssm_alpha", (VALUES, HIDDEN), of_value_heads(1), None),
    "in_proj_b": ("ssm_beta", (VALUES, HIDDEN), of_value_heads(1), None),
    "out_proj": ("ssm_out", (HIDDEN, WIDE), None, of_value_heads(VALUE_WIDTH)),
}


@pytest.mark.parametrize("projection", LINEAR_ATTENTION)
def test_qwens_linear_attention_follows_the_value_heads(projection: str) -> None:
    tensor, shape, rows, columns = LINEAR_ATTENTION[projection]
    module = f"{LAYER}linear_attn.{projection}"
    found, problems = places(CLASS, {module: shape}, config=QWEN)
    b, a = whole_numbers(*shape)
    weight = b @ a
    expected = weight[rows] if rows else weight
    expected = expected[:, columns] if columns else expected
    assert not problems
    assert found[module].name == f"blk.0.{tensor}.weight"
    assert torch.equal(found[module].b(b) @ found[module].a(a), expected)
    assert not torch.equal(expected, weight)


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_everything_else_of_qwen_keeps_its_order(part: str) -> None:
    found, _ = places(CLASS, {LAYER + part: (8, 4)}, config=QWEN)
    assert (found[LAYER + part].rows, found[LAYER + part].columns) == (None, None)


small = st.integers(1, 4)


@given(st.builds(Swap, small, small, small, small, skip=st.integers(0, 3)))
def test_an_order_that_is_undone_is_the_one_before(swap: Swap) -> None:
    rows = torch.arange(2 * swap.rows).reshape(swap.rows, 2)
    assert torch.equal(swap.undone(swap(rows)), rows)
    assert sorted(swap(rows)[:, 0].tolist()) == rows[:, 0].tolist()


REFUSED = [
    ("model.visual.blocks.0.attn.qkv", CLASS, QWEN, "vision in a file of its own"),
    (f"{LAYER}mlp.experts.3.up_proj", CLASS, QWEN, "experts fused in one tensor"),
    (f"{LAYER}mlp.gate", CLASS, QWEN, "table of names does not have it"),
    ("lm_head", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, "for a tied head"),
    ("model.layers.9.mlp.up_proj", "LlamaForCausalLM", LLAMA, "table of names does not have it"),
    (f"{LAYER}linear_attn.in_proj_z", CLASS, QWEN, "does not fit the heads of config.json"),
]


@pytest.mark.parametrize(("module", "model_class", "config", "reason"), REFUSED)
def test_a_module_without_a_sure_place_in_llama_cpp_is_refused_with_the_reason(
    module: str, model_class: str, config: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(ExtractionError, match=reason) as error:
        require_exportable(["gguf"], model_class, shapes={module: (7, 4)}, config=config)
    assert module in error.value.found
    assert error.value.next_step == "remove gguf from adapter.exports in the manifest"


@pytest.mark.parametrize("module", ["model.visual.blocks.0.attn.qkv", "model.language_model.embed_tokens"])
def test_a_module_that_mlx_lm_lacks_is_refused(module: str) -> None:
    with pytest.raises(ExtractionError, match=rf"{module}: mlx-lm has no such linear"):
        require_exportable(["mlx"], CLASS, shapes={module: (8, 4)}, config=QWEN)


def test_without_the_gguf_package_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ExtractionError, match="the gguf package is not installed") as error:
        require_exportable(["gguf"], CLASS, shapes={}, config=QWEN)
    assert "pip install 'lora-publisher[gguf]'" in error.value.next_step


def test_every_class_is_one_of_transformers_and_every_architecture_one_of_llama_cpp() -> None:
    assert [name for names in KNOWN.values() for name in names if not hasattr(transformers, name)] == []
    assert set(LLAMA_CPP.values()) <= set(gguf.MODEL_ARCH_NAMES.values())
