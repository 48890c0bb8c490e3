"""Who does the units on a Ray cluster: tasks, or actors that stay.

A crew knows which of its units are under way and what it costs to lose one. Ray's own retries are off: failures are
counted where the results are taken.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from publisher.engines import Job, Unit
from publisher.engines.ray_worker import Setting, Worker, work_on

Reference = Any
"""Of a result to come: Ray's ObjectRef, or its client's."""
_FEWEST = 8  # tasks under way, on a cluster that has yet to grow
_SPARE = 2  # tasks under way for each that can be worked on, so that no worker waits for the next
_CLOSING = 10.0  # seconds that an actor has for it


@dataclass(frozen=True, slots=True)
class Needs:
    """What Ray is to set aside, as it spells it: processors, GPUs, bytes."""

    num_cpus: float
    num_gpus: float
    memory: int


class Crew(Protocol):
    """Does units that it is given, as long as it has room for them."""

    def opening(self) -> list[Reference]:
        """Of workers that get ready, each to be told of by `opened`."""

    def opened(self, worker: Reference) -> None:
        """A worker is ready, or raises what kept it from that; another takes its place then."""

    def has_room(self) -> bool:
        """Whether a unit can be started."""

    def start(self, unit: Any) -> Reference:
        """Have it done; the reference of its result."""

    def ended(self, result: Reference, error: RayError | None) -> None:
        """That unit is done, or has failed."""

    def dismiss(self) -> None:
        """Wait for nothing that is under way, and let go of all workers."""


class Tasks(Generic[Unit]):
    """A task for each unit."""

    def __init__(
        self, job: Job[Unit, Any], setting: Setting, *, needs: Callable[[Unit], Needs], slots: Callable[[], int]
    ) -> None:
        """`needs` of a unit; `slots` is how many tasks the cluster can work on at once, as it is now."""
        self._job, self._setting = ray.put(job.packed()), ray.put(setting)
        self._of, self._needs, self._slots = job, needs, slots
        self._task = ray.remote(max_retries=0)(work_on)
        self._running: set[Reference] = set()

    def opening(self) -> list[Reference]:
        """No task has to get ready."""
        return []

    def opened(self, worker: Reference) -> None:
        """No task has to get ready."""
        del worker

    def has_room(self) -> bool:
        """As many are under way as keep the cluster busy, and no more."""
        return len(self._running) < max(_FEWEST, _SPARE * self._slots())

    def start(self, unit: Unit) -> Reference:
        """Submit a task."""
        task = self._task.options(name=self._of.label(unit), **asdict(self._needs(unit)))
        result = task.remote(self._job, self._of.packed_unit(unit), self._setting)
        self._running.add(result)
        return result

    def ended(self, result: Reference, error: RayError | None) -> None:
        """There is room for another."""
        del error
        self._running.discard(result)

    def dismiss(self) -> None:
        """Forget what is under way; it ends with this process's part in the cluster, if not before.

        Ray 2.60 can abort the process that cancels a task by force, when the task ends at that moment.
        """
        self._running.clear()


class Actors(Generic[Unit]):
    """Actors that open the job once and are then given one unit at a time; one that dies is replaced."""

    def __init__(self, job: Job[Unit, Any], setting: Setting, *, needs: Needs, number: int) -> None:
        """So many of them."""
        self._of, self._job, self._setting = job, ray.put(job.packed()), setting
        self._actor = ray.remote(max_restarts=0, max_task_retries=0, **asdict(needs))(Worker)
        self._opening: dict[Reference, Any] = {}
        self._busy: dict[Reference, Any] = {}
        self._idle: list[Any] = []
        for _ in range(number):
            self._hire()

    def opening(self) -> list[Reference]:
        """Those that have not opened the job yet."""
        return list(self._opening)

    def opened(self, worker: Reference) -> None:
        """One that can be given units, or another is hired in its place."""
        actor = self._opening.pop(worker)
        try:
            ray.get(worker)
        except RayError:
            self._replace(actor)
            raise
        self._idle.append(actor)

    def has_room(self) -> bool:
        """One of them has nothing to do."""
        return bool(self._idle)

    def start(self, unit: Unit) -> Reference:
        """Give it to one that has nothing to do."""
        actor = self._idle.pop()
        result = actor.work.remote(self._of.packed_unit(unit))
        self._busy[result] = actor
        return result

    def ended(self, result: Reference, error: RayError | None) -> None:
        """The actor is free again; one that died is replaced."""
        actor = self._busy.pop(result)
        if error is None or isinstance(error, RayTaskError):  # the unit failed, the actor lives
            self._idle.append(actor)
        else:
            self._replace(actor)

    def dismiss(self) -> None:
        """End them all; those at rest leave nothing behind."""
        with suppress(RayError):
            ray.wait([actor.close.remote() for actor in self._idle] or [ray.put(None)], timeout=_CLOSING)
        for actor in (*self._opening.values(), *self._busy.values(), *self._idle):
            ray.kill(actor)

    def _hire(self) -> None:
        actor = self._actor.remote(self._setting)
        self._opening[actor.open.remote(self._job)] = actor

    def _replace(self, actor: Any) -> None:
        ray.kill(actor)
        self._hire()
