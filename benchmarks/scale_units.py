"""Jobs that `benchmarks/scale.py` has engines do, in a file of their own, so that workers of a cluster find them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from publisher.engines import Begin, Finish, Job, Tell

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Carrying(Job[Tensors, Tensors]):
    """Does nothing but give back tensors of these shapes."""

    shapes: tuple[tuple[int, int], ...] = ()

    def label(self, unit: Tensors) -> str:
        """The same for all."""
        del unit
        return "carrying"

    def memory(self, unit: Tensors) -> int:
        """None to speak of."""
        del unit
        return 0

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[Tensors, Tensors]]:
        """Nothing has to be read."""
        del device
        yield lambda _: lambda _: tuple(torch.ones(shape, dtype=torch.bfloat16) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a unit took: seconds of its work, and resident bytes of its process before it and at their highest."""

    process: int
    seconds: float
    before: int
    peak: int
    result: Any


@dataclass(frozen=True, slots=True)
class Watched(Job[Any, Seen]):
    """Another job, and what each of its units took."""

    job: Job[Any, Any]

    def label(self, unit: Any) -> str:
        """As the other job has it."""
        return self.job.label(unit)

    def memory(self, unit: Any) -> int:
        """As the other job has it."""
        return self.job.memory(unit)

    def packed(self) -> Self:
        """As the other job has it."""
        return replace(self, job=self.job.packed())

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[Any, Seen]]:
        """The other job, opened."""
        with self.job.opened(device) as begin:
            yield lambda unit: _watched(begin, unit)


def _watched(begin: Begin[Any, Any], unit: Any) -> Finish[Seen]:
    before, start = resident("VmRSS"), time.perf_counter()
    finish = begin(unit)

    def finished(tell: Tell) -> Seen:
        result = finish(tell)
        return Seen(os.getpid(), time.perf_counter() - start, before, resident("VmHWM"), result)

    return finished


def resident(which: str) -> int:
    """Bytes of this process, as Linux counts them: VmRSS now, VmHWM at their highest."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == which:
            return int(value.split()[0]) * 2**10
    raise ValueError(f"/proc/self/status has no {which}")
