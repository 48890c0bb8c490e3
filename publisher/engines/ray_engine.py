"""The engine of a Ray cluster: a task for each unit, or actors where opening the job takes long or a GPU is used.

GPUs are for actors because Ray ends the process of a task that had one: each would import torch anew. Results wait in
the cluster's object store until they are taken, one at a time, and no more units are under way than keep the workers
busy. A unit whose worker is lost is given to another.

Workers must be alike, and like this process in their packages and this tool's sources. Starting and stopping a
cluster is its owner's business; where there is none, Ray is started on this machine alone, for as long as the run.
"""

import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Generic

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from publisher.engines import Job, Machine, Result, Tell, Unit, this_machine
from publisher.engines.ray_pools import Actors, Crew, Needs, Reference, Tasks
from publisher.engines.ray_worker import Setting, differences, look_at
from publisher.engines.retries import Failures, reason_of
from publisher.errors import EngineError, ManifestError

_HAS_TOKEN = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
_ANSWER = 10.0  # seconds for which an address is tried
PROCESS = 1 << 29  # bytes of a worker before its first unit: torch, transformers and PEFT
_FRESH = 1.0  # seconds for which what the cluster has counts as known


@contextmanager
def joined(address: str, device: str) -> Iterator["OnRay"]:
    """The cluster at this address, joined for as long as the block runs.

    Args:
        address: `ray://HOST:PORT`, or `ray`: the cluster that RAY_ADDRESS names or this machine is in, or a new one.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ManifestError: the device is one of this machine.
        EngineError: there is no such cluster.
    """
    if device not in {"auto", "cpu", "cuda"}:
        raise ManifestError(
            f"--device {device} names a device of this machine, and those of --engine {address} are the workers'",
            expected="auto, cpu or cuda",
        )
    with _member(address):
        yield OnRay(device, of=address)


@contextmanager
def _member(address: str) -> Iterator[None]:
    """A member of the cluster for as long as the block runs; what Ray has set in the environment goes with that."""
    before = _environment()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere that nobody asked for
    try:
        _join(address)
        yield
    finally:
        ray.shutdown()
        for name in _environment():
            del os.environ[name]
        os.environ.update(before)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def _join(address: str) -> None:
    """By Ray's own rule where only `ray` is said: RAY_ADDRESS, or the cluster of this machine, or a new one."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "ray" else address
    if ":" in named:
        _require_answer(named, engine=address)
    elif not _HAS_TOKEN.intersection(os.environ) and not Path("~/.ray/auth_token").expanduser().exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # or Ray writes one that all later clusters ask for
    try:
        ray.init(named or None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ValueError, RayError) as error:
        raise _not_joined(address, reason_of(error)) from error


def _require_answer(named: str, *, engine: str) -> None:
    """Somebody is at this address: Ray itself would try for minutes."""
    host, _, port = named.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER).close()
    except (OSError, ValueError) as error:
        raise _not_joined(engine, f"{named}: {reason_of(error)}") from None


def _not_joined(engine: str, why: str) -> EngineError:
    return EngineError(
        f"--engine {engine}: no Ray cluster could be joined ({why})",
        expected="a running cluster with the Ray and Python of this machine, and its token if it asks for one",
        next_step="ray status on one of its machines; docs/cluster.md says how to start one",
    )


class OnRay:
    """The cluster that this process has joined."""

    def __init__(self, device: str, *, of: str) -> None:
        """The device is a GPU where the cluster has any, unless it is `cpu`; `of` names the cluster.

        Raises:
            EngineError: `cuda`, and there is none.
        """
        self._cluster = _Cluster()
        if device == "cuda" and not self._cluster.total("GPU"):
            raise EngineError(
                f"--device cuda, and no machine of the cluster --engine {of} has a GPU now",
                expected="at least one, which ray status lists",
                next_step="--device cpu, or add a machine with a GPU",
            )
        self._on_gpu = device != "cpu" and self._cluster.total("GPU") > 0
        self._firsts = dict[bool, Machine]()

    @property
    def machine(self) -> Machine:
        """That of a first worker, which all others must equal; waits until the cluster has one to give.

        Raises:
            EngineError: its packages or sources are not those of this process.
        """
        return self._first(on_gpu=self._on_gpu)

    def _first(self, *, on_gpu: bool) -> Machine:
        if on_gpu not in self._firsts:
            self._firsts[on_gpu] = self._looked_at(on_gpu=on_gpu)
        return self._firsts[on_gpu]

    def _looked_at(self, *, on_gpu: bool) -> Machine:
        first = ray.remote(look_at).options(**asdict(self._needs(gpus=1 if on_gpu else 0, memory=0)))
        try:
            found: Machine = ray.get(first.remote(_setting(on_gpu=on_gpu)))
        except RayError as error:
            raise EngineError(
                f"no worker could be started ({reason_of(_cause(error))})",
                expected="publisher and its packages on every machine of the cluster, as on this one",
                next_step="install them there, for which docs/cluster.md has ways",
            ) from error
        if unlike := differences(_installed(this_machine(torch.device("cpu"))), _installed(found)):
            raise EngineError(
                f"this machine and the cluster's workers differ: {unlike}",
                expected="the same publisher and packages on every machine",
                next_step="install them alike, for which docs/cluster.md has ways",
            )
        return found

    @contextmanager
    def run(
        self, job: Job[Unit, Result], units: Iterable[Unit], *, tell: Tell
    ) -> Iterator[Iterator[tuple[Unit, Result]]]:
        """Each unit with its result, in the order in which they are done."""
        tell("waiting for a worker")
        crew = self._crew(job, units)
        try:
            yield _results(crew, job, units, tell=tell)
        finally:
            crew.dismiss()

    def _crew(self, job: Job[Unit, Result], units: Iterable[Unit]) -> Crew:
        gpus = job.gpus if self._on_gpu else 0
        setting = replace(_setting(on_gpu=bool(gpus)), like=self._first(on_gpu=bool(gpus)))
        if job.standing or gpus:
            needs = self._needs(gpus=gpus, memory=job.standing)
            slots = self._slots(needs)
            return Actors(job, setting, needs=needs, number=min(slots, length_hint(units, slots)))
        return Tasks(
            job,
            setting,
            needs=lambda unit: self._needs(gpus=0, memory=job.memory(unit)),
            slots=lambda: self._slots(self._needs(gpus=0, memory=0)),
        )

    def _needs(self, *, gpus: float, memory: int) -> Needs:
        """No more than the largest machine has: what no machine can give, Ray waits for without a word."""
        wanted = 1 if gpus else torch.get_num_threads()
        cpus = min(wanted, self._cluster.largest("CPU") or wanted)
        size = _rounded(PROCESS + memory)
        return Needs(cpus, gpus, int(min(size, self._cluster.largest("memory"))))

    def _slots(self, needs: Needs) -> int:
        """For how many of these at once the cluster has processors or GPUs."""
        if needs.num_gpus:
            return max(1, int(self._cluster.total("GPU") / needs.num_gpus))
        return max(1, int(self._cluster.total("CPU") / needs.num_cpus))


class _Cluster:
    """What the machines of the cluster have; machines come and go, so this is known for a second."""

    def __init__(self) -> None:
        self._asked, self._machines = -_FRESH, list[dict[str, float]]()

    def total(self, resource: str) -> float:
        """Of all machines together."""
        return sum(machine.get(resource, 0) for machine in self._now())

    def largest(self, resource: str) -> float:
        """Of the machine that has most of it."""
        return max((machine.get(resource, 0) for machine in self._now()), default=0)

    def _now(self) -> list[dict[str, float]]:
        if time.monotonic() - self._asked > _FRESH:
            self._machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._asked = time.monotonic()
        return self._machines


def _setting(*, on_gpu: bool) -> Setting:
    """With the threads of this process, so that the digits are the same here and there."""
    return Setting("cuda" if on_gpu else "cpu", torch.get_num_threads())


def _rounded(size: int) -> int:
    """Up to one of few sizes, by at most a quarter: Ray keeps a queue for each that it sees."""
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


def _installed(machine: Machine) -> Machine:
    """The machine as far as it was installed, builds of torch for one device or another aside."""
    packages = {name: version.partition("+")[0] for name, version in machine.packages.items()}
    return Machine(device="", threads=0, capability="", packages=packages, code=machine.code)


def _results(crew: Crew, job: Job[Unit, Result], units: Iterable[Unit], *, tell: Tell) -> Iterator[tuple[Unit, Result]]:
    """What the crew gives, in the order of its being done."""
    failures, left, running = Failures(), _Left(units), dict[Reference, Unit]()
    while left or running:
        while left and crew.has_room():
            unit = left.take()
            running[crew.start(unit)] = unit
        if running:
            tell(f"{job.label(next(iter(running.values())))} ({len(running)} under way)")
        (ready,), _ = ray.wait([*running, *crew.opening()], num_returns=1)
        what = job.label(running[ready]) if ready in running else "the start of a worker"
        try:
            if ready not in running:
                crew.opened(ready)
                continue
            result = ray.get(ready)
        except RayError as error:
            failures.add(what, _cause(error))
            if ready in running:
                crew.ended(ready, error)
                left.put_back(running.pop(ready))
        else:
            crew.ended(ready, None)
            yield running.pop(ready), result


class _Left(Generic[Unit]):
    """Units to be done, taken from where they come from one by one."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = iter(units)
        self._next = deque[Unit]()

    def __bool__(self) -> bool:
        self._next.extend(islice(self._units, not self._next))
        return bool(self._next)

    def take(self) -> Unit:
        """The next one."""
        return self._next.popleft()

    def put_back(self, unit: Unit) -> None:
        """One that has to be done again."""
        self._next.append(unit)


def _cause(error: RayError) -> BaseException:
    """What was raised on the worker, or that it was lost."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error
