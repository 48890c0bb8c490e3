"""The workers that do the units on a Ray cluster: a task for each unit, or actors that stay.

A crew knows which of its units are under way and replaces a worker that is lost. Ray's own retries are off: failures
are counted where the results are taken (`ray_dispatch`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Generic

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


class Crew(ABC, Generic[Unit]):
    """Does units that it is given, as long as it has room for them."""

    def starting_workers(self) -> list[Reference]:
        """Return the workers that are getting ready; `worker_started` is called when one of them is."""
        return []

    def worker_started(self, worker: Reference) -> None:
        """Take a worker that is ready, or raise what kept it from that and start another in its place.

        Raises:
            RayError: it could not start.
        """
        del worker  # of a crew whose workers need not get ready, none is waited for

    @abstractmethod
    def has_room(self) -> bool:
        """Return whether a unit can be started."""

    @abstractmethod
    def start(self, unit: Unit) -> Reference:
        """Start a unit and return the reference of its result."""

    @abstractmethod
    def unit_ended(self, result: Reference, error: RayError | None) -> None:
        """Note that a unit is done, or has failed with this error."""

    @abstractmethod
    def dismiss(self) -> None:
        """Release all workers, without waiting for what is under way."""


class Tasks(Crew[Unit]):
    """A task of Ray for each unit."""

    def __init__(
        self, job: Job[Unit, Any], setting: Setting, *, needs: Callable[[Unit], Needs], slots: Callable[[], int]
    ) -> None:
        """Send the job to the cluster.

        Args:
            job: what is done to each unit.
            setting: what a worker must be.
            needs: gives what a unit needs.
            slots: gives how many tasks the cluster can work on at once, as it is now.
        """
        self._job, self._needs, self._slots = job, needs, slots
        self._sent_job, self._sent_setting = ray.put(job.packed()), ray.put(setting)
        self._task = ray.remote(max_retries=0)(work_on)
        self._running: set[Reference] = set()

    def has_room(self) -> bool:
        """Return whether more tasks must be under way to keep the cluster busy."""
        return len(self._running) < max(_FEWEST, _SPARE * self._slots())

    def start(self, unit: Unit) -> Reference:
        """Submit a task for this unit."""
        task = self._task.options(name=self._job.label(unit), **asdict(self._needs(unit)))
        result = task.remote(self._sent_job, self._job.packed_unit(unit), self._sent_setting)
        self._running.add(result)
        return result

    def unit_ended(self, result: Reference, error: RayError | None) -> None:
        """Note that there is room for another task."""
        del error
        self._running.discard(result)

    def dismiss(self) -> None:
        """Forget what is under way; it ends with this process's part in the cluster, if not before.

        Ray 2.60 can abort the process that cancels a task by force, when the task ends at that moment.
        """
        self._running.clear()


class Actors(Crew[Unit]):
    """Actors that open the job once and are then given one unit at a time; one that dies is replaced."""

    def __init__(self, job: Job[Unit, Any], setting: Setting, *, needs: Needs, number: int) -> None:
        """Start `number` actors, which then open the job.

        Args:
            job: what is done to each unit.
            setting: what a worker must be.
            needs: what an actor needs.
            number: how many actors there are.
        """
        self._job, self._setting = job, setting
        self._sent_job = ray.put(job.packed())
        self._actor = ray.remote(max_restarts=0, max_task_retries=0, **asdict(needs))(Worker)
        self._opening: dict[Reference, Any] = {}
        self._busy: dict[Reference, Any] = {}
        self._idle: list[Any] = []
        for _ in range(number):
            self._hire()

    def starting_workers(self) -> list[Reference]:
        """Return the actors that have not opened the job yet."""
        return list(self._opening)

    def worker_started(self, worker: Reference) -> None:
        """Take an actor that has opened the job, or start another in its place.

        Raises:
            RayError: it could not open the job.
        """
        actor = self._opening.pop(worker)
        try:
            ray.get(worker)
        except RayError:
            self._replace(actor)
            raise
        self._idle.append(actor)

    def has_room(self) -> bool:
        """Return whether an actor has nothing to do."""
        return bool(self._idle)

    def start(self, unit: Unit) -> Reference:
        """Give the unit to an actor that has nothing to do."""
        actor = self._idle.pop()
        result = actor.work.remote(self._job.packed_unit(unit))
        self._busy[result] = actor
        return result

    def unit_ended(self, result: Reference, error: RayError | None) -> None:
        """Note that the actor is free again, or replace one that died."""
        actor = self._busy.pop(result)
        if error is None or isinstance(error, RayTaskError):  # the unit failed, the actor lives
            self._idle.append(actor)
        else:
            self._replace(actor)

    def dismiss(self) -> None:
        """End all actors; those at rest leave nothing behind on their machines."""
        with suppress(RayError):
            ray.wait([actor.close.remote() for actor in self._idle] or [ray.put(None)], timeout=_CLOSING)
        for actor in (*self._opening.values(), *self._busy.values(), *self._idle):
            ray.kill(actor)

    def _hire(self) -> None:
        actor = self._actor.remote(self._setting)
        self._opening[actor.open.remote(self._sent_job)] = actor

    def _replace(self, actor: Any) -> None:
        ray.kill(actor)
        self._hire()
