"""Names that wrappers of a model put before its tensors' own, and that are read through.

torch.compile, FSDP and activation checkpointing put theirs before the names of a part of the model, and
DistributedDataParallel and PEFT before all of them. Where PEFT's adapter is still there, that is named before
(`tensor_formats`).
"""

import re
from collections.abc import Collection, Iterable
from typing import Final

_INSIDE: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_BEFORE_ALL: Final = ("module.", "base_model.model.")


def unwrapped(names: Iterable[str], own: Collection[str] = ()) -> dict[str, str]:
    """Return each name with what it is without the prefixes of wrappers.

    Args:
        names: of all tensors of a checkpoint.
        own: names that the model class has; they stay as they are.

    Returns:
        The short name of each.
    """
    short = {name: name if name in own else _without_inner(name) for name in names}
    for prefix in _BEFORE_ALL:
        if _is_before_all(prefix, short.values()) and not any(name.startswith(prefix) for name in own):
            short = {name: one.removeprefix(prefix) for name, one in short.items()}
    return short


def key_mapping(names: Iterable[str]) -> dict[str, str] | None:
    """Return what transformers' `from_pretrained` needs to read through the prefixes; None where there are none."""
    short = unwrapped(names)
    if all(name == one for name, one in short.items()):
        return None
    most = {prefix: max(name.count(prefix) for name in short) for prefix in _INSIDE}
    # a pattern takes away the first of its kind in a name; a comment makes of one pattern several
    inside = {f"{re.escape(prefix)}(?#{turn})": "" for prefix, times in most.items() for turn in range(times)}
    inner, before = [_without_inner(name) for name in short], dict[str, str]()
    for prefix in _BEFORE_ALL:
        if _is_before_all(prefix, inner):
            before[f"^{re.escape(prefix)}"] = ""
            inner = [name.removeprefix(prefix) for name in inner]
    return inside | before


def _is_before_all(prefix: str, names: Collection[str]) -> bool:
    return all(name.startswith(prefix) for name in names)


def _without_inner(name: str) -> str:
    for prefix in _INSIDE:
        name = name.replace(prefix, "")
    return name
