"""How much tensors differ: the squared norm of tuned minus base, read block by block. It refuses nothing."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from publisher.checkpoints.pairs import CheckpointPair, TensorPair, readers_of
from publisher.engines import Begin, Engine, Report
from publisher.extraction.pair_job import BLOCK, PairJob, bytes_to_look_at
from publisher.records.progress import Progress


def squared_norms(
    both: CheckpointPair, names: Sequence[str], *, engine: Engine, progress: Progress
) -> dict[str, float]:
    """Sum for each of these tensors the squares of tuned minus base, the base first cast to the tuned one's dtype.

    Args:
        both: base and tuned, open for reading.
        names: tensors that both have, in one shape.
        engine: what reads and sums.
        progress: called for each tensor.

    Returns:
        The squared Frobenius norms by name; not finite where either side holds NaN or infinity.
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


def shares_of(squares: dict[str, float]) -> dict[str, str]:
    """Return for a message what share of the whole delta each of these tensors holds."""
    total = sum(square for square in squares.values() if math.isfinite(square))
    return {name: _share(square, total) for name, square in squares.items()}


def _share(square: float, total: float) -> str:
    if not math.isfinite(square):
        return "which holds NaN or infinity"
    return f"{square / total:.2%} of the update" if total else "none of the update"


@dataclass(frozen=True, slots=True)
class Weighing(PairJob[TensorPair, float]):
    """Reads a tensor on both sides, block by block, and adds up the squares of the difference."""

    @property
    def gpus(self) -> float:
        """No GPU: it goes as fast as the bytes arrive."""
        return 0

    def label(self, unit: TensorPair) -> str:
        """Return the progress label of a tensor."""
        return f"weighing {unit.name}"

    def memory(self, unit: TensorPair) -> int:
        """Return the bytes that reading the tensor on both sides takes."""
        return bytes_to_look_at(unit)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[TensorPair, float]]:
        """Return what weighs tensors, on the CPU whatever the device."""
        del device
        yield lambda pair: partial(self._square, pair)

    def _square(self, pair: TensorPair, report: Report) -> float:
        del report
        with readers_of(self.snapshots, [pair]) as readers:
            blocks = zip(*(reader.blocks(pair.name, BLOCK) for reader in readers), strict=True)
            return sum(_squared(base=base, tuned=tuned) for base, tuned in blocks)


def _squared(*, base: torch.Tensor, tuned: torch.Tensor) -> float:
    return float((tuned.float() - base.to(tuned.dtype).float()).double().square().sum())
