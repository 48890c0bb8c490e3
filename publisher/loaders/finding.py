"""Findings and verdicts: how what is known of a loader becomes one line of a table.

A loader that refuses an adapter is honest; one that goes on with something else than was meant is not, and only that is
called `wrongly`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from publisher.errors import counted
from publisher.loaders.packing import words
from publisher.loaders.subject import Subject
from publisher.records.loaders import Basis, FindingKind, LoaderFinding, LoaderName, LoaderVerdict

MERGED = "serve merged weights (publish merge)"
UNIFORM = "set adapter.layout: uniform in the manifest, which pads every module to one rank"
EXPORTED = "as the export beside the PEFT files, which was read back and holds the same factors at scale 1"
_CLOSE = 1e-6  # two scales nearer than this, relatively, are one scale


def finding(
    kind: FindingKind, what: str, *, remedy: str = MERGED, modules: int = 0, silent: bool = False
) -> LoaderFinding:
    """Return one thing that keeps a loader from using an adapter as it is meant.

    Args:
        kind: the sort of the finding.
        what: the finding in words.
        remedy: what helps.
        modules: how many modules or tensors it concerns; 0 where it is the adapter as a whole.
        silent: whether the loader goes on without an error.

    Returns:
        The record, as loaders.json holds it.
    """
    return LoaderFinding(kind=kind, what=what, modules=modules, silent=silent, remedy=remedy)


def wrong_scales(subject: Subject, rule: Callable[[str], float], *, why: str, remedy: str) -> list[LoaderFinding]:
    """Find the modules that a loader scales otherwise than is meant.

    Args:
        subject: the adapter and its base.
        rule: the scale that the loader gives a module, by the module's name.
        why: the loader's rule in words.
        remedy: what helps.

    Returns:
        One finding over all such modules, or none.
    """
    differences = [_difference(subject.scale(name), rule(name)) for name in subject.factors]
    counts = Counter(filter(None, differences))
    if not counts:
        return []
    scales = ", ".join(f"{counted(number, 'module')} at {scale}" for scale, number in counts.items())
    return [finding("wrong scale", f"{scales}: {why}", modules=counts.total(), silent=True, remedy=remedy)]


def _difference(meant: float, found: float) -> str:
    """Return the scale that is found beside the one that is meant, in words; nothing where they are equal."""
    if math.isclose(found, meant, rel_tol=_CLOSE):
        return ""
    return f"{found / meant:.3g} times the scale" if meant else f"the scale {found:.3g}, where 0 is meant"


def changes_nothing(subject: Subject) -> list[LoaderFinding]:
    """Find an adapter that changes nothing: lora_alpha is 0, or a factor all zero, in every module."""
    every = len(subject.factors)
    if subject.changes_otherwise:
        return []
    if all(subject.scale(name) == 0 for name in subject.factors):
        what = "lora_alpha is 0 in every module, so that the adapter changes nothing"
        remedy = "give adapter_config.json the lora_alpha that the adapter was trained with"
    elif len(subject.zero_factors) == every:
        what = "a factor is all zero in every module, so that the adapter changes nothing"
        remedy = "publish the adapter as it was after training"
    else:
        return []
    return [finding("silent no-op", what, modules=every, silent=True, remedy=remedy)]


def other_base(subject: Subject, *, by: str) -> list[LoaderFinding]:
    """Find an adapter that was trained on other weights than the base's, for a loader that does not make them again.

    Args:
        subject: the adapter and its base.
        by: what messages call the loader.

    Returns:
        One finding, or none.
    """
    name = subject.initialised.name
    if not subject.initialised.changes_base:
        return []
    what = f"init_lora_weights is {name}: it was trained on changed weights, and {by} adds B A to the base's own"
    return [finding("other base", what, modules=len(subject.factors), silent=True, remedy=_PLAIN)]


def other_packing(subject: Subject, *, by: str) -> list[LoaderFinding]:
    """Find stacked experts whose factors are packed in another order than PEFT reads.

    Args:
        subject: the adapter and its base.
        by: what messages call the loader.

    Returns:
        One finding, or none.
    """
    told = subject.packing
    if told is None or told.other is None:
        return []
    what = f"the factors of its experts are packed otherwise than {by} reads them, which gives each expert those of "
    what += f"others. They have {words(told.other)}: {told.how}"
    remedy = "write it in PEFT's packing, by publish compat ADAPTER --base DIR --repair OUT"
    return [finding("other packing", what, modules=len(subject.wrapped), silent=True, remedy=remedy)]


def packing_note(subject: Subject) -> str:
    """Return what is known of the packing where it is PEFT's or cannot be told; nothing elsewhere."""
    told = subject.packing
    if told is None or told.other is not None:
        return ""
    if told.packing is None:
        return f"how the factors of its experts are packed cannot be told: {told.how}"
    return f"the factors of its experts are packed as PEFT reads them: {told.how}"


_PLAIN = "write it again as a plain LoRA, by path_initial_model_for_weight_conversion of PEFT's save_pretrained"


def repeated_factors(subject: Subject) -> list[LoaderFinding]:
    """Find factors that the file holds more than once, by different keys."""
    if not subject.repeated:
        return []
    what = f"{counted(len(subject.repeated), 'factor')} by more than one key, as {subject.repeated[0]}"
    return [finding("refused tensor", what, modules=len(subject.repeated), remedy="write each factor once")]


def missing_factors(subject: Subject) -> list[LoaderFinding]:
    """Find modules of which one factor is missing."""
    incomplete = [name for name, factors in subject.factors.items() if factors.a is None or factors.b is None]
    if not incomplete:
        return []
    what = f"one of the two factors is missing in {counted(len(incomplete), 'module')}"
    return [finding("missing tensor", what, modules=len(incomplete), remedy="extract the adapter again")]


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
    """Return the verdict that follows from the findings on a loader.

    Args:
        loader: the loader.
        version: the version that was run or whose rules were read.
        basis: whether the loader was run, its reader of adapter_config.json was, or its source was read.
        findings: what speaks against the loader.
        flags: what it takes to load the adapter there; left out where it cannot be loaded.
        notes: when it would be otherwise.
        unknown: why nothing can be told where there is no finding; empty where the rules cover this model.

    Returns:
        The record, as loaders.json holds it.
    """
    found = tuple(findings)
    loads = _loads(found, unknown)
    return LoaderVerdict(
        loader=loader,
        version=version,
        basis=basis,
        loads=loads,
        scale=_scale(found, unknown),
        flags=() if loads == "no" else tuple(flags),
        findings=found,
        notes=tuple(filter(None, (*notes, unknown))),
    )


def _loads(found: Sequence[LoaderFinding], unknown: str) -> Literal["yes", "no", "wrongly", "not told"]:
    """Return whether the loader takes the adapter: an error is `no`, what goes wrong without one is `wrongly`."""
    if any(not one.silent for one in found):
        return "no"
    if found:
        return "wrongly"
    return "not told" if unknown else "yes"


def _scale(found: Sequence[LoaderFinding], unknown: str) -> Literal["right", "wrong", "none", "not told"]:
    """Return whether the modules' scales are right there; `none` where the loader does not come as far as a scale."""
    kinds = {one.kind for one in found}
    if "wrong scale" in kinds:
        return "wrong"
    if kinds & {"other format", "unreadable", "silent no-op"}:
        return "none"
    return "not told" if unknown else "right"
