"""What all jobs on tensors of base and tuned share."""

from dataclasses import dataclass, replace
from typing import Self

from publisher.checkpoints.pairs import Sides, TensorPair
from publisher.checkpoints.snapshots import absolute
from publisher.engines import Job, Result, Unit
from publisher.records.checkpoint import Snapshot

BLOCK = 1 << 20  # elements looked at at once, small enough for a processor's cache
_BLOCKS = 1 << 26  # bytes that looking at blocks of both sides takes, at most
_DEQUANTISED = 8  # times the stored bytes of a tensor: what both sides take where FP8 is dequantised, at most
_CONVERTED = 3  # times the stored bytes of a side that is made of parts: these, and what they become
_UNPACKED = 10  # likewise for MXFP4, of which a stored byte becomes four
_QUANTISED = 14  # likewise for a base that is read in 4 bits, which is worked on in float32


@dataclass(frozen=True, slots=True)
class PairJob(Job[Unit, Result]):
    """A job that reads tensors of base and tuned, wherever it is done."""

    snapshots: Sides[Snapshot]

    def packed(self) -> Self:
        """Return the job with absolute paths."""
        return replace(self, snapshots=Sides(*map(absolute, self.snapshots)))


def bytes_to_look_at(pair: TensorPair) -> int:
    """Return what looking at both sides takes: a few blocks, or the whole tensor where it is dequantised."""
    if pair.tuned.mxfp4 is not None or pair.base.mxfp4 is not None:
        return _BLOCKS + _UNPACKED * pair.size
    if pair.base.quantised is not None:
        return _BLOCKS + _QUANTISED * pair.size
    if pair.tuned.in_fp8 or pair.base.in_fp8:
        return _BLOCKS + _DEQUANTISED * pair.size
    converted = sum(header.conversion is not None for header in (pair.base, pair.tuned))
    return _BLOCKS + _CONVERTED * converted * pair.size
