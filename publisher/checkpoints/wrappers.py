"""Names that wrappers of a model put before its tensors' own, and that are read through.

torch.compile, FSDP and activation checkpointing put theirs before the names of a part of the model, and
DistributedDataParallel before all of them.
"""

import re
from collections.abc import Collection, Iterable
from typing import Final

_INSIDE: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_BEFORE_ALL: Final = "module."


def unwrapped(names: Iterable[str], own: Collection[str] = ()) -> dict[str, str]:
    """Return each name with what it is without the prefixes of wrappers.

    Args:
        names: of all tensors of a checkpoint.
        own: names that the model class has; they stay as they are.

    Returns:
        The short name of each.
    """
    short = {name: name if name in own else _without_inner(name) for name in names}
    is_distributed = all(name.startswith(_BEFORE_ALL) for name in short.values())
    if is_distributed and not any(name.startswith(_BEFORE_ALL) for name in own):
        return {name: one.removeprefix(_BEFORE_ALL) for name, one in short.items()}
    return short


def key_mapping(names: Iterable[str]) -> dict[str, str] | None:
    """Return what transformers' `from_pretrained` needs to read through the prefixes; None where there are none."""
    short = unwrapped(names)
    if all(name == one for name, one in short.items()):
        return None
    most = {prefix: max(name.count(prefix) for name in short) for prefix in _INSIDE}
    # a pattern takes away the first of its kind in a name; a comment makes of one pattern several
    inside = {f"{re.escape(prefix)}(?#{turn})": "" for prefix, times in most.items() for turn in range(times)}
    is_distributed = any(_without_inner(name) != one for name, one in short.items())
    return inside | ({rf"^{re.escape(_BEFORE_ALL)}": ""} if is_distributed else {})


def _without_inner(name: str) -> str:
    for prefix in _INSIDE:
        name = name.replace(prefix, "")
    return name
