"""One run of a job on a Ray cluster: units go to a crew of workers, and results come back as they are done.

A unit whose worker is lost is given to another. What fails too often ends the run (`retries`).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic

import ray
from ray.exceptions import RayError, RayTaskError

from publisher.engines import Job, Report, Result, Unit
from publisher.engines.ray_pools import Crew, Reference
from publisher.engines.retries import Failures


class Dispatch(Generic[Unit, Result]):
    """The units of one run: those that are left, those under way, and how often each has failed."""

    def __init__(self, crew: Crew[Unit], job: Job[Unit, Result], units: Iterable[Unit]) -> None:
        """Prepare the run; nothing is started yet."""
        self._crew = crew
        self._job = job
        self._left = _UnitsLeft(units)
        self._running = dict[Reference, Unit]()
        self._failures = Failures()

    def results(self, report: Report) -> Iterator[tuple[Unit, Result]]:
        """Yield each unit with its result, in the order in which they are done.

        Raises:
            PublisherError: what the job says about a unit.
            EngineError: a unit, or the start of a worker, failed too often.
        """
        while self._left or self._running:
            self._start_units()
            if self._running:
                first = next(iter(self._running.values()))
                report(f"{self._job.label(first)} ({len(self._running)} under way)")
            waited_for = [*self._running, *self._crew.starting_workers()]
            (ready,), _ = ray.wait(waited_for, num_returns=1)
            if ready in self._running:
                yield from self._result(ready)
            else:
                self._receive_worker(ready)

    def _start_units(self) -> None:
        while self._left and self._crew.has_room():
            unit = self._left.take()
            self._running[self._crew.start(unit)] = unit

    def _receive_worker(self, worker: Reference) -> None:
        try:
            self._crew.worker_started(worker)
        except RayError as error:
            self._failures.add("the start of a worker", cause_of(error))

    def _result(self, done: Reference) -> Iterator[tuple[Unit, Result]]:
        """Yield a unit that is done, with its result; one that failed is left to be done again."""
        unit = self._running[done]
        try:
            result = ray.get(done)
        except RayError as error:
            self._failures.add(self._job.label(unit), cause_of(error))
            self._crew.unit_ended(done, error)
            del self._running[done]
            self._left.put_back(unit)
        else:
            self._crew.unit_ended(done, None)
            del self._running[done]
            yield unit, result


class _UnitsLeft(Generic[Unit]):
    """Units to be done, taken from their iterable one by one."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = iter(units)
        self._next = deque[Unit]()

    def __bool__(self) -> bool:
        if not self._next:
            self._next.extend(islice(self._units, 1))
        return bool(self._next)

    def take(self) -> Unit:
        """Return the next unit; there is one."""
        return self._next.popleft()

    def put_back(self, unit: Unit) -> None:
        """Keep a unit that has to be done again."""
        self._next.append(unit)


def cause_of(error: RayError) -> BaseException:
    """Return what was raised on the worker, or the error itself, which says that the worker was lost."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error
