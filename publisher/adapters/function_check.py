"""Whether base + adapter computes what the merged fine-tune does: logits on fixed inputs, in float32."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from publisher.adapters.loading import AdapterLocation, labels_in, load_adapter, whole_model
from publisher.adapters.model_inputs import InputError, Inputs, inputs_for, outputs_of, shapes_of
from publisher.adapters.quantised_model import set_quantised
from publisher.adapters.structure_checks import require_no_problems
from publisher.adapters.task_type_check import told
from publisher.checkpoints.dtypes import ADAPTER_DTYPES, safetensors_dtype
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.snapshots import headers_of
from publisher.errors import ValidationError
from publisher.manifest.schema import Variant
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.validation import FunctionCheck

FUNCTION_LIMIT = 0.5  # of the way from the fine-tune's logits to the base's
_MEMORY_SHARE = 0.6  # of what is free, for one model in float32 and its activations

_Outputs = Mapping[str, torch.Tensor]


def function_obstacle(headers: Mapping[str, TensorHeader]) -> str | None:
    """Return what keeps this machine from comparing logits, in words; None where nothing does."""
    needed = 4 * sum(math.prod(header.shape) for header in headers.values())
    free = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    if needed <= free:
        return None
    return f"the model needs {needed / 1e9:.1f} GB in float32 and {free / 1e9:.1f} GB of memory can be used"


def require_function(
    variant: Variant, extraction: Extraction, *, base: Snapshot, tuned: Snapshot, staged: Path
) -> FunctionCheck | str:
    """Compare the logits of base + adapter with those of the merged fine-tune, one model in memory at a time.

    A class without logits is compared by its last hidden state, or by all values that it gives. Where the release was
    rounded to a shorter dtype than the base's files have, so are both models here, as the merge was (`extraction`).

    Args:
        variant: the manifest's entry, which names the class.
        extraction: of the adapter, which says how the release was merged.
        base: the base, whole on this machine.
        tuned: the merged fine-tune, whole on this machine.
        staged: the folder of the adapter.

    Returns:
        How far the logits are apart; or why they cannot be compared for this class.

    Raises:
        ValidationError: the adapter changes nothing, leads less than half of the way to the fine-tune, or cannot be
            called as PEFT wraps the class for the manifest's task type.
    """
    location = AdapterLocation(staged)
    before, after = _casts(extraction, base=base, tuned=tuned)
    plain = _base(variant, base, labels=labels_in(location), cast=before)
    try:
        inputs, without = _first_run(plain)
        adapted, complaints = load_adapter(plain, location)
        require_no_problems(complaints, f"PEFT complains about {staged}")
        with_adapter = _run_by_peft(adapted, inputs, variant)
        if after is not None:
            with_adapter = outputs_of(_cast(adapted.merge_and_unload(), after), inputs)
            del plain, adapted
            plain = adapted = _base(variant, base, labels=labels_in(location), cast=after)
            without = outputs_of(plain, inputs)
        del plain, adapted
        released = outputs_of(whole_model(variant.model_class, tuned.folder), inputs)
    except InputError as error:
        return str(error)
    check = _function_check(with_adapter, without, released=released, inputs=inputs)
    if not check.distance and not check.base_distance:
        return f"what differs has no part in the {', '.join(without)} of {', '.join(inputs)} alone"
    if not check.ratio < FUNCTION_LIMIT:
        raise ValidationError(
            f"{variant.label}: the {', '.join(without)} of base + adapter are {check.distance} from the source's, "
            f"those of the base {check.base_distance}",
            expected=f"less than {FUNCTION_LIMIT:.0%} of the base's distance",
            next_step="compare source, base and rank in the manifest with how the release was trained",
        )
    return check


def _casts(extraction: Extraction, *, base: Snapshot, tuned: Snapshot) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes that a longer base was cast to before the merge, and what it gave after; None for no cast."""
    stored, released = (_usual_dtype(headers_of(side)) for side in (base, tuned))
    ways = extraction.summary.merge_arithmetic
    way = max(ways, key=lambda one: one.modules) if ways else None
    rounded = released if way is None else ADAPTER_DTYPES[way.rounded_to]
    if torch.promote_types(stored, rounded) == rounded:
        return None, None
    return (rounded, None) if way is None or way.merged_in == way.rounded_to else (None, rounded)


def _usual_dtype(headers: Mapping[str, TensorHeader]) -> torch.dtype:
    """Return the dtype of most elements that is one of weights."""
    sizes = Counter[str]()
    for header in headers.values():
        sizes[header.dtype] += math.prod(header.shape)
    known: dict[str, torch.dtype] = {safetensors_dtype(dtype): dtype for dtype in ADAPTER_DTYPES.values()}
    return known.get(max(sizes, key=sizes.__getitem__), torch.bfloat16)


def _base(variant: Variant, base: Snapshot, *, labels: int | None, cast: torch.dtype | None) -> Any:
    """Return the base in float32, in the quantisation that it is read in, and with its values cast to a dtype."""
    model = whole_model(variant.model_class, base.folder, labels=labels)
    set_quantised(model, base.quantised)
    return _cast(model, cast)


def _cast(model: Any, dtype: torch.dtype | None) -> Any:
    """Return the model with its parameters rounded to a dtype, in place; they stay in float32."""
    if dtype is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
    return model


def _function_check(with_adapter: _Outputs, without: _Outputs, *, released: _Outputs, inputs: Inputs) -> FunctionCheck:
    differences = _differences(with_adapter, released)
    distance = float(torch.linalg.vector_norm(differences))
    base_distance = float(torch.linalg.vector_norm(_differences(without, released)))
    return FunctionCheck(
        dtype="float32",
        inputs=shapes_of(inputs),
        outputs=tuple(released),
        distance=distance,
        base_distance=base_distance,
        ratio=distance / base_distance if base_distance else float(distance > 0),
        largest=float(differences.abs().max()),
    )


def _differences(found: _Outputs, released: _Outputs) -> torch.Tensor:
    return torch.cat([(found[name] - released[name]).double().flatten() for name in released])


def _first_run(model: Any) -> tuple[Inputs, _Outputs]:
    """Return the first inputs that the model computes something of, and what that is.

    Raises:
        InputError: there are none; the reason of the last is given.
    """
    why = "no input is known that it takes"
    for inputs in inputs_for(model):
        try:
            return inputs, outputs_of(model, inputs)
        except Exception as error:  # noqa: BLE001 - whatever a class raises, it is not called so
            why = told(error)
    raise InputError(f"{type(model).__name__} computes nothing of the inputs that were made for it ({why})")


def _run_by_peft(adapted: Any, inputs: Inputs, variant: Variant) -> _Outputs:
    try:
        return outputs_of(adapted, inputs)
    except Exception as error:
        raise ValidationError(
            f"{variant.label}: {variant.model_class} with the adapter cannot be called as PEFT wraps it for task_type "
            f"{variant.adapter.task_type}: {told(error)}",
            expected="a task type whose wrapper hands the class's own inputs on",
            next_step="leave adapter.task_type out of the manifest, as `publish new` does for this class",
        ) from error
