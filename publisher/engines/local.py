"""The engine of one machine: unit after unit on one device, and the next one is read while this one is worked on.

It refuses nothing by itself.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from publisher.engines import Job, Machine, Report, Result, Unit, this_machine
from publisher.engines.io_threads import read_ahead


@dataclass(frozen=True, slots=True)
class Local:
    """Works in this process, on this device."""

    device: torch.device

    @property
    def machine(self) -> Machine:
        """This machine, with the engine's device."""
        return this_machine(self.device)

    @contextmanager
    def run(
        self, job: Job[Unit, Result], units: Iterable[Unit], *, report: Report
    ) -> Iterator[Iterator[tuple[Unit, Result]]]:
        """Give each unit with its result, in the order of the units.

        Args:
            job: what is done to each unit.
            units: taken one ahead of the one that is worked on.
            report: called with what is being done.

        Yields:
            An iterator of units and results; an error of the job is raised from it as it is.
        """
        with closing(self._results(job, units, report=report)) as results:
            yield results

    def _results(
        self, job: Job[Unit, Result], units: Iterable[Unit], *, report: Report
    ) -> Generator[tuple[Unit, Result]]:
        with job.opened(self.device) as begin:
            for unit, finish in read_ahead(units, begin):
                report(job.label(unit))
                yield unit, finish(report)
