"""What runs on a worker of a Ray cluster: a unit in a task, or units one after the other in an actor.

A worker that is not like the first one refuses to work: its results could differ in their last digits.
"""

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from publisher.engines import Begin, Job, Machine, this_machine
from publisher.errors import EngineError

_SHOWN = 12  # characters of a digest


@dataclass(frozen=True, slots=True)
class Setting:
    """What a worker must be.

    Attributes:
        device: `cpu` or `cuda`.
        threads: of torch, for one unit.
        like: the machine that it must equal; None for the first worker, which is only looked at.
    """

    device: str
    threads: int
    like: Machine | None = None


def look_at(setting: Setting) -> Machine:
    """Set this worker up and return the machine that it is."""
    torch.set_num_threads(setting.threads)
    return this_machine(torch.device(setting.device))


def work_on(job: Job[Any, Any], unit: Any, setting: Setting) -> Any:
    """Run one unit, as a task of its own.

    Args:
        job: what is done to it.
        unit: one of the job's units.
        setting: what this worker must be.

    Returns:
        The result of the unit.

    Raises:
        EngineError: this worker is not like the first one.
    """
    require_alike(setting)
    with job.opened(torch.device(setting.device)) as begin:
        return begin(unit)(_no_report)


class Worker:
    """An actor: opens a job once, and then does units of it."""

    def __init__(self, setting: Setting) -> None:
        """Keep the setting; the job is opened by a call of its own, so that an error in that is reported as one."""
        self._setting = setting
        self._open = ExitStack()
        self._begin: Begin[Any, Any] | None = None

    def open(self, job: Job[Any, Any]) -> None:
        """Open the job, so that units can be done.

        Raises:
            EngineError: this worker is not like the first one.
        """
        require_alike(self._setting)
        self._begin = self._open.enter_context(job.opened(torch.device(self._setting.device)))

    def work(self, unit: Any) -> Any:
        """Run one unit and return its result."""
        if self._begin is None:
            raise ValueError("the job is not open")
        return self._begin(unit)(_no_report)

    def close(self) -> None:
        """Close the job, so that nothing is left behind on this machine."""
        self._open.close()


def require_alike(setting: Setting) -> None:
    """Set this worker up and raise an error unless it is like the first one.

    Raises:
        EngineError: it is not; the message says in what.
    """
    here = look_at(setting)
    if setting.like is not None and here != setting.like:
        raise EngineError(
            f"the worker on {socket.gethostname()} is not as the first one: {differences(setting.like, here)}",
            expected="workers that are alike, so that the last digits do not depend on which of them did what",
            next_step="run on machines of one kind",
        )


def differences(first: Machine, other: Machine) -> str:
    """Return in what two machines differ, with the versions of packages; empty where they do not."""
    pairs = {name: (value, asdict(other)[name]) for name, value in asdict(first).items() if name != "packages"}
    pairs |= {name: (version, other.packages.get(name)) for name, version in first.packages.items()}
    return ", ".join(
        f"{name} {str(ours)[:_SHOWN]} and {str(theirs)[:_SHOWN]}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    )


def _no_report(what: str) -> None:
    """Report nothing: what a unit says of its progress does not cross the network."""
