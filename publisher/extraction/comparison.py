"""What differs between two checkpoints: names, shapes and dtypes by their headers, then every tensor by its bytes.

It refuses pairs whose tensors do not match, a base equal to the source, and changes that a LoRA cannot carry,
unless the manifest leaves those tensors out or carries them whole; each with one report that names them all.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from publisher.border.safetensors_header import LORA_DTYPES
from publisher.checkpoints import fp8
from publisher.checkpoints.fp8_reader import steps
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair, Sides, TensorPair, readers_of
from publisher.checkpoints.reading import Reader
from publisher.engines import Begin, Engine, Report
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.modules_to_save import carried_modules, named_by, require_matches
from publisher.extraction.pair_job import PairJob
from publisher.records.extraction import Carried, LeftOut
from publisher.records.progress import Progress

_BLOCK = 1 << 20  # elements compared at once, small enough for a processor's cache
_GROUP = 1 << 28  # bytes of a side that are compared as one unit, at least
_BLOCKS = 1 << 26  # bytes that looking at blocks of both sides takes, at most
_DEQUANTISED = 8  # times the stored bytes of a tensor: what both sides take where FP8 is dequantised, at most
Group = tuple[TensorPair, ...]
_RESIZE = (
    "; rows that the base lacks fit into no adapter of it: for those, save the base with resize_token_embeddings "
    "and name that one"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the two headers and every tensor's bytes say.

    Attributes:
        changed: names of the linear weights that differ, sorted.
        equal: how many tensors are equal.
        base_only: names in the base alone.
        left_out: tensors that differ and that the manifest leaves out.
        carried: modules that the manifest carries whole.
        transposed: those of `changed` that are stored as (in, out).
        fp8: the sides that are stored in FP8 with block scales.
        layers: the layers of the changed modules.
        layers_total: how many layers the model has.
    """

    changed: tuple[str, ...]
    equal: int
    base_only: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    layers: tuple[int, ...]
    layers_total: int
    carried: tuple[Carried, ...] = ()
    transposed: frozenset[str] = frozenset()
    fp8: tuple[str, ...] = ()


def compare(
    both: CheckpointPair, *, ignore: Sequence[str], carry: Sequence[str] = (), engine: Engine, progress: Progress
) -> Comparison:
    """Headers first, then bytes; a tensor that is equal is read once, one that differs only up to there.

    Tensors in files of one digest are equal, and are not read.

    Args:
        both: base and tuned, open for reading.
        ignore: the manifest's adapter.ignore.
        carry: the manifest's adapter.carry.
        engine: what reads and compares.
        progress: told of each tensor.

    Raises:
        ExtractionError: naming all tensors that do not match, or all that changed and cannot be carried.
    """
    base, source = both.headers
    mismatched = preflight(source, base, ignore=ignore)
    shared = [name for name in source if name in base and source[name].shape == base[name].shape]
    different = _different(both, shared, engine=engine, progress=progress)
    kept = [name for name in different if not named_by(name, ignore)]
    whole = carried_modules(kept, source, base=base, carry=carry)
    inside = [name for tensors in whole.values() for name in tensors]
    changed = tuple(name for name in kept if name not in inside)
    _require_change(changed, different)
    weighing = partial(weighed, both, engine=engine, progress=progress)
    _require_carriable(changed, source, squares=lambda: weighing(different))
    layers, layers_total = layers_of(changed, source)
    ignored = [name for name in different if named_by(name, ignore)]
    squares = weighing([*ignored, *inside])
    return Comparison(
        changed=changed,
        equal=len(shared) - len(different),
        base_only=tuple(sorted(base.keys() - source.keys())),
        left_out=(*mismatched, *(_left_out(name, squares[name]) for name in ignored)),
        layers=layers,
        layers_total=layers_total,
        carried=tuple(_carried(module, tensors, both=both, squares=squares) for module, tensors in whole.items()),
        fp8=tuple(side for side, headers in (("source", source), ("base", base)) if _in_fp8(changed, headers)),
    )


def _different(both: CheckpointPair, shared: Sequence[str], *, engine: Engine, progress: Progress) -> list[str]:
    """Those of the tensors that differ, in the order given."""
    pairs = [pair for pair in map(both.tensors, shared) if not _one_file(pair.tuned, pair.base)]
    found, done = set[str](), len(shared) - len(pairs)

    def report(what: str) -> None:
        progress(what, done, len(shared))

    with engine.run(Comparing(both.snapshots), _groups(pairs), report=report) as results:
        for group, different in results:
            found |= different
            done += len(group)
    return [name for name in shared if name in found]


def _groups(pairs: Iterable[TensorPair]) -> list[Group]:
    """In the order of the source's files, so many together that handing them out costs nothing beside reading them."""
    groups, size = list[list[TensorPair]](), _GROUP
    for pair in sorted(pairs, key=lambda pair: (pair.tuned.file, pair.tuned.start, pair.name)):
        if size >= _GROUP:
            groups.append([])
            size = 0
        groups[-1].append(pair)
        size += pair.size
    return [tuple(group) for group in groups]


@dataclass(frozen=True, slots=True)
class Comparing(PairJob[Group, set[str]]):
    """Compares tensors of two checkpoints byte by byte; the result names those that differ."""

    @property
    def gpus(self) -> float:
        """None: as fast as the bytes arrive."""
        return 0

    def label(self, unit: Group) -> str:
        """By the first of them."""
        return f"comparing {unit[0].name}"

    def memory(self, unit: Group) -> int:
        """By the largest of them."""
        return max(map(_compared, unit))

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[Group, set[str]]]:
        """On the CPU."""
        del device
        yield lambda group: partial(self._different, group)

    def _different(self, group: Group, report: Report) -> set[str]:
        del report
        with readers_of(self.snapshots, group) as readers:
            return {pair.name for pair in group if not same(pair.name, readers)}


def _in_fp8(names: Iterable[str], headers: Mapping[str, TensorHeader]) -> bool:
    return any(headers[name].scale is not None for name in names)


def preflight(
    source: Mapping[str, TensorHeader], base: Mapping[str, TensorHeader], *, ignore: Sequence[str]
) -> tuple[LeftOut, ...]:
    """Compare names, shapes and dtypes; the tensors that do not match and that the manifest leaves out.

    A tensor in the base alone is normal when the source lacks its whole family (`mtp.*`, an untied `lm_head`):
    transformers drops what the model class does not load. One missing out of a family is damage.

    Raises:
        ExtractionError: one report of everything that does not match.
    """
    families = {name.partition(".")[0] for name in source}
    problems = dict.fromkeys(source.keys() - base.keys(), "is in the source alone")
    damaged = {name for name in base.keys() - source.keys() if name.partition(".")[0] in families}
    problems |= dict.fromkeys(damaged, "is in the base alone")
    for name in source.keys() & base.keys():
        ours, theirs = source[name], base[name]
        if ours.shape != theirs.shape:
            grown = f" ({_rows(ours, theirs)})" if is_table(name) and ours.shape[1:] == theirs.shape[1:] else ""
            problems[name] = f"is {_by(ours.shape)} in the source and {_by(theirs.shape)} in the base{grown}"
        elif ours.dtype != theirs.dtype and not {ours.dtype, theirs.dtype} <= LORA_DTYPES:
            problems[name] = f"is {ours.dtype} in the source and {theirs.dtype} in the base"
    require_matches("ignore", ignore, {*source, *base}, of="in either checkpoint")
    open_problems = {name: what for name, what in problems.items() if not named_by(name, ignore)}
    if open_problems:
        raise ExtractionError(
            f"source and base do not match in {counted(len(open_problems), 'tensor')}:\n"
            + listed(f"{name} {what}" for name, what in sorted(open_problems.items()))
            + "\n",
            expected="the same tensors in both",
            next_step="correct source or base in the manifest, or name them under adapter.ignore to leave them out"
            + (_RESIZE if any(what.endswith("vocabulary)") for what in open_problems.values()) else ""),
        )
    return tuple(LeftOut(name=name, reason=what) for name, what in sorted(problems.items()))


def is_linear_weight(name: str, header: TensorHeader) -> bool:
    """Whether a LoRA can carry a change of this tensor, by its name and shape alone.

    A 2-D `.weight` counts unless its module is named like an embedding table. Validation, which knows the model
    class, is the judge in the end.
    """
    matrix = name.endswith(".weight") and len(header.shape) == 2  # noqa: PLR2004 - rows and columns
    return matrix and header.dtype in LORA_DTYPES and not is_table(name)


def is_table(name: str) -> bool:
    """Whether the tensor is an embedding table, by its module's name."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and ("emb" in module or module in {"wte", "wpe"})


def layers_of(changed: Iterable[str], names: Iterable[str]) -> tuple[tuple[int, ...], int]:
    """The layers of the changed tensors, and how many layers the model with these `names` has.

    A layer is the first number in a tensor's name; where several stacks have numbers (text and vision), the stack
    with most of the changed tensors counts.
    """
    places = [match.groups() for name in changed if (match := re.match(r"(.*?\.)(\d+)\.", name))]
    if not places:
        return (), 0
    stack = Counter(prefix for prefix, _ in places).most_common(1)[0][0]
    every = (re.match(re.escape(stack) + r"(\d+)\.", name) for name in names)
    total = 1 + max(int(match[1]) for match in every if match)
    return tuple(sorted({int(number) for prefix, number in places if prefix == stack})), total


def ranges(numbers: Sequence[int]) -> str:
    """Sorted whole numbers as ranges: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)


def _one_file(source: TensorHeader, base: TensorHeader) -> bool:
    """Whether both lie in files of one digest, their scales too, which may be in another file than the weight."""
    if (scales := (source.scale, base.scale)) == (None, None):
        return source.sha256 is not None and source.sha256 == base.sha256
    ours, theirs = scales
    if ours is None or theirs is None or ours.block != theirs.block:
        return False
    return _one_file(ours.weight, theirs.weight) and _one_file(ours.header, theirs.header)


def same(name: str, readers: Sides[Reader]) -> bool:
    """Whether both sides hold the same tensor; of one in FP8, also where it is the other's quantisation."""
    if _equal_blocks(name, readers):
        return True
    quantised = [step for reader in readers if (step := steps(name, reader)) is not None]
    if len(quantised) != 1:
        return False
    base, tuned = (reader.read(name) for reader in readers)
    return fp8.within(base, tuned, steps=quantised[0])


def _equal_blocks(name: str, readers: Sides[Reader]) -> bool:
    """Block by block as `equal` means it, up to the first that differs."""
    blocks = zip(*(reader.blocks(name, _BLOCK) for reader in readers), strict=True)
    return all(equal(base=base, tuned=tuned) for base, tuned in blocks)


def equal(*, base: torch.Tensor, tuned: torch.Tensor) -> bool:
    """Return whether both hold the same bytes, once the base is cast to the dtype of the tuned one.

    Zeros of either sign are the same value: an update of nothing is no update.
    """
    ours, theirs = (tensor.contiguous().reshape(-1) for tensor in (tuned, base.to(tuned.dtype)))
    return _same_bytes(ours, theirs) or torch.equal(ours, theirs)


def _same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    places = (size * ours.itemsize for size in (ours.numel(), ours.storage_offset(), theirs.storage_offset()))
    word = torch.uint8 if any(place % 8 for place in places) else torch.int64  # at twice the speed
    return torch.equal(ours.view(word), theirs.view(word))


def _require_change(changed: Sequence[str], different: Sequence[str]) -> None:
    if changed:
        return
    if different:
        found, where = (
            f"adapter.ignore leaves out everything that differs ({counted(len(different), 'tensor')})",
            "adapter.ignore",
        )
    else:
        found, where = "base and source are equal in every tensor", "source or base"
    raise ExtractionError(
        f"{found}, so there is nothing to publish",
        expected="a source whose linear weights differ from the base's",
        next_step=f"correct {where} in the manifest",
    )


def _require_carriable(
    changed: Sequence[str], headers: Mapping[str, TensorHeader], *, squares: Callable[[], Mapping[str, float]]
) -> None:
    """`squares` weighs all that differs, and is asked only where something is in the way."""
    stuck = [name for name in changed if not is_linear_weight(name, headers[name])]
    if not stuck:
        return
    told = shares(stuck, squares())
    raise ExtractionError(
        f"source and base differ in {counted(len(stuck), 'tensor')} that a LoRA cannot carry:\n"
        + listed(f"{name} ({_by(headers[name].shape)}, {headers[name].dtype}), {told[name]}" for name in stuck)
        + "\n",
        expected="changes in linear weights alone",
        next_step="in the manifest, name them under adapter.ignore to leave them out knowingly, or under "
        "adapter.carry to store their modules whole",
    )


def shares(names: Sequence[str], squares: Mapping[str, float]) -> dict[str, str]:
    """For a message: what share of the update each tensor holds, of all that were weighed."""
    total = sum(square for square in squares.values() if math.isfinite(square))
    return {name: _share(squares[name], total) for name in names}


def _share(square: float, total: float) -> str:
    if not math.isfinite(square):
        return "which holds NaN or infinity"
    return f"{square / total:.2%} of the update" if total else "none of the update"


def _left_out(name: str, square: float) -> LeftOut:
    if not math.isfinite(square):
        return LeftOut(name=name, reason="differs, and holds NaN or infinity")
    return LeftOut(name=name, reason="differs", norm=math.sqrt(square))


def _carried(module: str, tensors: tuple[str, ...], *, both: CheckpointPair, squares: Mapping[str, float]) -> Carried:
    for name in tensors:
        if not math.isfinite(squares[name]) and not bool(torch.isfinite(both.readers.tuned.read(name)).all()):
            raise ExtractionError(
                f"{name} holds NaN or infinity in the source",
                expected="finite weights",
                next_step="check that checkpoint; it is damaged or its training diverged",
            )
    norm = math.sqrt(sum(squares[name] for name in tensors))
    parameters = sum(math.prod(both.headers.tuned[name].shape) for name in tensors)
    return Carried(module=module, tensors=tensors, tied=(), parameters=parameters, norm=norm)


# --- how much differs ---------------------------------------------------------------------------------------


def weighed(both: CheckpointPair, names: Sequence[str], *, engine: Engine, progress: Progress) -> dict[str, float]:
    """For each of these tensors the sum of squares of source minus base, the base first cast to the source's dtype.

    Not finite where either side holds NaN or infinity.
    """
    found: dict[str, float] = {}

    def report(what: str) -> None:
        progress(what, len(found), len(names))

    pairs = [both.tensors(name) for name in names]
    if pairs:
        with engine.run(Weighing(both.snapshots), pairs, report=report) as results:
            for pair, square in results:  # one by one, as progress counts them
                found[pair.name] = square
    return {name: found[name] for name in names}


@dataclass(frozen=True, slots=True)
class Weighing(PairJob[TensorPair, float]):
    """Reads a tensor on both sides, block by block, and adds up the squares of the difference."""

    @property
    def gpus(self) -> float:
        """None: as fast as the bytes arrive."""
        return 0

    def label(self, unit: TensorPair) -> str:
        """By its name."""
        return f"weighing {unit.name}"

    def memory(self, unit: TensorPair) -> int:
        """As in comparing it."""
        return _compared(unit)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[TensorPair, float]]:
        """On the CPU."""
        del device
        yield lambda pair: lambda _: self._square(pair)

    def _square(self, pair: TensorPair) -> float:
        with readers_of(self.snapshots, [pair]) as readers:
            blocks = zip(*(reader.blocks(pair.name, _BLOCK) for reader in readers), strict=True)
            return sum(_squared(base=base, tuned=tuned) for base, tuned in blocks)


def _squared(*, base: torch.Tensor, tuned: torch.Tensor) -> float:
    return float((tuned.float() - base.to(tuned.dtype).float()).double().square().sum())


def _compared(pair: TensorPair) -> int:
    """Bytes that it takes to look at both sides: a few blocks, or the whole tensor where FP8 is dequantised."""
    in_fp8 = pair.tuned.scale is not None or pair.base.scale is not None
    return _BLOCKS + (_DEQUANTISED * pair.size if in_fp8 else 0)


def _rows(ours: TensorHeader, theirs: TensorHeader) -> str:
    more = ours.shape[0] - theirs.shape[0]
    return f"{counted(abs(more), 'row')} {'more' if more > 0 else 'fewer'}: another vocabulary"


def _by(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape) or "a scalar"
