"""The engine of a Ray cluster: a task for each unit, or actors where opening the job takes long or a GPU is used.

GPUs are for actors because Ray ends the process of a task that had one: each would import torch anew. Results wait in
the cluster's object store until they are taken, one at a time, and no more units are under way than keep the workers
busy. Workers that are not alike, and not like this process in their packages and this tool's sources, are refused.

Begin with `OnRay.run`: it makes a crew of workers (`ray_pools`), to which `ray_dispatch` gives the units; what a worker
does is in `ray_worker`, joining a cluster in `ray_cluster`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from operator import length_hint

import ray
import torch
from ray.exceptions import RayError

from publisher.engines import Job, Machine, Report, Result, Unit, this_machine
from publisher.engines.ray_cluster import Resources, membership
from publisher.engines.ray_dispatch import Dispatch, cause_of
from publisher.engines.ray_pools import Actors, Crew, Needs, Tasks
from publisher.engines.ray_worker import Setting, differences, look_at
from publisher.engines.retries import reason_of
from publisher.errors import EngineError, ManifestError

PROCESS = 1 << 29  # bytes of a worker before its first unit: torch, transformers and PEFT


@contextmanager
def joined(address: str, device: str) -> Iterator["OnRay"]:
    """Join the cluster at this address for as long as the block runs.

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
    with membership(address):
        yield OnRay(device, address=address)


class OnRay:
    """The cluster that this process has joined."""

    def __init__(self, device: str, *, address: str) -> None:
        """Choose the device: a GPU where the cluster has any, unless `device` is `cpu`.

        Args:
            device: `auto`, `cpu` or `cuda`.
            address: of the cluster, for messages.

        Raises:
            EngineError: `cuda`, and there is none.
        """
        self._cluster = Resources()
        if device == "cuda" and not self._cluster.total("GPU"):
            raise EngineError(
                f"--device cuda, and no machine of the cluster --engine {address} has a GPU now",
                expected="at least one, which ray status lists",
                next_step="--device cpu, or add a machine with a GPU",
            )
        self._on_gpu = device != "cpu" and self._cluster.total("GPU") > 0
        self._firsts = dict[bool, Machine]()

    @property
    def machine(self) -> Machine:
        """The machine of a first worker, which all others must equal.

        It waits until the cluster has a worker to give.

        Raises:
            EngineError: its packages or sources are not those of this process.
        """
        return self._first(on_gpu=self._on_gpu)

    def _first(self, *, on_gpu: bool) -> Machine:
        """Return the machine of the first worker of this kind, which is asked for once."""
        if on_gpu not in self._firsts:
            self._firsts[on_gpu] = self._look_at_first(on_gpu=on_gpu)
        return self._firsts[on_gpu]

    def _look_at_first(self, *, on_gpu: bool) -> Machine:
        first = ray.remote(look_at).options(**asdict(self._needs(gpus=1 if on_gpu else 0, memory=0)))
        try:
            found: Machine = ray.get(first.remote(_setting(on_gpu=on_gpu)))
        except RayError as error:
            raise EngineError(
                f"no worker could be started ({reason_of(cause_of(error))})",
                expected="publisher and its packages on every machine of the cluster, as on this one",
                next_step="install them there, for which docs/cluster.md has ways",
            ) from error
        unlike = differences(_installed(this_machine(torch.device("cpu"))), _installed(found))
        if unlike:
            raise EngineError(
                f"this machine and the cluster's workers differ: {unlike}",
                expected="the same publisher and packages on every machine",
                next_step="install them alike, for which docs/cluster.md has ways",
            )
        return found

    @contextmanager
    def run(
        self, job: Job[Unit, Result], units: Iterable[Unit], *, report: Report
    ) -> Iterator[Iterator[tuple[Unit, Result]]]:
        """Give each unit with its result, in the order in which they are done.

        Args:
            job: what is done to each unit.
            units: taken as workers have room for them.
            report: called with what is being done.

        Yields:
            An iterator of units and results.

        Raises:
            EngineError: no worker could be started, or workers are not alike; a unit fails again and again.
        """
        report("waiting for a worker")
        crew = self._crew(job, units)
        try:
            yield Dispatch(crew, job, units).results(report)
        finally:
            crew.dismiss()

    def _crew(self, job: Job[Unit, Result], units: Iterable[Unit]) -> Crew[Unit]:
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
        """Return what a worker needs, but no more than the largest machine has: for more, Ray would wait forever."""
        wanted = 1 if gpus else torch.get_num_threads()
        cpus = min(wanted, self._cluster.largest("CPU") or wanted)
        size = _rounded(PROCESS + memory)
        return Needs(cpus, gpus, int(min(size, self._cluster.largest("memory"))))

    def _slots(self, needs: Needs) -> int:
        """Return for how many workers of these needs the cluster has processors or GPUs at once."""
        if needs.num_gpus:
            return max(1, int(self._cluster.total("GPU") / needs.num_gpus))
        return max(1, int(self._cluster.total("CPU") / needs.num_cpus))


def _setting(*, on_gpu: bool) -> Setting:
    """Return a worker's setting, with the threads of this process, so that the digits are the same here and there."""
    return Setting("cuda" if on_gpu else "cpu", torch.get_num_threads())


def _rounded(size: int) -> int:
    """Round up to one of few sizes, by at most a quarter: Ray keeps a queue for each size that it sees."""
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


def _installed(machine: Machine) -> Machine:
    """Return what was installed on the machine, without the build of torch for one device or another."""
    packages = {name: version.partition("+")[0] for name, version in machine.packages.items()}
    return Machine(device="", threads=0, capability="", packages=packages, code=machine.code)
