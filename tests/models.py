"""Small Llamas for tests: one builder of models with random weights, and the update that a merged LoRA leaves."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_llama(
    sizes: Mapping[str, Any],
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    spread: float | None = None,
) -> LlamaForCausalLM:
    """Build a Llama with random weights.

    Args:
        sizes: fields of the configuration; what it does not name is of two layers of width 32.
        seed: of the weights.
        dtype: of the weights.
        spread: standard deviation of each matrix, where transformers' own initial values are too alike.

    Returns:
        The model, for inference.
    """
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**_SIZES | dict(sizes))).to(dtype).eval()
    if spread is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.copy_((spread * torch.randn(parameter.shape)).to(dtype))
    return model


def add_update(model: torch.nn.Module, which: str, *, rank: int, scale: float) -> None:
    """Change linears as a merged LoRA would have.

    Args:
        model: changed in place.
        which: a pattern that is searched for in the name of each linear.
        rank: of the update of each.
        scale: of the update; 0.02 is about that of a real fine-tune.
    """
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and re.search(which, name):
                rows, columns = layer.weight.shape
                update = scale * torch.randn(rows, rank) @ torch.randn(rank, columns)
                layer.weight.copy_((layer.weight.float() + update).to(layer.weight.dtype))


def write_llama_config(folder: Path, *, size: int, layers: int) -> None:
    """Write config.json of a Llama whose layers have matrices of one size, for checkpoints that hold some of them."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config.save_pretrained(folder)
