"""Verify: the released model and base + adapter answer the same requests, and their answers are held together.

Each model is loaded, once or by each of several workers, answers what is not on disk yet, and is freed before the next.
Request files are read before that. Answers are kept by all that they rest on, so a changed adapter is asked anew and
the released model is not. A set that breaks one of its bounds fails the stage; what was seen is then kept in the work
folder, and nothing of it is staged.

In a comparison one model is the reference and the other the candidate: base + adapter is the candidate, held against
the released model; on the FP8 base the candidate is the adapter there, held against what the manifest says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from publisher.checkpoints.files import companions_digest
from publisher.checkpoints.snapshots import headers_of
from publisher.engines import Engine, Machine
from publisher.errors import VerificationError, listed
from publisher.manifest.schema import Bounds, Variant, VerificationSettings
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, VERIFICATION
from publisher.records.files import digest_of, sha256_of
from publisher.records.progress import Progress
from publisher.records.provenance import code_digest
from publisher.records.verification import Fp8Verification, Limits, Verification, VerificationSet
from publisher.verification import answer_job
from publisher.verification.answer_job import AnswerJob, RequestBatch, batches, one_for_each_question
from publisher.verification.answer_log import Answer, AnswerLog
from publisher.verification.metrics import AnswerPair, Floats, set_metrics
from publisher.verification.models import Model
from publisher.verification.request_files import Request, RequestFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a verification is made from; the stage passes it on whole.

    Attributes:
        base: the checkpoint that the adapter goes on.
        tuned: the released checkpoint; its folder holds all of its repository's small files.
        fp8: the FP8 release of the base, where the variant has one.
        request_files: the files of the manifest's test sets, in their order.
        model_gpus: number of GPUs that each model is spread over.
    """

    base: Snapshot
    tuned: Snapshot
    fp8: Snapshot | None = None
    request_files: Sequence[RequestFile]
    model_gpus: int = 1


@dataclass(frozen=True, slots=True)
class _Session:
    """What is the same for every model of one run of the stage."""

    variant: Variant
    settings: VerificationSettings
    inputs: Inputs
    work: Path
    engine: Engine
    progress: Progress


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
    """Verify that base + adapter answers as the released model does.

    Every model is asked what is not answered yet. The result is also written beside the adapter.

    Args:
        variant: the manifest's entry, which has a `verification`.
        extraction: the record of the adapter in `staged`.
        inputs: checkpoints, request files, and the number of GPUs for each model.
        staged: the folder of the adapter, where verification.json is written.
        work: the folder for answers, and for the metrics of a verification that failed.
        engine: where the models run.
        progress: gets a line for each batch that is answered.

    Returns:
        The metrics of every test set, all within the manifest's bounds.

    Raises:
        VerificationError: a bound does not hold, or a model cannot be loaded or asked.
        NoRoomError: the disk is full.
    """
    settings = variant.verification
    if settings is None:
        raise ValueError(f"{variant.label} asks for no verification")
    (staged / VERIFICATION).unlink(missing_ok=True)  # nothing earlier is evidence while this runs
    inputs = replace(inputs, base=extraction.as_merged(inputs.base))
    session = _Session(variant, settings, inputs, work, engine, progress)
    released = Model(label="the released model", model_class=variant.model_class, tuned=inputs.tuned)
    adapted = replace(released, label="base + adapter", base=inputs.base, adapter=staged)
    of_released = _answered(session, released)
    of_adapted = _answered(session, adapted)
    fp8 = _on_fp8(session, adapted, of_released=of_released, of_adapted=of_adapted)
    found = Verification(
        path=variant.path,
        adapter_sha256=extraction.summary.adapter.sha256,
        runner=settings.runner,
        device=engine.machine.device,
        dtype=settings.dtype,
        packages=_packages(engine.machine),
        sets=_sets(session, reference=of_released, candidate=of_adapted, bounds=settings.sets),
        fp8=fp8,
    )
    _require_bounds(found, work=work)
    found.write(staged / VERIFICATION)
    return found


def _on_fp8(
    session: _Session, adapted: Model, *, of_released: list[AnswerLog], of_adapted: list[AnswerLog]
) -> Fp8Verification | None:
    """Ask the adapter on the FP8 base too, where the variant has one, and compare it with what the manifest says."""
    fp8 = session.inputs.fp8
    if fp8 is None:
        return None
    wanted = session.variant.fp8
    against = wanted.against if wanted else "base"
    of_emulated = _answered(session, replace(adapted, label="the FP8 base + adapter", fp8=fp8))
    return Fp8Verification(
        base=fp8.checkpoint,
        against=against,
        linears=sum(header.scale is not None for header in headers_of(fp8).values()),
        sets=_sets(
            session,
            reference=of_adapted if against == "base" else of_released,
            candidate=of_emulated,
            bounds=[wanted or Bounds()] * len(session.settings.sets),
        ),
    )


def _require_bounds(found: Verification, *, work: Path) -> None:
    """Raise where a bound is broken; the metrics are then kept, under a name that no release has."""
    failed = work / f"failed-{VERIFICATION}"
    failed.unlink(missing_ok=True)
    broken = [line for one in found.sets for line in one.broken()]
    broken += [f"on the FP8 base, {line}" for one in (found.fp8.sets if found.fp8 else ()) for line in one.broken()]
    if broken:
        found.write(failed)
        raise VerificationError(
            f"the answers of {found.path} are further apart than the manifest allows:\n{listed(broken)}\n",
            expected=f"what the manifest's bounds say; all metrics are in {failed}",
            next_step="find out why, or correct the bound, then: publish verify --manifest MANIFEST",
        )


# --- asking -------------------------------------------------------------------------------------------------


def _answered(session: _Session, model: Model) -> list[AnswerLog]:
    """Return all answers of this model, one log for each request file; it is loaded only where some are missing."""
    files = session.inputs.request_files
    logs = [AnswerLog(session.work / "answers", _key(session, model, file)) for file in files]
    for file, log in zip(files, logs, strict=True):
        if log.mend():
            session.progress(f"asking {model.label} again: kept answers to {file.digest.name} were not whole")
    missing = _missing(session, model, logs)
    if missing:
        session.progress(f"loading {model.label} of {session.variant.label}")
        _ask(session, model, missing=missing, logs=logs)
    return logs


def _missing(session: _Session, model: Model, logs: Sequence[AnswerLog]) -> list[RequestBatch]:
    """Return the batches that this model has not answered yet."""
    settings = session.settings
    missing: list[RequestBatch] = []
    for index, file in enumerate(session.inputs.request_files):
        finished = logs[index].finished()
        label = f"{settings.sets[index].name}: {model.label}"
        split = enumerate(batches(file.requests, settings.batch))
        missing += [RequestBatch(index, number, batch, label) for number, batch in split if number not in finished]
    return missing


def _ask(session: _Session, model: Model, *, missing: Sequence[RequestBatch], logs: Sequence[AnswerLog]) -> None:
    """Ask the model the missing batches, and add the answers to each to its log as they come."""
    total = sum(len(file.requests) for file in session.inputs.request_files)
    left = sum(len(batch.requests) for batch in missing)

    def report(what: str) -> None:
        session.progress(what, total - left, total)

    job = AnswerJob(model, session.settings, model_gpus=session.inputs.model_gpus)
    with session.engine.run(job, missing, report=report) as results:
        for batch, answers in results:
            pairs = zip(answers, batch.requests, strict=True)
            logs[batch.file].add([one_for_each_question(*pair) for pair in pairs], number=batch.number)
            left -= len(batch.requests)


def _key(session: _Session, model: Model, file: RequestFile) -> str:
    """Return the digest of all that a model's answers to a request file rest on."""
    settings = session.settings
    checkpoints = (model.tuned, model.base, model.fp8)
    return digest_of(
        [
            [[file.name, file.sha256] for part in checkpoints if part for file in part.checkpoint.files],
            [(part.checkpoint.name, part.checkpoint.revision) if part else None for part in checkpoints],
            companions_digest(model.tuned.folder, [file.name for file in model.tuned.checkpoint.files]),
            [sha256_of(model.adapter / name) for name in (ADAPTER, ADAPTER_CONFIG)] if model.adapter else [],
            file.content,
            settings.model_dump(include={"runner", "module", "dtype", "batch"}),
            model.model_class,
            session.engine.machine.device,
            _packages(session.engine.machine),
            code_digest(answer_job.__name__),
        ]
    )[:24]


def _packages(machine: Machine) -> dict[str, str]:
    """Return the versions of the packages that decide the answers."""
    return {name: machine.packages[name] for name in ("numpy", "peft", "torch", "transformers")}


# --- comparing ----------------------------------------------------------------------------------------------


def _sets(
    session: _Session, *, reference: list[AnswerLog], candidate: list[AnswerLog], bounds: Sequence[Bounds]
) -> tuple[VerificationSet, ...]:
    """Return the metrics of every test set; logs and bounds are in the order of the manifest's sets."""
    return tuple(
        set_metrics(
            one.name,
            _pairs(file.requests, reference=reference[index], candidate=candidate[index]),
            file=file.digest,
            limits=Limits(max_answers_changed=bounds[index].max_answers_changed, max_kl=bounds[index].max_kl),
        )
        for index, (one, file) in enumerate(zip(session.settings.sets, session.inputs.request_files, strict=True))
    )


def _pairs(requests: Sequence[Request], *, reference: AnswerLog, candidate: AnswerLog) -> Iterator[AnswerPair]:
    """Yield the two answers to each question of these requests."""
    for request, of_reference, of_candidate in zip(requests, reference.read(), candidate.read(), strict=True):
        for question, one, other in zip(request.questions, of_reference, of_candidate, strict=True):
            yield AnswerPair(
                request=request.id,
                question=question.id,
                kind=question.kind,
                benchmark=request.benchmark,
                reference=_logits(one),
                candidate=_logits(other),
                gold=question.gold,
                reference_failure=one if isinstance(one, str) else "",
                candidate_failure=other if isinstance(other, str) else "",
            )


def _logits(answer: Answer) -> Floats | None:
    return None if isinstance(answer, str) else np.asarray(answer, dtype=np.float64)
