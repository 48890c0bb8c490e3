"""Where the units of a stage's work are done: on this machine (`local`), or on a Ray cluster (`ray_engine`).

A stage hands over a job and its units and takes each result as it comes, in any order; to leave the block is to
cancel what has not begun. A stage does not know which engine it has: a unit gives the same bytes wherever it is done,
on machines that are alike in what `Machine` names. An engine whose package is not installed is refused.

Begin with `Job`, which every stage's unit of work is, and `Engine` below; then read `local`, and `ray_engine`.
"""

import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Generic, Protocol, Self, TypeVar

import torch

from publisher.border.installing import install_command
from publisher.engines.devices import chosen_device, device_name
from publisher.errors import ManifestError
from publisher.records.provenance import whole_code

Unit = TypeVar("Unit")
Result = TypeVar("Result")
Report = Callable[[str], None]
"""Called with what is being done, for the progress line."""
Finish = Callable[[Report], Result]
"""Does the work of a unit that was read, and returns its result."""
Begin = Callable[[Unit], Finish[Result]]
"""Reads what a unit needs, and returns the call that does its work."""

_PACKAGES = ("numpy", "peft", "safetensors", "torch", "transformers")


class Job(ABC, Generic[Unit, Result]):
    """What is done to each unit; a frozen value that can be sent to another machine, as its units can."""

    @property
    def standing(self) -> int:
        """Bytes that the job keeps in memory between units, such as a model.

        A job that keeps any is opened once by each worker.
        """
        return 0

    @property
    def gpus(self) -> float:
        """How many GPUs a unit uses where there are any.

        It is half of one, so that one worker reads while another computes.
        """
        return 0.5

    @abstractmethod
    def label(self, unit: Unit) -> str:
        """Return what is being done to this unit, by name, for the progress line."""

    @abstractmethod
    def memory(self, unit: Unit) -> int:
        """Return how many bytes of memory a unit takes at most, beside `standing`."""

    @abstractmethod
    def opened(self, device: torch.device) -> AbstractContextManager[Begin[Unit, Result]]:
        """Open the job on this device, for as long as the block runs, and give what begins its units."""

    def packed(self) -> Self:
        """Return the job with whatever another machine would not find, to be sent there."""
        return self

    def packed_unit(self, unit: Unit) -> Unit:
        """Return the unit with whatever another machine would not find, to be sent there."""
        return unit


@dataclass(frozen=True, slots=True)
class Machine:
    """What can move the last digits of a result.

    Attributes:
        device: `cpu`, or the accelerator's name.
        threads: of torch, for one unit.
        capability: the vector instructions that torch uses.
        packages: versions.
        code: digest of this tool's sources.
    """

    device: str
    threads: int
    capability: str
    packages: Mapping[str, str]
    code: str


class Engine(Protocol):
    """Does units of work."""

    @property
    def machine(self) -> Machine:
        """What all machines that do the work are alike in."""

    def run(
        self, job: Job[Unit, Result], units: Iterable[Unit], *, report: Report
    ) -> AbstractContextManager[Iterator[tuple[Unit, Result]]]:
        """Give each unit with its result as soon as there is one, for as long as the block runs.

        What has not begun by the end of the block never does.

        Args:
            job: what is done to each unit.
            units: taken from the iterable as there is room for them, so that it may read them from a disk.
            report: called with what is being done.

        Returns:
            A block that gives an iterator of units and results.

        Raises:
            PublisherError: what the job raises.
            EngineError: a unit fails again and again, or the workers are not alike.
        """


def this_machine(device: torch.device) -> Machine:
    """Return what this process is, with that device."""
    return Machine(
        device=device_name(device),
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
        packages=_packages(),
        code=whole_code(),
    )


@cache
def _packages() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}}


@contextmanager
def engine_named(name: str, device: str) -> Iterator[Engine]:
    """Open the engine that the command line names, for as long as the block runs.

    Args:
        name: `local`, `ray`, or `ray://HOST:PORT`.
        device: `auto`, `cpu`, `cuda`; for `local` also `cuda:N`.

    Raises:
        ManifestError: there is no such engine or device, or a package is missing.
        EngineError: the cluster cannot be joined.
    """
    if name == "local":
        from publisher.engines.local import Local

        yield Local(chosen_device(device))
        return
    if name != "ray" and not re.fullmatch(r"ray://.+:\d+", name):
        raise ManifestError(f"--engine {name} is not known", expected="local, ray, or ray://HOST:PORT")
    try:
        import ray  # noqa: F401 - only to tell that it is here
    except ModuleNotFoundError:
        raise ManifestError(
            f"--engine {name} needs the package ray, which is not installed",
            next_step=f"{install_command('ray')}, or leave --engine out",
        ) from None
    from publisher.engines.ray_engine import joined

    with joined(name, device) as engine:
        yield engine
