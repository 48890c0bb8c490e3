"""config.json of others: checked and bounded before any class of transformers is built from it.

Whatever counts layers, experts or other things is bounded by its name; a model of too many modules all the same stops
while it is built (`bounded_modules`). Fields that name code, kernels, other files or weights to fetch are left out.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from publisher.border.limits import LIMITS
from publisher.errors import ValidationError, shown

_LAYERS: Final = re.compile(
    r"(^|_)(n_|num_)?(layers?|depths?|stages?|loops?|repeats?)(_num|_count)?$|^(n|num)_.*blocks?$"
)
_EXPERTS: Final = re.compile(r"(^|_)experts?(_num|_count)?$|^(n|num)_.*experts?")
_COUNTS: Final = re.compile(r"^(n|num)_|_(num|count)$")
_LAYER_WISE: Final = re.compile(r"(^|_)(layers?|depths?|stages?|blocks?)(_|$)")
_LEFT_OUT: Final = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "configuration_files",
        "custom_pipelines",
        "use_kernels",
        "use_pretrained_backbone",
        "quantization_config",
    }
)  # they name code, kernels, other configurations, or weights to be fetched
_PLAIN: Final = re.compile(r"[\w.]{1,512}")  # a dot stands for any character in a pattern, which does no harm
_FLOAT: Final = 1e38  # torch works in float32
_POSITIONS: Final = re.compile(r"positions|(^|_)ctx$")


def readable_quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what transformers needs to read weights in FP8 or MXFP4, or None where the config asks for neither.

    Nothing else of `quantization_config` is handed on: other methods bring code of their own, and transformers reads
    the names of modules that are left as they are as patterns, so only plain names are kept.
    """
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method == "mxfp4":
        return {"quant_method": "mxfp4", "dequantize": True}
    if not isinstance(found, dict) or method != "fp8":
        return None
    kept = {field: found[field] for field in ("activation_scheme", "fmt") if isinstance(found.get(field), str)}
    block = found.get("weight_block_size")
    if isinstance(block, list) and all(isinstance(side, int) and 0 < side <= LIMITS.counts for side in block):
        kept["weight_block_size"] = block
    names = found.get("modules_to_not_convert")
    if isinstance(names, list) and len(names) <= LIMITS.patterns:
        kept["modules_to_not_convert"] = [one for one in names if isinstance(one, str) and _PLAIN.fullmatch(one)]
    return {"quant_method": "fp8", **kept}


def bounded_config(config: Mapping[str, Any], *, file: Path) -> dict[str, Any]:
    """Return what a class may be built from: every value checked, and no field that names code or other files.

    Args:
        config: the object in a config.json.
        file: where it stands, for the message.

    Raises:
        ValidationError: naming the file, the field, its value and the limit.
    """
    kept = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    for place, name, value in _values(kept, "", depth=0):
        if (limit := _complaint(name, value)) is not None:
            raise ValidationError(
                f"{file}: {place} is {shown(value)}",
                expected=limit,
                next_step="name another base, or correct the field",
            )
    return _without(kept)


def _without(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without(inner) if isinstance(inner, dict) else inner
        for name, inner in value.items()
        if name not in _LEFT_OUT
    }


def _values(value: object, place: str, *, depth: int, name: str = "") -> Iterator[tuple[str, str, object]]:
    """Give each value with its place and the name of the field that holds it, that of a list for its entries."""
    if depth > LIMITS.json_depth:
        yield place, name, Ellipsis
        return
    yield place, name, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, f"{place}.{key}" if place else str(key), depth=depth + 1, name=str(key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _values(inner, f"{place}[{at}]", depth=depth + 1, name=name)


def _complaint(name: str, value: object) -> str | None:
    """Return what was expected where the value is beyond its limit."""
    match value:
        case None | bool():
            return None
        case list() | dict():
            limit = LIMITS.layers if _LAYER_WISE.search(name) else LIMITS.counts
            return f"at most {limit:,} entries" if len(value) > limit else None
        case str():
            counts = any(rule.search(name) for rule in (_LAYERS, _EXPERTS, _COUNTS))
            return "a number, not a string" if counts and value.strip().lstrip("+-").isdecimal() else None
        case float():
            return None if math.isfinite(value) and abs(value) <= _FLOAT else "a finite number"
        case int():
            limit = _limit(name)
            return None if abs(value) <= limit else f"at most {limit:,}"
    return f"at most {LIMITS.json_depth} levels"


def _limit(name: str) -> int:
    """Return the largest number that a field of this name may hold."""
    if _LAYERS.search(name):
        return LIMITS.layers
    if _EXPERTS.search(name):
        return LIMITS.experts
    return LIMITS.counts if _COUNTS.search(name) and not _POSITIONS.search(name) else LIMITS.integer


@contextmanager
def bounded_modules(what: str) -> Iterator[None]:
    """Stop whatever builds modules within, once it has made more than any model has.

    Args:
        what: is built, for the message.

    Raises:
        ValidationError: the limit is reached.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > LIMITS.modules:
            raise ValidationError(
                f"{what} has more than {LIMITS.modules:,} modules",
                expected="a model of a size that exists",
                next_step="look at the numbers of layers and experts in the base's config.json",
            )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
