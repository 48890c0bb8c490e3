"""What all jobs on tensors of base and tuned share."""

from dataclasses import dataclass, replace
from typing import Self

from publisher.checkpoints.pairs import Sides
from publisher.checkpoints.snapshots import absolute
from publisher.engines import Job, Result, Unit
from publisher.records.checkpoint import Snapshot


@dataclass(frozen=True, slots=True)
class PairJob(Job[Unit, Result]):
    """A job that reads tensors of base and tuned, wherever it is done."""

    snapshots: Sides[Snapshot]

    def packed(self) -> Self:
        """Return the job with absolute paths."""
        return replace(self, snapshots=Sides(*map(absolute, self.snapshots)))
