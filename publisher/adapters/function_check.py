"""Whether base + adapter computes what the merged fine-tune does: logits on fixed token ids, in float32."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from publisher.adapters.loading import AdapterLocation, configuration, load_adapter, whole_model
from publisher.adapters.quantised_model import set_quantised
from publisher.adapters.structure_checks import require_no_problems
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import ValidationError
from publisher.manifest.schema import Variant
from publisher.numerics.randomness import seeded
from publisher.records.checkpoint import Snapshot
from publisher.records.validation import FunctionCheck

FUNCTION_LIMIT = 0.5  # of the way from the fine-tune's logits to the base's
_SEQUENCES, _TOKENS = 2, 32
_MEMORY_SHARE = 0.6  # of what is free, for one model in float32 and its activations


def function_obstacle(headers: Mapping[str, TensorHeader]) -> str | None:
    """Return what keeps this machine from comparing logits, in words; None where nothing does."""
    needed = 4 * sum(math.prod(header.shape) for header in headers.values())
    free = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    if needed <= free:
        return None
    return f"the model needs {needed / 1e9:.1f} GB in float32 and {free / 1e9:.1f} GB of memory can be used"


def require_function(variant: Variant, *, base: Snapshot, tuned: Snapshot, staged: Path) -> FunctionCheck:
    """Compare the logits of base + adapter with those of the merged fine-tune, one model in memory at a time.

    Args:
        variant: the manifest's entry, which names the class.
        base: the base, whole on this machine.
        tuned: the merged fine-tune, whole on this machine.
        staged: the folder of the adapter.

    Returns:
        How far the logits are apart, for 2 sequences of 32 token ids.

    Raises:
        ValidationError: the adapter changes nothing, or leads less than half of the way to the fine-tune.
    """
    ids = _token_ids(configuration(base.folder))
    whole = whole_model(variant.model_class, base.folder)
    set_quantised(whole, base.quantised)
    adapted, complaints = load_adapter(whole, AdapterLocation(staged))
    del whole
    require_no_problems(complaints, f"PEFT complains about {staged}")
    with_adapter = _logits(adapted, ids)
    with adapted.disable_adapter():
        without = _logits(adapted, ids)
    del adapted
    released = _logits(whole_model(variant.model_class, tuned.folder), ids)
    check = _function_check(with_adapter, without, released=released)
    if not check.ratio < FUNCTION_LIMIT:
        raise ValidationError(
            f"{variant.label}: the logits of base + adapter are {check.distance} from the source's, "
            f"those of the base {check.base_distance}",
            expected=f"less than {FUNCTION_LIMIT:.0%} of the base's distance",
            next_step="compare source, base and rank in the manifest with how the release was trained",
        )
    return check


def _function_check(with_adapter: torch.Tensor, without: torch.Tensor, *, released: torch.Tensor) -> FunctionCheck:
    distance = float(torch.linalg.vector_norm((with_adapter - released).double()))
    base_distance = float(torch.linalg.vector_norm((without - released).double()))
    return FunctionCheck(
        dtype="float32",
        tokens=(_SEQUENCES, _TOKENS),
        distance=distance,
        base_distance=base_distance,
        ratio=distance / base_distance if base_distance else math.inf,
        largest=float((with_adapter - released).abs().max()),
    )


def _token_ids(config: Any) -> torch.Tensor:
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(vocabulary, (_SEQUENCES, _TOKENS), generator=seeded("tokens", torch.device("cpu")))


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids)[0].float()
    return logits
