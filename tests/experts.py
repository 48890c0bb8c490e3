"""Small models with experts: one of each class, and updates whose rank differs from expert to expert."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "head_dim": 8,
}
_CLASSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 4}),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Qwen3_5MoeForCausalLM": (
        "Qwen3_5MoeTextConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    ),
}
CLASSES = ("Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM")
RANKS = (3, 1, 0, 5)  # of the update of each expert; one does not change


def small_experts(model_class: str, *, seed: int = 3, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Build a model with random weights, for inference.

    Args:
        model_class: one of `CLASSES`.
        seed: of the weights.
        dtype: of the weights.

    Returns:
        The model.
    """
    config_class, more = _CLASSES[model_class]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**_SIZES | dict(more))
    model = getattr(transformers, model_class)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_((0.05 * torch.randn(parameter.shape)).to(dtype))
    return model


def update_experts(model: Any, *, ranks: tuple[int, ...] = RANKS, scale: float = 0.02, which: str = "") -> None:
    """Change every expert as PEFT's merge would: the update is rounded before it is added.

    Args:
        model: changed in place.
        ranks: of the update, by expert.
        scale: of the update.
        which: what the parameters' names contain.
    """
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3 and ".experts." in name and which in name:
                for matrix, rank in zip(parameter, ranks, strict=True):
                    add_rounded(matrix, rank=rank, scale=scale)


def add_rounded(matrix: torch.Tensor, *, rank: int, scale: float = 0.02) -> None:
    """Add an update of this rank to a matrix, (rows, columns), rounded to its dtype before it is added."""
    rows, columns = matrix.shape
    update = scale * torch.randn(rows, rank) @ torch.randn(rank, columns)
    with torch.no_grad():
        matrix.add_(update.to(matrix.dtype))


def save_as_class(model: Any, folder: Path) -> None:
    """Save a model under the names that its class has, with all experts of a layer in one tensor."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_as_transformers(model: Any, folder: Path) -> None:
    """Save a model as save_pretrained does: where the class has it so, with a tensor for each expert."""
    model.save_pretrained(folder)
