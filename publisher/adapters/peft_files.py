"""The adapter's two files, as PEFT reads them: written directly, never saved through PEFT.

PEFT's own save would write float32, blank the base model's name and rewrite the tags.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from publisher.adapters.residual import Residual
from publisher.checkpoints.writing import Planned, write_tensors
from publisher.records.checkpoint import Checkpoint
from publisher.records.extraction import (
    KEY_PREFIX,
    ExpertTensor,
    ModuleExtraction,
    ModuleFigures,
    SavedModule,
    TokenRows,
)


@dataclass(frozen=True, slots=True)
class Factors:
    """One finished module.

    A weight stored as (in, out) has its factors exchanged and transposed in the file: there, A is always (r, in).

    Attributes:
        b: B (m, r) in the adapter's dtype, of the weight (m, n) as stored.
        a: A (r, n) in the adapter's dtype.
        figures: what extraction.json says of the module.
        residual: what a merge leaves to be set, where the manifest asks for it.
    """

    b: torch.Tensor
    a: torch.Tensor
    figures: ModuleFigures
    residual: Residual | None = None


def adapter_config(
    modules: Sequence[ModuleExtraction],
    *,
    task_type: str | None,
    rank: int,
    base: Checkpoint,
    carried: Sequence[SavedModule] = (),
    token_rows: Sequence[TokenRows] = (),
    experts: Sequence[ExpertTensor] = (),
) -> dict[str, object]:
    """Return adapter_config.json as PEFT reads it: full module names, and a scaling of 1 in every module.

    With the layout `pattern`, narrower modules are named in rank_pattern and in alpha_pattern, since one without the
    other would change their scale. Where a carried module is tied to others, as an embedding table to the head, PEFT
    is asked to keep the tie. Parameters of experts go by their own full names, in the patterns too.

    Args:
        modules: of the adapter.
        task_type: PEFT's name of the task, such as `CAUSAL_LM`; None where no task's wrapper fits the class.
        rank: the adapter's `r`.
        base: that the adapter is for.
        carried: the modules that the adapter holds whole, PEFT's modules_to_save.
        token_rows: the tables of which the adapter holds some rows, PEFT's trainable_token_indices.
        experts: the parameters of experts, PEFT's target_parameters.

    Returns:
        The fields by name.
    """
    alphas = {module.name: module.alpha for module in modules} | {tensor.name: tensor.alpha for tensor in experts}
    narrow = {name: alpha for name, alpha in alphas.items() if alpha != rank}
    wrapped = {"target_parameters": [tensor.name for tensor in experts]} if experts else {}
    rows = {"trainable_token_indices": {table.module: list(table.rows) for table in token_rows}} if token_rows else {}
    tied = {"ensure_weight_tying": True} if any(module.tied for module in carried) else {}
    return {
        **tied,
        **wrapped,
        **rows,
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base.name,
        "revision": base.revision if base.kind == "hub" else None,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": narrow,
        "alpha_pattern": narrow,
        "target_modules": [module.name for module in modules],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(module.transposed and module.kind == "linear" for module in modules),
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
    """Return factors with `rank` columns and the same product: what is added is zero."""
    missing = rank - module.figures.rank
    b = torch.nn.functional.pad(module.b, (0, missing))
    a = torch.nn.functional.pad(module.a, (0, 0, 0, missing))
    return Factors(b, a, module.figures)


def carried_keys(carried: Sequence[SavedModule]) -> dict[str, str]:
    """Return each key of the file for modules carried whole, with the name of the tuned tensor that it holds."""
    return {
        f"{KEY_PREFIX}{holder}.{name.removeprefix(f'{module.module}.')}": name
        for module in carried
        for holder in (module.module, *module.tied)
        for name in module.tensors
    }


def token_row_keys(token_rows: Sequence[TokenRows]) -> dict[str, TokenRows]:
    """Return each key of the file for rows of a table, with the table; a tied one has no key of its own."""
    return {f"{KEY_PREFIX}{table.module}.token_adapter.trainable_tokens_delta": table for table in token_rows}


def write_adapter(
    path: Path,
    modules: Sequence[ModuleExtraction],
    *,
    dtype: torch.dtype,
    load: Callable[[ModuleExtraction], Factors],
    carried: Mapping[str, Planned],
    experts: Mapping[str, Planned],
) -> None:
    """Write adapter_model.safetensors atomically; the same factors give the same bytes.

    Args:
        path: the file.
        modules: the figures of all modules, each with the `alpha` it is padded to.
        dtype: of the factors.
        load: gives the factors of one module, when their turn to be written comes.
        carried: the tensors of `carried_keys`, by their keys.
        experts: the tensors of `planned_experts`, by their keys.

    Raises:
        NoRoomError: the disk is full.
    """
    tensors = dict(carried) | dict(experts)
    for module in modules:
        for half, (key, shape) in enumerate(zip(module.keys, module.factor_shapes, strict=True)):
            tensors[key] = Planned(shape, dtype, partial(_in_file, module, load, half=half))
    write_tensors(path, tensors)


def as_stored(module: ModuleExtraction, *, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the weight as stored, from those of the file.

    Args:
        module: that they are of.
        a: A in the shape that `module.factor_shapes` says.
        b: B in the shape that `module.factor_shapes` says.

    Returns:
        (m, r) and (r, n), whose product is the update of the weight (m, n).
    """
    a, b = a.flatten(1), b.flatten(1)
    return (a.T, b.T) if module.transposed else (b, a)


def _in_file(module: ModuleExtraction, load: Callable[[ModuleExtraction], Factors], *, half: int) -> torch.Tensor:
    """Return A (half 0) or B (half 1) as the file has it."""
    factors = padded(load(module), module.alpha)
    halves = (factors.b.T, factors.a.T) if module.transposed else (factors.a, factors.b)
    return halves[half].reshape(module.factor_shapes[half])
