"""What runs on a worker of a Ray cluster: a unit in a task, or units one after the other in an actor.

A worker that is not as it was told to be refuses to work: its results could differ in their last digits.
"""

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from publisher.engines import Begin, Job, Machine, this_machine
from publisher.errors import EngineError


@dataclass(frozen=True, slots=True)
class Setting:
    """What a worker is to be.

    Attributes:
        device: `cpu` or `cuda`.
        threads: of torch, for one unit.
        like: what it must equal; None of the first one, which is only looked at.
    """

    device: str
    threads: int
    like: Machine | None = None


def look_at(setting: Setting) -> Machine:
    """What this worker is, once it is set up."""
    torch.set_num_threads(setting.threads)
    return this_machine(torch.device(setting.device))


def work_on(job: Job[Any, Any], unit: Any, setting: Setting) -> Any:
    """The result of one unit."""
    require_alike(setting)
    with job.opened(torch.device(setting.device)) as begin:
        return begin(unit)(_unheard)


class Worker:
    """An actor: opens a job once, and then does units of it."""

    def __init__(self, setting: Setting) -> None:
        """Nothing is opened yet, so that an error in that is told as one."""
        self._setting = setting
        self._open = ExitStack()
        self._begin: Begin[Any, Any] | None = None

    def open(self, job: Job[Any, Any]) -> None:
        """Get ready for units of this job."""
        require_alike(self._setting)
        self._begin = self._open.enter_context(job.opened(torch.device(self._setting.device)))

    def work(self, unit: Any) -> Any:
        """The result of one unit."""
        if self._begin is None:
            raise ValueError("the job is not open")
        return self._begin(unit)(_unheard)

    def close(self) -> None:
        """Leave nothing behind on this machine."""
        self._open.close()


def require_alike(setting: Setting) -> None:
    """This worker, once it is set up, is like the first one.

    Raises:
        EngineError: it is not, naming in what.
    """
    here = look_at(setting)
    if setting.like is not None and here != setting.like:
        raise EngineError(
            f"the worker on {socket.gethostname()} is not as the first one: {differences(setting.like, here)}",
            expected="workers that are alike, so that the last digits do not depend on which of them did what",
            next_step="run on machines of one kind",
        )


def differences(first: Machine, other: Machine) -> str:
    """In what they differ, with the versions of packages; empty where they do not."""
    pairs = {name: (value, asdict(other)[name]) for name, value in asdict(first).items() if name != "packages"}
    pairs |= {name: (version, other.packages.get(name)) for name, version in first.packages.items()}
    unlike = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return ", ".join(f"{name} {_short(ours)} and {_short(theirs)}" for name, (ours, theirs) in unlike.items())


def _short(value: object) -> str:
    """A digest by its beginning."""
    return str(value)[:12]


def _unheard(what: str) -> None:
    """What a unit tells of itself does not cross the network."""
