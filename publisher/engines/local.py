"""The engine of one machine: unit after unit on one device, and the next one is read while this one is worked on."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from publisher.engines import Job, Machine, Result, Tell, Unit, this_machine
from publisher.engines.io_threads import ahead


@dataclass(frozen=True, slots=True)
class Local:
    """Works in this process, on this device."""

    device: torch.device

    @property
    def machine(self) -> Machine:
        """This one."""
        return this_machine(self.device)

    @contextmanager
    def run(
        self, job: Job[Unit, Result], units: Iterable[Unit], *, tell: Tell
    ) -> Iterator[Iterator[tuple[Unit, Result]]]:
        """Each unit with its result, in the order given; an error of the job is raised as it is."""
        with closing(self._results(job, units, tell=tell)) as results:
            yield results

    def _results(self, job: Job[Unit, Result], units: Iterable[Unit], *, tell: Tell) -> Generator[tuple[Unit, Result]]:
        with job.opened(self.device) as begin:
            for unit, finish in ahead(units, begin):
                tell(job.label(unit))
                yield unit, finish(tell)
