"""What all jobs on tensors of source and base share. Apart from `snapshots`, which is imported without torch."""

from dataclasses import dataclass, replace
from typing import Self

from publisher.checkpoints.snapshots import elsewhere
from publisher.engines import Job, Result, Unit
from publisher.records.checkpoint import Snapshot


@dataclass(frozen=True, slots=True)
class PairJob(Job[Unit, Result]):
    """A job that reads tensors of source and base, wherever it is done."""

    snapshots: tuple[Snapshot, Snapshot]

    def packed(self) -> Self:
        """With absolute paths."""
        source, base = map(elsewhere, self.snapshots)
        return replace(self, snapshots=(source, base))
