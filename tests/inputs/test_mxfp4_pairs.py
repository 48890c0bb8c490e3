"""gpt-oss: experts in MXFP4 on either side are compared dequantised, and a LoRA on the attention comes out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from publisher.adapters.loading import quiet
from publisher.pipeline.merge import Request, merge
from publisher.pipeline.run import Run, run
from publisher.records.progress import silent
from tests.experts import add_rounded
from tests.inputs.pairs import Pair, Weights, tune
from tests.manifests import one_variant

CARD = {"title": "Oss", "summary": "One adapter."}
QUANTISATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def pack(weights: Weights) -> None:
    """Experts as the releases of OpenAI store them, with random codes."""
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in sorted(weights) if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        shape = (experts, rows, columns // 32)
        weights[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(118, 122, shape, generator=generator, dtype=torch.uint8)


def unpack(weights: Weights) -> None:
    """Experts as transformers dequantises them."""
    for blocks in [name for name in sorted(weights) if name.endswith("_blocks")]:
        scales = weights.pop(blocks.removesuffix("_blocks") + "_scales")
        weights[blocks.removesuffix("_blocks")] = convert_moe_packed_tensors(weights.pop(blocks), scales).contiguous()


def say_mxfp4(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": QUANTISATION}))


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Both sides in MXFP4, the fine-tune with a rank-2 update in q_proj and v_proj."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(11)
    made: Any = transformers.GptOssForCausalLM
    with quiet():
        model = made(transformers.GptOssConfig(**SIZES)).to(torch.bfloat16)
        pair = Pair(tmp_path, "GptOssForCausalLM")
        for side, folder in (("base", pair.base), ("source", pair.source)):
            model.save_pretrained(folder)
            say_mxfp4(folder)
            pair.change(pack, side=side)
    pair.change(lambda weights: tune(weights, r"(q|v)_proj\.weight"))
    return pair


@pytest.mark.parametrize("dequantised", [("source",), (), ("base",), ("base", "source")])
def test_the_update_of_the_attention_comes_out_whichever_side_is_dequantised(
    pair: Pair, dequantised: tuple[str, ...]
) -> None:
    for side in dequantised:
        pair.change(unpack, side=side)
    found = pair.extracted()
    assert {module.name: module.rank for module in found.modules} == {
        f"model.layers.{layer}.self_attn.{part}_proj": 2 for layer in range(2) for part in "qv"
    }
    function = pair.validated(found).function
    assert function is not None
    assert function.ratio < 0.1


def change_experts(weights: Weights) -> None:
    """An update of rank 2 in each expert of one tensor of the last layer, rounded before it is added."""
    torch.manual_seed(5)
    for matrix in weights["model.layers.1.mlp.experts.down_proj"]:
        add_rounded(matrix, rank=2)


def test_experts_that_changed_are_adapted_on_the_base_in_mxfp4(pair: Pair) -> None:
    pair.change(unpack)
    pair.change(change_experts)
    found = pair.extracted()
    (tensor,) = found.experts
    assert (tensor.name, tensor.transposed) == ("model.layers.1.mlp.experts.down_proj", True)
    assert [one.rank for one in tensor.experts] == [2, 2, 2, 2]
    function = pair.validated(found).function
    assert function is not None
    assert function.ratio < 0.1


def test_the_values_in_the_file_are_those_that_the_class_would_load(pair: Pair) -> None:
    stored = load_file(pair.base / "model.safetensors")
    unpack(stored)
    with quiet():
        loaded = transformers.GptOssForCausalLM.from_pretrained(pair.base, dtype=torch.bfloat16)
    assert torch.equal(
        loaded.model.layers[0].mlp.experts.gate_up_proj, stored["model.layers.0.mlp.experts.gate_up_proj"]
    )


def test_a_merge_leaves_the_experts_in_mxfp4(pair: Pair) -> None:
    text = one_variant("o/oss", label="Oss", source="source", base="base", card=CARD, model_class=pair.model_class)
    Path("oss.yaml").write_text(text, encoding="utf-8")
    run(Run(Path("oss.yaml"), Path("dist"), device="cpu", last="extract"), silent)
    merge(Request(Path("oss.yaml"), Path("dist"), None, Path("merged")), silent)
    base, merged = (load_file(folder / "model.safetensors") for folder in (pair.base, Path("merged")))
    assert {name for name in base if not torch.equal(base[name], merged[name])} == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qv"
    }
    assert json.loads(Path("merged/config.json").read_text())["quantization_config"] == QUANTISATION


def test_a_merge_of_experts_writes_all_of_them_in_bfloat16(pair: Pair) -> None:
    pair.change(unpack)
    pair.change(change_experts)
    text = one_variant("o/oss", label="Oss", source="source", base="base", card=CARD, model_class=pair.model_class)
    Path("oss.yaml").write_text(text, encoding="utf-8")
    run(Run(Path("oss.yaml"), Path("dist"), device="cpu", last="extract"), silent)
    merge(Request(Path("oss.yaml"), Path("dist"), None, Path("merged")), silent)
    source, merged = (load_file(folder / "model.safetensors") for folder in (pair.source, Path("merged")))
    assert merged.keys() == source.keys()
    name = "model.layers.1.mlp.experts.down_proj"
    assert float((merged[name] == source[name]).double().mean()) > 0.8
    others = [other for other in source if other != name and "proj.weight" not in other]
    assert all(torch.equal(merged[other], source[other]) for other in others)
    assert "quantization_config" not in json.loads(Path("merged/config.json").read_text())


@pytest.mark.parametrize("changed", [True, False], ids=["experts", "attention alone"])
def test_the_card_says_to_load_the_base_dequantised_where_experts_are_adapted(pair: Pair, changed: bool) -> None:
    pair.change(unpack)
    if changed:
        pair.change(change_experts)
    text = one_variant("o/oss", label="Oss", source="source", base="base", card=CARD, model_class=pair.model_class)
    Path("oss.yaml").write_text(text, encoding="utf-8")
    run(Run(Path("oss.yaml"), Path("dist"), device="cpu", last="card"), silent)
    card = Path("dist/oss/README.md").read_text(encoding="utf-8")
    assert ("quantization_config=Mxfp4Config(dequantize=True),  # experts" in card) == changed
    assert ("Oss: the experts of base are in MXFP4" in card) == changed
