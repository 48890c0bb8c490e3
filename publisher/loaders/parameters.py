"""Adapters that hold factors of single parameters (`target_parameters`), as of experts, with loaders that read others.

Their rules were read for modules. What such a loader makes of the modules is told as ever; of the parameters nothing
is, so that the whole is never called right.
"""

from dataclasses import replace
from typing import Protocol

from publisher.loaders.finding import verdict
from publisher.loaders.subject import Subject
from publisher.records.loaders import LoaderName, LoaderVerdict


class Judge(Protocol):
    """A module of this room that judges for a loader whose rules were read in its source."""

    READ: str

    def judge(self, subject: Subject) -> LoaderVerdict:
        """Return the verdict on an adapter of modules alone."""


def judged(loader: Judge, subject: Subject, *, name: LoaderName) -> LoaderVerdict:
    """Return a loader's verdict, which is told of the modules alone where there are parameters as well.

    Args:
        loader: what judges.
        subject: the adapter and its base.
        name: of the loader.

    Returns:
        The verdict; `not told` where nothing speaks against the modules.
    """
    if not subject.wrapped:
        return loader.judge(subject)
    why = f"how {name} takes factors of single parameters (target_parameters) was not looked into"
    modules = replace(subject, headers=subject.headers_of_modules)
    if not modules.factors:
        return verdict(name, loader.READ, basis="read", findings=(), unknown=why)
    found = loader.judge(modules)
    return LoaderVerdict(
        loader=found.loader,
        version=found.version,
        basis=found.basis,
        loads="not told" if found.loads == "yes" else found.loads,
        scale="not told" if found.scale == "right" else found.scale,
        flags=found.flags,
        findings=found.findings,
        notes=(*found.notes, why),
    )
