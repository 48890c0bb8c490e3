"""What two headers tell before any byte is read: names, shapes and dtypes that do not match, and the layers.

It refuses patterns of the manifest that select nothing, and a pair whose tensors do not match, unless the manifest
leaves those tensors out, with one report that names them all.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from publisher.border.safetensors_header import LORA_DTYPES
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import ExtractionError, counted, listed
from publisher.records.extraction import DifferentTensor

if TYPE_CHECKING:
    from publisher.adapters.class_names import ClassNames

_RESIZE = (
    "; rows that the base lacks fit into no adapter of it: for those, save the base with resize_token_embeddings "
    "and name that one"
)


def selected(
    field: str, patterns: Sequence[str], tensors: Mapping[str, Collection[TensorHeader]], *, of: str
) -> frozenset[str]:
    """Return the tensors that a field of the manifest's `adapter` selects.

    Args:
        field: `ignore` or `carry`.
        patterns: names of tensors, or patterns with `*`, `?` and `[...]`.
        tensors: those to select from, with their headers; each may be selected by its name in the files too, and one
            that is stored in parts, by the names of all of these.
        of: whose tensors these are, for the message.

    Returns:
        The names that a pattern matches.

    Raises:
        ExtractionError: naming the patterns that match none.
    """
    meant = {name: _meant(patterns, name, headers) for name, headers in tensors.items()} if patterns else {}
    idle = sorted(set(patterns).difference(*meant.values()), key=patterns.index)
    if idle:
        raise ExtractionError(
            f"adapter.{field} names {', '.join(idle)}, which no tensor matches",
            expected=f"names or patterns of tensors {of}",
            next_step="correct or remove them in the manifest",
        )
    return frozenset(name for name, found in meant.items() if found)


def _meant(patterns: Sequence[str], name: str, headers: Iterable[TensorHeader]) -> set[str]:
    """Return the patterns that select a tensor: by its name, or all together by those of its stored parts."""
    names = {name} | {header.stored for header in headers if header.stored is not None}
    parts = {part.name for header in headers if header.conversion for part in header.conversion.parts}
    by_name = {pattern for pattern in patterns if any(fnmatch.fnmatchcase(one, pattern) for one in names)}
    by_part = [{pattern for pattern in patterns if fnmatch.fnmatchcase(part, pattern)} for part in sorted(parts)]
    return by_name.union(*by_part) if by_name or (by_part and all(by_part)) else set()


def preflight(
    *,
    base: Mapping[str, TensorHeader],
    tuned: Mapping[str, TensorHeader],
    ignored: Collection[str],
    optional: Collection[str] = (),
    names: "ClassNames | None" = None,
) -> tuple[DifferentTensor, ...]:
    """Compare names, shapes and dtypes, and return the tensors that do not match and that the manifest leaves out.

    A tensor in the base alone is normal when the fine-tune lacks its whole family (`mtp.*`, an untied `lm_head`):
    transformers drops what the model class does not load. One missing out of a family, or one that the class loads, is
    damage, or is tied to another in the source.

    Args:
        base: the base's headers, by tensor name.
        tuned: the headers of the merged fine-tune, by tensor name.
        ignored: the tensors that the manifest's adapter.ignore selects.
        optional: tensors that the model class passes over; one side may lack them.
        names: of the model class.

    Returns:
        The tensors left out, sorted by name, without a norm.

    Raises:
        ExtractionError: one report of everything that does not match.
    """
    problems = {name: what for name, what in _problems(base, tuned, names).items() if name not in optional}
    open_problems = {name: what for name, what in problems.items() if name not in ignored}
    if open_problems:
        raise ExtractionError(
            f"source and base do not match in {counted(len(open_problems), 'tensor')}:\n"
            + listed(f"{name} {what}" for name, what in sorted(open_problems.items()))
            + "\n",
            expected="the same tensors in both",
            next_step="correct source or base in the manifest, or name them under adapter.ignore to leave them out"
            + (_RESIZE if any(what.endswith("vocabulary)") for what in open_problems.values()) else ""),
        )
    return tuple(DifferentTensor(name=name, reason=what) for name, what in sorted(problems.items()))


def _problems(
    base: Mapping[str, TensorHeader], tuned: Mapping[str, TensorHeader], names: "ClassNames | None"
) -> dict[str, str]:
    families = {name.partition(".")[0] for name in tuned}
    loaded = names.parameters if names else ()
    damaged = {name for name in base.keys() - tuned.keys() if name.partition(".")[0] in families or name in loaded}
    tied, tieable = (names.tied, names.tieable) if names else ({}, {})
    problems = {name: f"is in the source alone{_own(tied.get(name))}" for name in tuned.keys() - base.keys()}
    problems |= {name: f"is in the base alone{_none(tieable.get(name))}" for name in damaged}
    for name in tuned.keys() & base.keys():
        if mismatch := _mismatch(name, base[name], tuned[name]):
            problems[name] = mismatch
    return problems


def _own(original: str | None) -> str:
    return f", with values of its own: the base ties it to {original}" if original else ""


def _none(original: str | None) -> str:
    return f": the source has none, unless it ties it to {original}" if original else ""


def _mismatch(name: str, base: TensorHeader, tuned: TensorHeader) -> str:
    if tuned.shape != base.shape:
        grown = is_table(name) and tuned.shape[1:] == base.shape[1:]
        rows = f" ({_rows(tuned.shape[0] - base.shape[0])})" if grown else ""
        return f"is {sizes(tuned.shape)} in the source and {sizes(base.shape)} in the base{rows}"
    if tuned.dtype != base.dtype and not {tuned.dtype, base.dtype} <= LORA_DTYPES:
        return f"is {tuned.dtype} in the source and {base.dtype} in the base"
    return ""


def _rows(more: int) -> str:
    return f"{counted(abs(more), 'row')} {'more' if more > 0 else 'fewer'}: another vocabulary"


def sizes(shape: Sequence[int]) -> str:
    """Return a shape as a message has it: `32x64`."""
    return "x".join(str(size) for size in shape) or "a scalar"


def is_table(name: str) -> bool:
    """Return whether the tensor is an embedding table, by its module's name."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and ("emb" in module or module in {"wte", "wpe"})


def layers_of(changed: Iterable[str], names: Iterable[str]) -> tuple[tuple[int, ...], int]:
    """Return the layers of the changed tensors, and how many layers the model with these `names` has.

    A layer is the first number in a tensor's name; where several stacks have numbers (text and vision), the stack
    with most of the changed tensors counts.
    """
    numbered = [match.groups() for name in changed if (match := re.match(r"(.*?\.)(\d+)\.", name))]
    if not numbered:
        return (), 0
    stack = Counter(prefix for prefix, _ in numbered).most_common(1)[0][0]
    every = (re.match(re.escape(stack) + r"(\d+)\.", name) for name in names)
    total = 1 + max(int(match[1]) for match in every if match)
    return tuple(sorted({int(number) for prefix, number in numbered if prefix == stack})), total


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted whole numbers as ranges: `0-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)
