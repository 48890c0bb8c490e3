"""The adapter's two files, as PEFT reads them: written directly, never saved through PEFT.

PEFT's own save would write float32, blank the base model's name and rewrite the tags.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from publisher.files import atomic
from publisher.manifest import Variant
from publisher.records import Carried, Checkpoint, ModuleExtraction

KEY_PREFIX = "base_model.model."  # the wrapped model sits at PeftModel.base_model.model


@dataclass(frozen=True, slots=True)
class Factors:
    """One finished module: B (m, r) and A (r, n) in the adapter's dtype, of the weight (m, n) as stored, and figures.

    A weight stored as (in, out) has its factors exchanged and transposed in the file: there, A is always (r, in).
    """

    b: torch.Tensor
    a: torch.Tensor
    figures: ModuleExtraction


def adapter_config(
    variant: Variant,
    modules: Sequence[ModuleExtraction],
    *,
    rank: int,
    base: Checkpoint,
    carried: Sequence[Carried] = (),
) -> dict[str, object]:
    """adapter_config.json as PEFT reads it: full module names, and a scaling of 1 in every module.

    `rank` is the adapter's `r`; with the layout `pattern`, narrower modules are named in rank_pattern and
    alpha_pattern both, since one without the other would change their scale. PEFT follows a carried module's tie
    to others, as of an embedding table to the head, where it is asked to.
    """
    narrow = {module.name: module.rank for module in modules if module.alpha != rank}
    tied = {"ensure_weight_tying": True} if any(module.tied for module in carried) else {}
    return tied | {
        "peft_type": "LORA",
        "task_type": variant.adapter.task_type,
        "base_model_name_or_path": base.name,
        "revision": base.revision if base.kind == "hub" else None,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": narrow,
        "alpha_pattern": narrow,
        "target_modules": [module.name for module in modules],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(module.transposed for module in modules),
        "use_rslora": False,
        "use_dora": False,
        "lora_bias": False,
        "init_lora_weights": True,
        "modules_to_save": [module.module for module in carried] or None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "inference_mode": True,
    }


def padded(module: Factors, rank: int) -> Factors:
    """The same product with `rank` columns: what is added is zero."""
    missing = rank - module.figures.rank
    b = torch.nn.functional.pad(module.b, (0, missing))
    a = torch.nn.functional.pad(module.a, (0, 0, 0, missing))
    return Factors(b, a, module.figures.model_copy(update={"alpha": rank}))


def carried_keys(carried: Sequence[Carried]) -> dict[str, str]:
    """Each key of the file for modules carried whole, and the tensor of the source that it holds."""
    return {
        f"{KEY_PREFIX}{holder}.{name.removeprefix(f'{module.module}.')}": name
        for module in carried
        for holder in (module.module, *module.tied)
        for name in module.tensors
    }


def write_adapter(path: Path, modules: Sequence[Factors], *, carried: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write adapter_model.safetensors atomically; the same factors give the same bytes.

    `carried` are the tensors of `carried_keys`, by their keys.
    """
    tensors = {key: tensor.clone() for key, tensor in (carried or {}).items()}
    for module in modules:
        key = KEY_PREFIX + module.figures.name
        a, b = (module.b.T, module.a.T) if module.figures.transposed else (module.a, module.b)
        tensors[f"{key}.lora_A.weight"] = a.contiguous()
        tensors[f"{key}.lora_B.weight"] = b.contiguous()
    with atomic(path) as partial:
        # one metadata key only: safetensors writes several in random order
        save_file(tensors, partial, metadata={"format": "pt"})
