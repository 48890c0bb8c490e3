"""From the measured costs of one unit to those of a whole model on many workers: arithmetic alone, nothing is run.

`benchmarks/scale.py` measures what stands in `Costs` and writes docs/scale.md with these functions. What they say of a
model that was not run is an extrapolation.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

RANK = 256
WIDTH = 2  # bytes of an element in bf16
SHARE = 0.01  # of its work, that a unit's way through Ray may cost
_SPARE = 2  # units under way for each worker: publisher/engines/ray_crews.py
_FIRST_BLOCK = 1 << 20  # elements of a changed tensor that are compared, at most: publisher/extraction/comparison.py
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a module: some for any, and some for each element."""

    module: float
    element: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Self:
        """Through two modules of so many elements that took so many seconds."""
        element = (large[1] - small[1]) / (large[0] - small[0])
        return cls(small[1] - element * small[0], element)

    def of(self, elements: int, *, modules: int = 1) -> float:
        """Seconds of so many."""
        return modules * self.module + elements * self.element


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, and bytes a second, as measured.

    Attributes:
        task: a worker's time for a unit beyond its work, where the result is empty.
        task_byte: likewise, for each byte of the result.
        driver: the driver's time for a unit, from one empty result to the next.
        taking: the driver's time for each byte of a result.
        sending: likewise, for each byte of a unit.
        waiting: the driver's time for each unit that is under way when it takes a result.
        writing: the driver's time for each byte of factors that it keeps.
        extracting: a worker's time for a module, one thread.
        checking: likewise.
        weighing: bytes of both sides of what is left out or carried, that a worker reads and weighs in a second.
        comparing: bytes of both sides that a worker compares in a second.
        hashing: bytes that the driver hashes in a second.
    """

    task: float
    task_byte: float
    driver: float
    taking: float
    sending: float
    waiting: float
    writing: float
    extracting: "Line"
    checking: "Line"
    weighing: float
    comparing: float
    hashing: float


@dataclass(frozen=True, slots=True)
class Model:
    """One of the two sides: how many linears of each shape are adapted, and how many parameters there are in all."""

    name: str
    adapted: Mapping[Shape, int]
    parameters: int

    @property
    def modules(self) -> int:
        """How many linears are adapted."""
        return sum(self.adapted.values())

    @property
    def elements(self) -> int:
        """Of the adapted linears."""
        return sum(count * math.prod(shape) for shape, count in self.adapted.items())

    @property
    def largest(self) -> int:
        """Elements of the largest adapted linear."""
        return max(map(math.prod, self.adapted))

    @property
    def hashed(self) -> int:
        """Bytes of both sides."""
        return 2 * WIDTH * self.parameters

    @property
    def compared(self) -> int:
        """Bytes of both sides that the comparison reads: what is equal to the end, the rest up to where it differs."""
        changed = sum(count * min(math.prod(shape), _FIRST_BLOCK) for shape, count in self.adapted.items())
        return 2 * WIDTH * (self.parameters - self.elements + changed)

    @property
    def extracted(self) -> int:
        """Bytes of both sides that the extraction reads, and the check again."""
        return 2 * WIDTH * self.elements

    @property
    def factors(self) -> int:
        """Bytes of the adapter."""
        return sum(count * factors_of(shape) for shape, count in self.adapted.items())

    @property
    def disk(self) -> int:
        """Bytes on the driver's disk: kept modules, adapter, and exports to GGUF (in float32) and MLX."""
        return self.factors * (1 + 1 + 2 + 1)


def factors_of(shape: Shape) -> int:
    """Bytes of one module's factors."""
    return WIDTH * min(RANK, *shape) * sum(shape)


# --- where Ray pays -----------------------------------------------------------------------------------------


def break_even(*, start: float, local: float, remote: float, workers: int) -> int | None:
    """The number of units from which on a cluster is always quicker than one machine; None where it never is.

    Args:
        start: seconds until the first worker can begin.
        local: seconds of a unit on the machine alone, one after the other.
        remote: seconds of a unit on a worker, the way through Ray included.
        workers: as many units are done at once.
    """
    gain = local - remote / workers
    if gain <= 0:
        return None
    certain = math.ceil((start + remote) / gain)  # a last round that is not full costs less than one of them
    lost = [count for count in range(1, certain + 1) if start + math.ceil(count / workers) * remote >= count * local]
    return max(lost, default=0) + 1


def smallest_side(costs: Costs) -> int:
    """The side of a square weight from which the way through Ray takes less than a hundredth of its extraction."""
    square, once = SHARE * costs.extracting.element, SHARE * costs.extracting.module - costs.task
    side = WIDTH * RANK * 2 * costs.task_byte  # square m^2 - side m + once is what is left of the hundredth
    return math.ceil((side + math.sqrt(max(side**2 - 4 * square * once, 0.0))) / (2 * square))


# --- a whole model ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of one kind of work, and what they are due to."""

    seconds: float
    limit: str


def stages(model: Model, costs: Costs, *, workers: int, storage: float) -> dict[str, Time]:
    """Of a run from local folders, by kind of work; `storage` is how many bytes a second all machines get together."""
    return {
        "hashing": _longest({"hashing": model.hashed / costs.hashing, "storage": model.hashed / storage}),
        "comparing": _longest(
            {
                "arithmetic": model.compared / costs.comparing / workers,
                "storage": model.compared / storage,
            }
        ),
        "extracting": _extracting(model, costs, workers=workers, storage=storage),
        "checking": _checking(model, costs, workers=workers, storage=storage),
    }


def _extracting(model: Model, costs: Costs, *, workers: int, storage: float) -> Time:
    way = model.modules * costs.task + model.factors * costs.task_byte
    taking = model.factors * costs.taking + _handing_out(model, costs, workers)
    return _longest(
        {
            "arithmetic": (costs.extracting.of(model.elements, modules=model.modules) + way) / workers,
            "largest module": costs.extracting.of(model.largest),
            "storage": model.extracted / storage,
            "driver": max(taking, model.factors * costs.writing),
        }
    )


def _checking(model: Model, costs: Costs, *, workers: int, storage: float) -> Time:
    """The factors go from the driver to the workers, which is taken to cost these as much as the way back."""
    way = model.modules * costs.task + model.factors * costs.task_byte
    sending = model.factors * costs.sending + _handing_out(model, costs, workers)
    return _longest(
        {
            "arithmetic": (costs.checking.of(model.elements, modules=model.modules) + way) / workers,
            "largest module": costs.checking.of(model.largest),
            "storage": model.extracted / storage,
            "driver": sending,
        }
    )


def _handing_out(model: Model, costs: Costs, workers: int) -> float:
    """The driver's seconds, beside those for bytes."""
    under_way = min(_SPARE * workers, model.modules)
    return model.modules * (costs.driver + under_way * costs.waiting)


def _longest(times: Mapping[str, float]) -> Time:
    limit = max(times, key=times.__getitem__)
    return Time(times[limit], limit)


def limit_of(times: Iterable[Time]) -> str:
    """What most of the seconds are due to."""
    every = list(times)
    return max((time.limit for time in every), key=lambda limit: sum(t.seconds for t in every if t.limit == limit))


def waiting_results(model: Model, workers: int) -> int:
    """Bytes of the largest factors that may wait for the driver at once."""
    sizes = (size for shape, count in model.adapted.items() for size in [factors_of(shape)] * count)
    return sum(sorted(sizes, reverse=True)[: _SPARE * workers])
