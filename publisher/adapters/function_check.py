"""Whether base + adapter computes what the merged fine-tune does: logits on fixed inputs, in float32."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from publisher.adapters.loading import AdapterLocation, load_adapter, whole_model
from publisher.adapters.model_inputs import inputs_for, shapes_of
from publisher.adapters.quantised_model import set_quantised
from publisher.adapters.structure_checks import require_no_problems
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import ValidationError
from publisher.manifest.schema import Variant
from publisher.records.checkpoint import Snapshot
from publisher.records.validation import FunctionCheck

FUNCTION_LIMIT = 0.5  # of the way from the fine-tune's logits to the base's
_SHOWN = 300  # characters of what a class raises
_MEMORY_SHARE = 0.6  # of what is free, for one model in float32 and its activations

_Inputs = Mapping[str, torch.Tensor]


def function_obstacle(headers: Mapping[str, TensorHeader]) -> str | None:
    """Return what keeps this machine from comparing logits, in words; None where nothing does."""
    needed = 4 * sum(math.prod(header.shape) for header in headers.values())
    free = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    if needed <= free:
        return None
    return f"the model needs {needed / 1e9:.1f} GB in float32 and {free / 1e9:.1f} GB of memory can be used"


def require_function(variant: Variant, *, base: Snapshot, tuned: Snapshot, staged: Path) -> FunctionCheck | str:
    """Compare the logits of base + adapter with those of the merged fine-tune, one model in memory at a time.

    A class without logits is compared by the first values that it gives.

    Args:
        variant: the manifest's entry, which names the class.
        base: the base, whole on this machine.
        tuned: the merged fine-tune, whole on this machine.
        staged: the folder of the adapter.

    Returns:
        How far the logits are apart; or why none can be had of this class.

    Raises:
        ValidationError: the adapter changes nothing, leads less than half of the way to the fine-tune, or cannot be
            called as PEFT wraps the class for the manifest's task type.
    """
    plain = whole_model(variant.model_class, base.folder)
    set_quantised(plain, base.quantised)
    inputs = _usable_inputs(plain)
    if isinstance(inputs, str):
        return inputs
    without = _logits(plain, inputs)
    adapted, complaints = load_adapter(plain, AdapterLocation(staged))
    require_no_problems(complaints, f"PEFT complains about {staged}")
    with_adapter = _logits_by_peft(adapted, inputs, variant)
    del plain, adapted
    released = _logits(whole_model(variant.model_class, tuned.folder), inputs)
    check = _function_check(with_adapter, without, released=released, inputs=inputs)
    if not check.ratio < FUNCTION_LIMIT:
        raise ValidationError(
            f"{variant.label}: the logits of base + adapter are {check.distance} from the source's, "
            f"those of the base {check.base_distance}",
            expected=f"less than {FUNCTION_LIMIT:.0%} of the base's distance",
            next_step="compare source, base and rank in the manifest with how the release was trained",
        )
    return check


def _function_check(
    with_adapter: torch.Tensor, without: torch.Tensor, *, released: torch.Tensor, inputs: _Inputs
) -> FunctionCheck:
    distance = float(torch.linalg.vector_norm((with_adapter - released).double()))
    base_distance = float(torch.linalg.vector_norm((without - released).double()))
    return FunctionCheck(
        dtype="float32",
        inputs=shapes_of(inputs),
        distance=distance,
        base_distance=base_distance,
        ratio=distance / base_distance if base_distance else math.inf,
        largest=float((with_adapter - released).abs().max()),
    )


def _usable_inputs(model: Any) -> _Inputs | str:
    """Return the first inputs that the model computes something of; or why there are none."""
    why = "no input is known that it takes"
    for inputs in inputs_for(model):
        try:
            logits = _logits(model, inputs)
        except Exception as error:  # noqa: BLE001 - whatever a class raises, it is not called so
            why = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]
            continue
        if bool(logits.isfinite().all()):
            return inputs
        why = "its logits are not finite"
    return f"no inputs could be made for {type(model).__name__} ({why})"


def _logits_by_peft(adapted: Any, inputs: _Inputs, variant: Variant) -> torch.Tensor:
    try:
        return _logits(adapted, inputs)
    except Exception as error:
        raise ValidationError(
            f"{variant.label}: {variant.model_class} with the adapter cannot be called as PEFT wraps it for task_type "
            f"{variant.adapter.task_type}: {' '.join(f'{type(error).__name__}: {error}'.split())[:_SHOWN]}",
            expected="a task type whose wrapper hands the class's own inputs on",
            next_step="leave adapter.task_type out of the manifest, as `publish new` does for this class",
        ) from error


def _logits(model: Any, inputs: _Inputs) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs)[0].float()
    return logits.clone()
