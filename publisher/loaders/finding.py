"""Findings and verdicts: how what is known of a loader becomes one line of a table.

A loader that refuses is honest; one that goes on with something else than was meant is not, and only that is called
`wrongly`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from publisher.errors import counted
from publisher.loaders.subject import Subject
from publisher.records.loaders import Basis, FindingKind, LoaderFinding, LoaderName, LoaderVerdict

MERGED = "serve merged weights (publish merge)"
UNIFORM = "set adapter.layout: uniform in the manifest, which pads every module to one rank"
EXPORTED = "as the export beside the PEFT files, which was read back and holds the same factors at scale 1"
_CLOSE = 1e-6


def finding(
    kind: FindingKind, what: str, *, remedy: str = MERGED, modules: int = 0, silent: bool = False
) -> LoaderFinding:
    """One finding; `modules` is 0 where it is the adapter as a whole."""
    return LoaderFinding(kind=kind, what=what, modules=modules, silent=silent, remedy=remedy)


def wrong_scales(subject: Subject, rule: Callable[[str], float], *, why: str, remedy: str) -> list[LoaderFinding]:
    """The modules whose scale by this loader's rule is another than the one that is meant."""
    factors = Counter(told for name in subject.pairs if (told := _difference(subject, rule, name)))
    if not factors:
        return []
    told = ", ".join(f"{counted(number, 'module')} at {scale}" for scale, number in factors.items())
    return [finding("wrong scale", f"{told}: {why}", modules=factors.total(), silent=True, remedy=remedy)]


def _difference(subject: Subject, rule: Callable[[str], float], name: str) -> str:
    """Return the scale by this loader's rule beside the one that is meant, or nothing where they are equal."""
    meant, found = subject.scale(name), rule(name)
    if math.isclose(found, meant, rel_tol=_CLOSE):
        return ""
    return f"{found / meant:.3g} times the scale" if meant else f"the scale {found:.3g}, where 0 is meant"


def idle(subject: Subject) -> list[LoaderFinding]:
    """Return what is to be said of an adapter that changes nothing: lora_alpha is 0, or B all zero, in every module."""
    every = len(subject.pairs)
    if all(subject.scale(name) == 0 for name in subject.pairs):
        what = "lora_alpha is 0 in every module, so that the adapter changes nothing"
        remedy = "give adapter_config.json the lora_alpha that the adapter was trained with"
    elif len(subject.zeros) == every:
        what = "lora_B is all zero in every module, so that the adapter changes nothing"
        remedy = "publish the adapter as it was after training"
    else:
        return []
    return [finding("silent no-op", what, modules=every, silent=True, remedy=remedy)]


def twice(subject: Subject) -> list[LoaderFinding]:
    """Return what is to be said of factors that the file holds more than once, by different keys."""
    if not subject.doubled:
        return []
    what = f"{counted(len(subject.doubled), 'factor')} by more than one key, as {subject.doubled[0]}"
    return [finding("refused tensor", what, modules=len(subject.doubled), remedy="write each factor once")]


def halves(subject: Subject) -> list[LoaderFinding]:
    """Modules of which one factor is missing."""
    lone = [name for name, pair in subject.pairs.items() if pair.a is None or pair.b is None]
    what = f"one of the two factors is missing in {counted(len(lone), 'module')}"
    return [finding("missing tensor", what, modules=len(lone), remedy="extract the adapter again")] if lone else []


def verdict(
    loader: LoaderName,
    version: str,
    *,
    basis: Basis,
    findings: Iterable[LoaderFinding],
    flags: Sequence[str] = (),
    notes: Sequence[str] = (),
    unknown: str = "",
) -> LoaderVerdict:
    """The verdict that follows from the findings; `unknown` says why there can be none where nothing was found."""
    found = tuple(findings)
    loads = "no" if any(not one.silent for one in found) else "wrongly" if found else "not told" if unknown else "yes"
    scale = "wrong" if any(one.kind == "wrong scale" for one in found) else "none" if _unread(found) else "right"
    return LoaderVerdict(
        loader=loader,
        version=version,
        basis=basis,
        loads=loads,
        scale="not told" if unknown and scale == "right" else scale,
        flags=tuple(flags) if loads in {"yes", "wrongly", "not told"} else (),
        findings=found,
        notes=tuple(filter(None, (*notes, unknown))),
    )


def _unread(found: Sequence[LoaderFinding]) -> bool:
    """The loader does not come as far as a scale."""
    return any(one.kind in {"other format", "unreadable", "silent no-op"} for one in found)
