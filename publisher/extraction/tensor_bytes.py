"""Which tensors of two checkpoints differ: byte for byte, block by block.

A tensor that is equal is read once, one that differs only up to there. Tensors in files of one digest are equal, and
are not read. It refuses nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from publisher.checkpoints import fp8, nf4
from publisher.checkpoints.fp8_reader import steps
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair, Sides, TensorPair, readers_of
from publisher.checkpoints.reading import Reader
from publisher.engines import Begin, Engine, Report
from publisher.extraction.pair_job import BLOCK, PairJob, bytes_to_look_at
from publisher.records.progress import Progress

_GROUP = 1 << 28  # bytes of a side that are compared as one unit, at least
Group = tuple[TensorPair, ...]


def different_tensors(
    both: CheckpointPair, shared: Sequence[str], *, engine: Engine, progress: Progress
) -> tuple[str, ...]:
    """Find the tensors that differ.

    Args:
        both: base and tuned, open for reading.
        shared: names of tensors that both have, in one shape.
        engine: what reads and compares.
        progress: called for each tensor.

    Returns:
        The names of those that differ, in the order given.
    """
    pairs = [pair for pair in map(both.tensors, shared) if not _in_one_file(base=pair.base, tuned=pair.tuned)]
    found = set[str]()
    done = len(shared) - len(pairs)

    def report(what: str) -> None:
        progress(what, done, len(shared))

    with engine.run(Comparing(both.snapshots), _groups(pairs), report=report) as results:
        for group, different in results:
            found |= different
            done += len(group)
    return tuple(name for name in shared if name in found)


def _groups(pairs: Iterable[TensorPair]) -> list[Group]:
    """Group pairs in the order of the tuned files, so many that to hand them out costs nothing beside reading them."""
    groups = list[list[TensorPair]]()
    size = _GROUP
    for pair in sorted(pairs, key=lambda pair: (pair.tuned.file, pair.tuned.start, pair.name)):
        if size >= _GROUP:
            groups.append([])
            size = 0
        groups[-1].append(pair)
        size += pair.size
    return [tuple(group) for group in groups]


def _in_one_file(*, base: TensorHeader, tuned: TensorHeader) -> bool:
    """Return whether both lie in files of one digest, as do their scales, which may be in another file."""
    if base.mxfp4 is not None or tuned.mxfp4 is not None:
        return (
            base.mxfp4 is not None
            and tuned.mxfp4 is not None
            and _in_one_file(base=base.mxfp4.blocks, tuned=tuned.mxfp4.blocks)
            and _in_one_file(base=base.mxfp4.scales, tuned=tuned.mxfp4.scales)
        )
    if base.quantised is not None:
        return False
    if base.scale is None and tuned.scale is None:
        return tuned.sha256 is not None and tuned.sha256 == base.sha256
    if base.scale is None or tuned.scale is None or base.scale.block != tuned.scale.block:
        return False
    return _in_one_file(base=base.scale.weight, tuned=tuned.scale.weight) and _in_one_file(
        base=base.scale.header, tuned=tuned.scale.header
    )


@dataclass(frozen=True, slots=True)
class Comparing(PairJob[Group, set[str]]):
    """Compares tensors of two checkpoints byte by byte; the result names those that differ."""

    @property
    def gpus(self) -> float:
        """No GPU: it goes as fast as the bytes arrive."""
        return 0

    def label(self, unit: Group) -> str:
        """Return the progress label of a group, which names its first tensor."""
        return f"comparing {unit[0].name}"

    def memory(self, unit: Group) -> int:
        """Return the bytes that the largest tensor of a group takes."""
        return max(map(bytes_to_look_at, unit))

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[Group, set[str]]]:
        """Return what compares groups, on the CPU whatever the device."""
        del device
        yield lambda group: partial(self._different, group)

    def _different(self, group: Group, report: Report) -> set[str]:
        del report
        with readers_of(self.snapshots, group) as readers:
            return {pair.name for pair in group if not _same(pair, readers)}


def _same(pair: TensorPair, readers: Sides[Reader]) -> bool:
    if pair.base.quantised is None:
        return same(pair.name, readers)
    return nf4.within(*(reader.read(pair.name) for reader in readers))


def same(name: str, readers: Sides[Reader]) -> bool:
    """Return whether both sides hold the same tensor; of one in FP8, also where it is the other's quantisation."""
    blocks = zip(*(reader.blocks(name, BLOCK) for reader in readers), strict=True)
    if all(equal(base=base, tuned=tuned) for base, tuned in blocks):
        return True
    quantised = [step for reader in readers if (step := steps(name, reader)) is not None]
    if len(quantised) != 1:
        return False
    base, tuned = (reader.read(name) for reader in readers)
    return fp8.within(base, tuned, steps=quantised[0])


def equal(*, base: torch.Tensor, tuned: torch.Tensor) -> bool:
    """Return whether both hold the same bytes, once the base is cast to the dtype of the tuned one.

    Zeros of either sign are the same value: an update of nothing is no update. A model may also have been in another
    dtype before it was stored: then the base is cast to that first.
    """
    ours, cast = tuned.contiguous().reshape(-1), base.contiguous().reshape(-1)
    return any(_equal(ours, cast.to(dtype).to(ours.dtype)) for dtype in (ours.dtype, *_BEFORE.get(ours.dtype, ())))


_BEFORE = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float16: (torch.bfloat16,),
    torch.bfloat16: (torch.float16,),
}


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return _same_bytes(ours, theirs) or torch.equal(ours, theirs)


def _same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    places = (size * ours.itemsize for size in (ours.numel(), ours.storage_offset(), theirs.storage_offset()))
    word = torch.uint8 if any(place % 8 for place in places) else torch.int64  # at twice the speed
    return torch.equal(ours.view(word), theirs.view(word))
