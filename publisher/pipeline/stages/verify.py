"""Verify: the released model and base + adapter answer the same requests, and their answers are held together.

Each model is loaded, once or by each of several workers, answers what is not on disk yet, and is freed before the
next. Request files are read before that. Answers are kept by all that they rest on, so a changed adapter is asked
anew and the released model is not. A set that breaks one of its bounds fails the stage; what was seen is then kept in
the work folder, and nothing of it is staged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from publisher.checkpoints.files import companions_digest
from publisher.checkpoints.snapshots import headers_of
from publisher.engines import Engine, Machine
from publisher.errors import VerificationError, listed
from publisher.manifest.schema import Bounds, Variant, VerificationSettings
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import ADAPTER, CONFIG, VERIFICATION
from publisher.records.files import digest_of, sha256_of
from publisher.records.progress import Progress
from publisher.records.provenance import code_digest
from publisher.records.verification import Fp8Verification, Limits, Verification, VerificationSet
from publisher.verification import answering
from publisher.verification.answering import Answering, Asked, batches, fitting
from publisher.verification.answers import Answer, Answers
from publisher.verification.metrics import Floats, Pair, set_figures
from publisher.verification.requests import Request, RequestFile
from publisher.verification.runners import Model


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a verification is made from.

    Attributes:
        source: its folder holds all of its repository's small files.
        base: what the adapter goes on.
        files: the request files of the manifest's sets, in their order.
        fp8: the FP8 release of the base, where the variant has one.
        over: how many GPUs each model is spread over.
    """

    source: Snapshot
    base: Snapshot
    files: Sequence[RequestFile]
    fp8: Snapshot | None = None
    over: int = 1


@dataclass(frozen=True, slots=True)
class _Session:
    """What is the same for every model of one run of the stage."""

    variant: Variant
    settings: VerificationSettings
    files: Sequence[RequestFile]
    work: Path
    engine: Engine
    over: int
    progress: Progress

    def answers(self, model: Model) -> list[Answers]:
        """Where this model's answers to each file are or will be."""
        return [Answers(self.work, _key(self, model, file)) for file in self.files]


def verify(
    variant: Variant,
    extraction: Extraction,
    *,
    inputs: Inputs,
    staged: Path,
    work: Path,
    engine: Engine,
    progress: Progress,
) -> Verification:
    """Ask every model what is not answered yet; what the answers come to, also written beside the adapter.

    Args:
        variant: with `verification`.
        extraction: of the adapter in `staged`.
        inputs: checkpoints and requests.
        staged: the folder of the adapter, for verification.json.
        work: the folder for answers.
        engine: where the models run.
        progress: told batch by batch.

    Raises:
        VerificationError: a bound does not hold, or a model cannot be loaded or asked.
        NoRoomError: the disk is full.
    """
    settings = variant.verification
    if settings is None:
        raise ValueError(f"{variant.label} asks for no verification")
    (staged / VERIFICATION).unlink(missing_ok=True)  # nothing earlier is evidence while this runs
    session = _Session(
        variant,
        settings,
        inputs.files,
        work=work / "answers",
        engine=engine,
        over=inputs.over,
        progress=progress,
    )
    released = Model("the released model", inputs.source)
    adapted = Model("base + adapter", inputs.source, base=inputs.base, adapter=staged)
    models = [released, adapted]
    if inputs.fp8 is not None:
        fp8 = Model("the FP8 base + adapter", inputs.source, inputs.base, adapter=staged, fp8=inputs.fp8)
        models.append(fp8)
    given = [_answered(session, model) for model in models]
    found = Verification(
        path=variant.path,
        adapter_sha256=extraction.summary.adapter.sha256,
        runner=settings.runner,
        device=engine.machine.device,
        dtype=settings.dtype,
        packages=_packages(engine.machine),
        sets=_sets(session, given[0], candidate=given[1], bounds=settings.sets),
        fp8=_fp8(session, inputs.fp8, given=given) if inputs.fp8 is not None else None,
    )
    _require_bounds(found, work=work)
    found.write(staged / VERIFICATION)
    return found


def _fp8(session: _Session, snapshot: Snapshot, *, given: Sequence[list[Answers]]) -> Fp8Verification:
    released, adapted, emulated = given
    wanted = session.variant.fp8
    against = wanted.against if wanted else "base"
    bounds = [wanted or Bounds()] * len(session.files)
    return Fp8Verification(
        base=snapshot.checkpoint,
        against=against,
        linears=sum(header.scale is not None for header in headers_of(snapshot).values()),
        sets=_sets(session, adapted if against == "base" else released, candidate=emulated, bounds=bounds),
    )


def _require_bounds(found: Verification, *, work: Path) -> None:
    """Where a bound is broken the figures are kept, under a name that no release has."""
    failed = work / f"failed-{VERIFICATION}"
    failed.unlink(missing_ok=True)
    broken = [line for one in found.sets for line in one.broken()]
    broken += [f"on the FP8 base, {line}" for one in (found.fp8.sets if found.fp8 else ()) for line in one.broken()]
    if broken:
        found.write(failed)
        raise VerificationError(
            f"the answers of {found.path} are further apart than the manifest allows:\n{listed(broken)}\n",
            expected=f"what the manifest's bounds say; all figures are in {failed}",
            next_step="find out why, or correct the bound, then: publish verify --manifest MANIFEST",
        )


# --- asking -------------------------------------------------------------------------------------------------


def _answered(session: _Session, model: Model) -> list[Answers]:
    """All answers of this model, which is loaded only where some are missing."""
    answers = session.answers(model)
    for file, dropped in zip(session.files, [one.mend() for one in answers], strict=True):
        if dropped:
            session.progress(f"asking {model.label} again: kept answers to {file.digest.name} were not whole")
    done = [one.finished() for one in answers]
    todo = [
        Asked(index, place, batch, f"{session.settings.sets[index].name}: {model.label}")
        for index, file in enumerate(session.files)
        for place, batch in enumerate(batches(file.requests, session.settings.batch))
        if place not in done[index]
    ]
    if not todo:
        return answers
    session.progress(f"loading {model.label} of {session.variant.label}")
    total = sum(len(file.requests) for file in session.files)
    left = sum(len(asked.requests) for asked in todo)

    def tell(what: str) -> None:
        session.progress(what, total - left, total)

    job = Answering(model, session.variant, session.settings, over=session.over)
    with session.engine.run(job, todo, tell=tell) as results:
        for asked, found in results:
            suited = [fitting(given, request) for given, request in zip(found, asked.requests, strict=True)]
            answers[asked.file].add(suited, place=asked.place)
            left -= len(asked.requests)
    return answers


def _key(session: _Session, model: Model, file: RequestFile) -> str:
    """All that a model's answers rest on."""
    settings, parts = session.settings, (model.release, model.base, model.fp8)
    return digest_of(
        [
            [[file.name, file.sha256] for part in parts if part for file in part.checkpoint.files],
            [(part.checkpoint.name, part.checkpoint.revision) if part else None for part in parts],
            companions_digest(model.release.folder, [file.name for file in model.release.checkpoint.files]),
            _adapter_digest(model),
            file.content,
            settings.model_dump(include={"runner", "module", "dtype", "batch"}),
            session.variant.model_class,
            session.engine.machine.device,
            _packages(session.engine.machine),
            code_digest(answering.__name__),
        ]
    )[:24]


def _adapter_digest(model: Model) -> list[str]:
    return [sha256_of(model.adapter / name) for name in (ADAPTER, CONFIG)] if model.adapter else []


def _packages(machine: Machine) -> dict[str, str]:
    """Versions of the packages that decide the answers."""
    return {name: machine.packages[name] for name in ("numpy", "peft", "torch", "transformers")}


# --- what they come to --------------------------------------------------------------------------------------


def _sets(
    session: _Session, reference: list[Answers], *, candidate: list[Answers], bounds: Sequence[Bounds]
) -> tuple[VerificationSet, ...]:
    return tuple(
        set_figures(
            one.name,
            _pairs(file.requests, reference[index], candidate=candidate[index]),
            file=file.digest,
            limits=Limits(max_answers_changed=bounds[index].max_answers_changed, max_kl=bounds[index].max_kl),
        )
        for index, (one, file) in enumerate(zip(session.settings.sets, session.files, strict=True))
    )


def _pairs(requests: Sequence[Request], reference: Answers, *, candidate: Answers) -> Iterator[Pair]:
    for request, first, second in zip(requests, reference.read(), candidate.read(), strict=True):
        for question, ours, theirs in zip(request.questions, second, first, strict=True):
            yield Pair(
                request=request.id,
                question=question.id,
                kind=question.kind,
                benchmark=request.benchmark,
                reference=_logits(theirs),
                candidate=_logits(ours),
                gold=question.gold,
                reference_failure=theirs if isinstance(theirs, str) else "",
                candidate_failure=ours if isinstance(ours, str) else "",
            )


def _logits(answer: Answer) -> Floats | None:
    return None if isinstance(answer, str) else np.asarray(answer, dtype=np.float64)
