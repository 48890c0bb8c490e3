"""The deep part of an audit: base and tuned are fetched at their pins, and what was claimed is worked out again.

Which tensors differ and how many are equal, every module's figures from the checkpoints, its relative error and
share of weights restored bit for bit from the published factors, and, where memory allows, the logits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from publisher.adapters.function_check import function_obstacle, require_function
from publisher.adapters.loading import quiet
from publisher.adapters.structure_checks import require_tensors
from publisher.audits.adapter import Adapter
from publisher.audits.checks import UncheckedError, adapted_places, checked, needed, require_none
from publisher.audits.versions import later
from publisher.checkpoints.pairs import open_pair
from publisher.checkpoints.snapshots import headers_of
from publisher.engines import Engine
from publisher.engines.devices import chosen_device
from publisher.engines.local import Local
from publisher.errors import PublisherError, shown
from publisher.extraction.claims import require_claims
from publisher.extraction.comparison import Comparison, compare
from publisher.extraction.experts import ExtractingExperts
from publisher.extraction.model_structure import Structure, structure_of
from publisher.extraction.module import Extracting
from publisher.extraction.summary import differences, summarise
from publisher.manifest.schema import Reference, Variant
from publisher.pipeline.stages.fetch import fetch, hashed_here
from publisher.records.audit import Check
from publisher.records.checkpoint import Checkpoint, Snapshot
from publisher.records.extraction import (
    ExactRecovery,
    ExpertTensor,
    ExpertTensorFigures,
    Extraction,
    MatrixFigures,
    ModuleExtraction,
    ModuleFigures,
    Roundings,
)
from publisher.records.filenames import EXTRACTION, MANIFEST, RESIDUAL
from publisher.records.formats import percent
from publisher.records.progress import Progress

_OTHER_DRAW = 0.05  # of a figure: another device draws other random numbers
_OTHER_SHARE = 1e-3  # between two machines' recoveries
_LAST_TO_ASSUME = "0.3.0"  # the last version for which every merge was the usual one


@dataclass(frozen=True, slots=True)
class Bench:
    """What the work is done with."""

    work: Path
    engine: Engine
    progress: Progress
    own_folders: bool

    @classmethod
    def of(cls, work: Path, *, device: str, progress: Progress, own_folders: bool) -> Self:
        """Return the bench with the device of this name.

        Args:
            work: a folder for what only this machine needs.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            progress: told of each piece of work.
            own_folders: whether checkpoints in local folders may be read: those that a repository names are not.

        Returns:
            The bench.

        Raises:
            ManifestError: the device cannot be used here.
        """
        return cls(work, Local(chosen_device(device)), progress, own_folders)


@dataclass(frozen=True, slots=True)
class _Case:
    """An adapter with both of its checkpoints."""

    variant: Variant
    extraction: Extraction
    folder: Path
    base: Snapshot
    tuned: Snapshot
    bench: Bench


def deep_checks(adapter: Adapter, bench: Bench) -> Iterator[Check]:
    """Yield the checks that need both checkpoints."""
    make = partial(checked, folder=adapter.folder, variant=adapter.path)
    case: _Case | None = None
    trouble: PublisherError | None = None
    try:
        case = _case(adapter, bench)
    except PublisherError as error:
        trouble = error
    yield make("checkpoints", lambda: _checkpoints(case, trouble))
    claims: dict[str, Callable[[_Case], str]] = {
        "comparison": comparison,
        "extraction": extracted_again,
        "reconstruction": reconstruction,
        "function": function,
    }
    for name, claim in claims.items():
        yield make(name, partial(_run, claim, case))


def _run(claim: Callable[[_Case], str], case: _Case | None) -> str:
    return claim(needed(case, "source and base"))


def _case(adapter: Adapter, bench: Bench) -> _Case:
    variant, extraction = needed(adapter.variant, MANIFEST), needed(adapter.extraction, EXTRACTION)
    base = _fetched(variant.base, bench)
    tuned = _fetched(variant.source, bench)
    return _Case(variant, extraction, adapter.folder, base=base, tuned=tuned, bench=bench)


def _fetched(reference: Reference, bench: Bench) -> Snapshot:
    if reference.path is not None and not bench.own_folders:
        raise UncheckedError(f"{reference.path} is a folder of whoever published this, and is not looked for here")
    if reference.path is not None and not Path(reference.path).is_dir():
        raise UncheckedError(f"{reference.path} is a local folder, which is not here")
    memo, hashed = bench.work / "digests.json", set[Path]()
    found = fetch(reference, memo=memo, progress=bench.progress, hashed=hashed)
    return hashed_here(found, memo=memo, progress=bench.progress, hashed=hashed)


def _checkpoints(case: _Case | None, trouble: PublisherError | None) -> str:
    """Check that every file of base and tuned has the digest that extraction.json records."""
    if trouble is not None:
        raise trouble
    found = needed(case, "source and base")
    problems = [
        *_other_files("base", found.base, found.extraction.base),
        *_other_files("source", found.tuned, found.extraction.source),
    ]
    require_none(problems)
    count = len(found.base.checkpoint.files) + len(found.tuned.checkpoint.files)
    return f"{count} files of source and base have the digests that {EXTRACTION} records"


def _other_files(side: str, snapshot: Snapshot, recorded: Checkpoint) -> Iterator[str]:
    here, there = ({file.name: file.sha256 for file in known.files} for known in (snapshot.checkpoint, recorded))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            digests = [(known.get(name) or "no such file")[:12] for known in (here, there)]
            yield f"{side}: {name} is {digests[0]}; {EXTRACTION} says {digests[1]}"


def comparison(case: _Case) -> str:
    """Check that the tensors that differ are the modules, and that the summary comes out again."""
    extraction = case.extraction
    seen = _compared(case)
    modules = {f"{module.name}.weight" for module in extraction.modules} | {one.name for one in extraction.experts}
    problems = [f"{name} differs and has no module" for name in sorted(set(seen.adapted) - modules)]
    problems += [f"{name} has a module and does not differ" for name in sorted(modules - set(seen.adapted))]
    claimed = extraction.summary
    again = summarise(
        extraction.modules,
        seen,
        adapter=claimed.adapter,
        config=claimed.config,
        residual=claimed.written.get(RESIDUAL),
        exports=claimed.exports,
        experts=extraction.experts,
    )
    require_none([*problems, *differences(claimed, again)])
    return f"{len(seen.adapted)} tensors differ, {seen.equal} are equal"


def _compared(case: _Case) -> Comparison:
    structure = _structure(case)
    with open_pair(base=case.base, tuned=case.tuned, names=structure.names.applied) as both:
        return compare(
            both,
            case.variant.adapter,
            structure=structure,
            engine=case.bench.engine,
            progress=case.bench.progress,
        )


def extracted_again(case: _Case) -> str:
    """Check that every module, extracted again, has the figures that extraction.json records."""
    _require_modules(case)
    modules = {f"{module.name}.weight": module for module in case.extraction.modules}
    experts = {tensor.name: tensor for tensor in case.extraction.experts}
    again: dict[str, ModuleFigures] = {}
    experts_again: dict[str, ExpertTensorFigures] = {}

    def report(what: str) -> None:
        case.bench.progress(what, len(again) + len(experts_again), len(modules) + len(experts))

    base = case.extraction.as_merged(case.base)
    with open_pair(base=base, tuned=case.tuned, names=_structure(case).names.applied) as both:
        job = Extracting(both.snapshots, case.variant.adapter, known=_known(case.extraction))
        with case.bench.engine.run(job, map(both.tensors, modules), report=report) as results:
            for pair, module in results:
                again[pair.name] = module.figures
        expert_job = ExtractingExperts(both.snapshots, case.variant.adapter)
        with case.bench.engine.run(expert_job, map(both.tensors, experts), report=report) as of_experts:
            for pair, tensor in of_experts:
                experts_again[pair.name] = tensor.figures
    problems = [line for name, module in modules.items() for line in _other_figures(module, again[name])]
    problems += [line for name, tensor in experts.items() for line in _other_experts(tensor, experts_again[name])]
    require_none(problems)
    return f"{adapted_places(case.extraction)} extracted again give the same figures"


def _other_experts(claimed: ExpertTensor, again: ExpertTensorFigures) -> Iterator[str]:
    """Yield where the experts of a parameter, extracted again, have other figures."""
    here, there = ({found.expert: found for found in tensor.experts} for tensor in (claimed, again))
    if here.keys() != there.keys():
        odd = shown(sorted(here.keys() ^ there.keys()))
        yield f"{claimed.name}: the experts {odd} have figures here or there, not in both"
    for expert in sorted(here.keys() & there.keys()):
        name = f"{claimed.name}[{expert}]"
        yield from _other_values(name, here[expert], there[expert])
        yield from _other_recovery(name, here[expert].recovery, there[expert].recovery)


def _known(extraction: Extraction) -> Roundings | None:
    """Return the roundings that evidence took for granted which is from before they were found; None of any other."""
    finds = any(module.arithmetic for module in extraction.modules) or later(
        extraction.tools.publisher, _LAST_TO_ASSUME
    )
    return None if finds else "one rounding"


def _other_figures(claimed: ModuleExtraction, again: ModuleFigures) -> Iterator[str]:
    yield from _other_values(claimed.name, claimed, again)
    if claimed.spectrum and not _close(claimed.spectrum, again.spectrum):
        yield f"{claimed.name}: spectrum is {shown(claimed.spectrum)}; it comes out as {shown(again.spectrum)}"
    yield from _other_recovery(claimed.name, claimed.recovery, again.recovery)


def _other_values(name: str, claimed: MatrixFigures, again: MatrixFigures) -> Iterator[str]:
    """Yield the figures that differ, but those of spectrum and recovery."""
    by_class_and_layout = {"alpha", "transposed", "kind", "kernel"}
    elsewhere = {*by_class_and_layout, "recovery", "spectrum", "arithmetic"}
    found = again.model_dump(exclude=elsewhere)
    for field, value in claimed.model_dump(exclude=elsewhere).items():
        both = isinstance(value, float) and isinstance(found[field], float)
        if not (math.isclose(value, found[field], rel_tol=_OTHER_DRAW) if both else value == found[field]):
            yield f"{name}: {field} is {shown(value)}; it comes out as {shown(found[field])}"
    if claimed.arithmetic != again.arithmetic:
        yield f"{name}: arithmetic is {shown(claimed.arithmetic)}; it comes out as {shown(again.arithmetic)}"


def _close(claimed: Sequence[float], again: Sequence[float]) -> bool:
    pairs = zip(claimed, again, strict=False)
    return len(claimed) == len(again) and all(math.isclose(*pair, rel_tol=_OTHER_DRAW) for pair in pairs)


def _other_recovery(name: str, claimed: ExactRecovery | None, again: ExactRecovery | None) -> Iterator[str]:
    """Yield where two recoveries differ in what they arrive at; the way there is another on every machine."""
    if claimed is None or again is None:
        if claimed != again:
            yield f"{name}: recovery is {shown(claimed)}; it comes out as {shown(again)}"
        return
    if claimed.arithmetic != again.arithmetic:
        yield f"{name}: arithmetic is {claimed.arithmetic}; it comes out as {again.arithmetic}"
    if abs(claimed.float32_share - again.float32_share) > _OTHER_SHARE:
        yield f"{name}: float32_share is {claimed.float32_share}; it comes out as {again.float32_share}"


def reconstruction(case: _Case) -> str:
    """Check that base + BA against tuned, module by module, gives the errors and shares that extraction.json claims."""
    _require_modules(case)
    try:
        require_tensors(case.extraction, case.folder)
    except PublisherError:
        raise UncheckedError("the adapter's tensors are not those of extraction.json") from None
    largest = require_claims(
        case.extraction,
        base=case.extraction.as_merged(case.base),
        tuned=case.tuned,
        names=_structure(case).names.applied,
        staged=case.folder,
        engine=case.bench.engine,
        progress=case.bench.progress,
    )
    return f"{adapted_places(case.extraction)}; the largest difference from a claim is {largest:.2g}"


def _structure(case: _Case) -> Structure:
    """Return what the manifest's class knows; its names are those of the modules."""
    return structure_of(case.variant.model_class, case.base.folder, head_of=case.tuned.folder)


def _require_modules(case: _Case) -> None:
    """Raise an error if a checkpoint lacks a module, or has it in another shape: the arithmetic needs all of them."""
    names = _structure(case).names
    for snapshot in (case.base, case.tuned):
        headers = names.applied(headers_of(snapshot))
        for module in case.extraction.modules:
            header = headers.get(f"{module.name}.weight")
            if header is None or header.shape != module.stored_shape:
                raise UncheckedError(f"{snapshot.checkpoint.name} has no {module.name} of this shape")
        for tensor in case.extraction.experts:
            header = headers.get(tensor.name)
            if header is None or header.shape != tensor.shape:
                raise UncheckedError(f"{snapshot.checkpoint.name} has no {tensor.name} of this shape")


def function(case: _Case) -> str:
    """Check that the logits of base + adapter are those of tuned rather than those of the base."""
    if obstacle := function_obstacle(headers_of(case.tuned)):
        raise UncheckedError(obstacle)
    case.bench.progress(f"comparing logits of {case.variant.label}")
    with quiet():
        base = case.extraction.as_merged(case.base)
        seen = require_function(case.variant, case.extraction, base=base, tuned=case.tuned, staged=case.folder)
    if isinstance(seen, str):
        raise UncheckedError(seen)
    return f"{', '.join(seen.outputs)} {percent(seen.ratio)} of the way from the source's to the base's"
