"""Small checkpoints of real architectures, and fine-tunes of them, as save_pretrained writes them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from publisher.engines.local import Local
from publisher.manifest.schema import AdapterSettings, Reference, Variant
from publisher.pipeline.stages.extract import extract
from publisher.pipeline.stages.fetch import fetch
from publisher.pipeline.stages.validate import validate
from publisher.records.extraction import Extraction
from publisher.records.progress import silent
from publisher.records.validation import Validation
from tests.manifests import ADAPTER

CPU = torch.device("cpu")
RANK = 2
FP8_BLOCK = 16
Weights = dict[str, torch.Tensor]

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _SIZES),
    "Qwen2": ("Qwen2ForCausalLM", _SIZES),
    "Gemma2": ("Gemma2ForCausalLM", _SIZES),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", _SIZES | _EXPERTS),
    "Qwen3_5Text": ("Qwen3_5ForCausalLM", _SIZES | _LINEAR_ATTENTION),
    "Qwen3_5MoeText": (
        "Qwen3_5MoeForCausalLM",
        _SIZES | _EXPERTS | _LINEAR_ATTENTION | {"shared_expert_intermediate_size": 16},
    ),
    "Mixtral": ("MixtralForCausalLM", _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT2": ("GPT2LMHeadModel", _GPT2 | {"eos_token_id": 2}),
    "Mamba": ("MambaForCausalLM", _MAMBA | {"bos_token_id": 1, "eos_token_id": 2}),
}


@dataclass
class Pair:
    """A base and a fine-tune in two folders; `change` edits the fine-tune's tensors before anything is read."""

    folder: Path
    model_class: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        """The base's folder."""
        return self.folder / "base"

    @property
    def source(self) -> Path:
        """The fine-tune's folder."""
        return self.folder / "source"

    @property
    def staged(self) -> Path:
        """Where the adapter is written."""
        return self.folder / "staged"

    def change(self, recipe: Callable[[Weights], object], *, side: str = "source") -> None:
        """Edit the tensors of one side."""
        file = self.folder / side / "model.safetensors"
        weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
        recipe(weights)
        save_file(weights, file, metadata={"format": "pt"})

    @property
    def variant(self) -> Variant:
        """The manifest's entry."""
        return Variant(
            path="/",
            label="Small",
            source=Reference(path="source"),
            base=Reference(path="base"),
            model_class=self.model_class,
            adapter=AdapterSettings.model_validate({**ADAPTER, **self.settings}),
        )

    def extracted(self, **settings: Any) -> Extraction:
        """The fine-tune's adapter in `staged`, with these settings of the manifest."""
        self.settings = settings
        places = {"staged": self.staged, "work": self.folder / "work"}
        sides = self.snapshots()
        return extract(self.variant, base=sides[1], tuned=sides[0], **places, engine=Local(CPU), progress=silent)

    def validated(self, extraction: Extraction) -> Validation:
        """What PEFT, the numbers and the logits say of it."""
        source, base = self.snapshots()
        places = {"base": base, "tuned": source, "staged": self.staged}
        return validate(self.variant, extraction, **places, engine=Local(CPU), progress=silent)

    def snapshots(self) -> Any:
        """Source and base, as they lie in their folders."""
        memo = self.folder / "memo.json"
        return tuple(fetch(Reference(path=name), memo=memo, progress=silent) for name in ("source", "base"))


def tune(weights: Weights, pattern: str, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Add an update of rank 2, about as large as the weights, to each matrix that matches; stacks of them likewise."""
    for name in sorted(weights):
        if re.search(pattern, name) and weights[name].dim() > 1:
            *stack, rows, columns = weights[name].shape
            update = torch.randn(*stack, rows, RANK) @ torch.randn(*stack, RANK, columns)
            weights[name] = (weights[name].float() + 0.02 * update).to(dtype)


def quantise(weights: Weights, pattern: str) -> None:
    """Weights of matching names in float8_e4m3fn with a scale for each block, as FP8 releases store them."""
    for name in [name for name in sorted(weights) if re.search(pattern, name)]:
        rows, columns = weights[name].shape
        blocks = weights[name].float().reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        weights[name] = (blocks / scale).reshape(rows, columns).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.reshape(rows // FP8_BLOCK, columns // FP8_BLOCK).contiguous()


def say_fp8(config: Path) -> None:
    """Let this config.json say how `quantise` stored the weights."""
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    how |= {"modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": how}))
