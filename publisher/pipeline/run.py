"""The run: which stages, in which order, and which of their earlier results still hold.

    fetch -> extract -> validate -> verify -> card -> push

Each stage takes frozen values and returns one. A finished stage leaves a marker in the work folder: the digest of
everything it rests on (checkpoints, settings, the code that decides), and of what it wrote. As long as both hold its
result is reused, also on another machine: extraction.json and validation.json state the device and the packages they
were made with. What passed validation is tried on the loaders.
DIST/NAME is the staged tree, byte for byte what is pushed; DIST/NAME.work holds what is not.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from publisher.errors import FetchError, ManifestError, PushError, VerificationError
from publisher.hub.client import THE_HUB, embedded
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Manifest, Reference, RequestSet, Variant
from publisher.pipeline.markers import lapse_of, mark, unproven
from publisher.pipeline.stages.push import Target, preflight, push
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import (
    ADAPTER,
    ADAPTER_CONFIG,
    CARD,
    EXPORTS,
    EXTRACTION,
    LOADERS,
    MANIFEST,
    RESIDUAL,
    VERIFICATION,
)
from publisher.records.files import digest_of, room_in, sha256_of, write_text
from publisher.records.loaders import Loaders, LoaderVerdict
from publisher.records.lock import locked
from publisher.records.outcome import Outcome, VariantOutcome
from publisher.records.progress import Progress
from publisher.records.provenance import code_digest
from publisher.records.publication import CommitPlan, PushOutcome, Signing
from publisher.records.validation import Validation
from publisher.records.verification import Verification
from publisher.release.card import card_files, stale_charts
from publisher.release.commitplan import dry_plan, staged_files
from publisher.release.evidence import load_evidence
from publisher.release.signing import Means, is_signed, require_means, sign_release
from publisher.verification.request_files import RequestFile, read_request_file

if TYPE_CHECKING:
    from publisher.engines import Engine

STAGES = ("fetch", "extract", "validate", "verify", "card", "push")
_MARKERS = {"extract": "extract.json", "validate": "validate.json", "verify": "verify.json"}
_TAKEN = frozenset({"root", "hub", "lock", "lock.holder", "digests.json", "variants"})  # names in the work folder
_EXTRACTING, _VALIDATING, _VERIFYING, _JUDGING = (
    "publisher.pipeline.stages.extract",
    "publisher.pipeline.stages.validate",
    "publisher.pipeline.stages.verify",
    "publisher.pipeline.stages.loaders",
)  # with all that they import, these are the code that a stage's result rests on


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the pipeline.

    Attributes:
        manifest_file: the manifest.
        dist: where the staged tree and the work folder go.
        device: `auto`, `cpu`, `cuda` or, for the local engine, `cuda:N`.
        engine: where the work is done: `local`, `ray` or `ray://HOST:PORT`.
        model_gpus: how many GPUs a model of verification is spread over.
        variants: paths of the variants to work on; empty for all.
        first: the first stage to run; it runs again even if nothing changed, earlier results are taken as they are.
        last: the last stage to run.
        dry_run: stop before the first write to the Hub.
        rehearse: push to an embedded local Hub in the work folder.
        tag: the tag to set on the commit.
        pull_request: open a pull request instead of committing to the branch.
        stream: read the checkpoints' weights from the Hub as they are needed, and store none of them.
        signing_key: the private key, for a manifest that asks for a signature by one.
    """

    manifest_file: Path
    dist: Path
    device: str = "auto"
    engine: str = "local"
    model_gpus: int = 1
    variants: tuple[str, ...] = ()
    first: str = "fetch"
    last: str = "push"
    dry_run: bool = False
    rehearse: bool = False
    tag: str | None = None
    pull_request: bool = False
    stream: bool = False
    signing_key: Path | None = None

    def includes(self, stage: str) -> bool:
        """Whether this stage is part of the run."""
        return STAGES.index(self.first) <= STAGES.index(stage) <= STAGES.index(self.last)

    @property
    def writes(self) -> bool:
        """Whether this run ends with a write to a Hub."""
        return self.includes("push") and not self.dry_run

    @property
    def touches_checkpoints(self) -> bool:
        """Whether a stage reads weights: the others need only the JSON artefacts."""
        return STAGES.index(self.first) <= STAGES.index("verify")

    @property
    def staged(self) -> Path:
        """The staged tree."""
        return self.dist / self.manifest_file.stem

    @property
    def work(self) -> Path:
        """What only this machine needs: markers, digests, finished modules."""
        return self.dist / f"{self.manifest_file.stem}.work"


def run(options: Run, progress: Progress) -> Outcome:
    """Run the stages from `first` to `last`.

    Raises:
        PublisherError: a stage failed; what was finished is kept.
        BusyError: another run works on the same output.
    """
    manifest = load_manifest(options.manifest_file)
    variants = _chosen(manifest, options.variants)
    with _target(options) as target:
        _require_signer(manifest, options)
        if options.writes:
            progress("checking that the Hub can be written to")
            preflight(manifest, target)
        with room_in(options.dist, name="the output", size=0), locked(options.work):
            _clear_partial_files(options)
            return _run_stages(manifest, variants, options=options, target=target, progress=progress)


def _run_stages(
    manifest: Manifest, variants: Sequence[Variant], *, options: Run, target: Target, progress: Progress
) -> Outcome:
    hashed = set[Path]()
    places = [_place(variant, options, progress, hashed=hashed) for variant in variants]
    outcomes = _variants(places, options, progress)
    changed = _card(manifest, options, progress) if options.includes("card") else None
    if options.writes:
        _require_publishable(manifest, options, places=places, progress=progress)
    signature = _sign(manifest, options, target=target, progress=progress) if options.includes("push") else None
    plan = _plan(manifest, options, progress) if options.includes("push") and options.dry_run else None
    pushed = _push(manifest, options, target=target, progress=progress) if options.writes else None
    return Outcome(
        manifest=str(options.manifest_file),
        staged=str(options.staged),
        stages=tuple(stage for stage in STAGES if options.includes(stage)),
        variants=outcomes,
        card_changed=changed,
        signature=signature,
        plan=plan,
        push=pushed,
    )


def _clear_partial_files(options: Run) -> None:
    """What a run that was killed had half written is no part of a release, nor of use to this run."""
    for folder in (options.staged, options.work):
        for path in folder.rglob(".*.partial"):
            path.unlink()


def _chosen(manifest: Manifest, paths: Sequence[str]) -> tuple[Variant, ...]:
    known = {variant.path: variant for variant in manifest.variants}
    wanted = [path if path.endswith("/") else f"{path}/" for path in paths]
    unknown = [path for path in wanted if path not in known]
    if unknown:
        raise ManifestError(
            f"the manifest has no variant at {', '.join(unknown)}", expected=f"one of {', '.join(known)}"
        )
    return tuple(known[path] for path in wanted) or manifest.variants


# --- one variant: fetch, extract, validate ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one variant's files are in this run, the requests its models are asked, and what this run has hashed."""

    variant: Variant
    options: Run
    requests: tuple[RequestFile, ...] = ()
    hashed: set[Path] = field(default_factory=set)

    @property
    def verifies(self) -> bool:
        """Whether this run includes a verification of the variant."""
        return self.variant.verification is not None and self.options.includes("verify")

    @property
    def staged(self) -> Path:
        return self.options.staged / self.variant.folder

    @property
    def memo(self) -> Path:
        """The digests of checkpoints that earlier runs found."""
        return self.options.work / "digests.json"

    def work(self, name: str) -> Path:
        folder = self.variant.folder or "root"
        taken = self.variant.folder.partition("/")[0].casefold() in _TAKEN
        return self.options.work / ("variants" if taken else "") / folder / name


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two checkpoints of a variant, and the FP8 release of the base where that is tried too."""

    source: Snapshot
    base: Snapshot
    fp8: Snapshot | None = None

    @property
    def pins(self) -> list[tuple[str, str, str]]:
        """Kind, name and revision of both; a local folder's revision is the digest of its files."""
        return [(c.kind, c.name, c.revision) for c in (self.source.checkpoint, self.base.checkpoint)]


def _place(variant: Variant, options: Run, progress: Progress, *, hashed: set[Path]) -> _Place:
    """With the requests read and checked, once and before any long work, where they will be needed."""
    needed = options.includes("verify") or options.writes
    return _Place(variant, options, _requests(variant, progress) if needed else (), hashed)


def _variants(places: Sequence[_Place], options: Run, progress: Progress) -> tuple[VariantOutcome, ...]:
    if not options.touches_checkpoints:
        return tuple(map(_untouched, places))
    from publisher.engines import engine_named

    with engine_named(options.engine, options.device) as engine:
        return tuple(_variant(place, engine, progress) for place in places)


def _untouched(place: _Place) -> VariantOutcome:
    variant = place.variant
    return VariantOutcome(
        path=variant.path, label=variant.label, reused=(), summary=None, validation=None, verification=None
    )


def _variant(place: _Place, engine: "Engine", progress: Progress) -> VariantOutcome:
    variant = place.variant
    if (carried := _carried(place, progress)) is not None:
        return carried
    pair = _fetch(place, progress)
    if place.options.last == "fetch":
        return _untouched(place)
    pair = _hashed_where_read(place, pair, progress)
    extraction, extract_held = _extraction(place, pair, engine=engine, progress=progress)
    validation, validate_held = _validation(place, pair, extraction=extraction, engine=engine, progress=progress)
    loaders = _loaders(place, validation, progress) if validation is not None else ()
    verification, verify_held = _verification(place, pair, extraction=extraction, engine=engine, progress=progress)
    held = (("extract", extract_held), ("validate", validate_held), ("verify", verify_held))
    return VariantOutcome(
        path=variant.path,
        label=variant.label,
        reused=tuple(stage for stage, holds in held if holds),
        summary=extraction.summary,
        validation=validation,
        verification=verification,
        loaders=loaders,
    )


def _carried(place: _Place, progress: Progress) -> VariantOutcome | None:
    """The outcome where the results of earlier stages hold and no checkpoint is needed to know it.

    That is so where both come from the Hub: a commit id fixes their bytes. Nothing is fetched then.
    """
    variant, evidence = place.variant, place.staged / EXTRACTION
    whole = place.options.first == "fetch" and place.options.includes("validate")
    if not (whole and variant.source.repo and variant.base.repo and evidence.is_file()):
        return None
    pins = [("hub", ref.repo or "", ref.revision or "") for ref in (variant.source, variant.base)]
    lapse = _extraction_lapse(place, pins) or _validation_lapse(place)
    if place.verifies and not lapse:
        lapse = _verification_lapse(place, progress)
    if lapse:
        progress(f"{place.staged} is not reused: {lapse}")
        return None
    progress(f"{place.staged} holds; its checkpoints are not fetched")
    validation = Validation.read(place.work("validation.json"))
    loaders = _loaders(place, validation, progress)
    extraction = Extraction.read(evidence)
    return VariantOutcome(
        path=variant.path,
        label=variant.label,
        reused=("extract", "validate", *(["verify"] if place.verifies else [])),
        summary=extraction.summary,
        validation=validation,
        verification=Verification.read(place.staged / VERIFICATION) if place.verifies else None,
        loaders=loaders,
    )


def _fetch(place: _Place, progress: Progress) -> _Pair:
    """All that the variant's stages read, so that nothing is found missing after hours."""
    from publisher.checkpoints.downloads import fetch_companions
    from publisher.pipeline.stages.fetch import fetch

    variant, options = place.variant, place.options
    if place.verifies and options.stream and options.engine == "local":
        raise VerificationError(
            "the weights are streamed, and verification runs the models on this machine",
            next_step="run without --stream, or stop with --until validate",
        )
    fetched = partial(fetch, memo=place.memo, progress=progress, stream=options.stream, hashed=place.hashed)
    source, base = fetched(variant.source), fetched(variant.base)
    if not place.verifies:
        return _Pair(source, base)
    fetch_companions(source, progress)
    _require_module(variant, source.folder)
    return _Pair(source, base, fetched(variant.fp8) if variant.fp8 else None)


def _hashed_where_read(place: _Place, pair: _Pair, progress: Progress) -> _Pair:
    """Return the pair; where its tensors are to be read, with digests that this run has made."""
    from publisher.pipeline.stages.fetch import hashed_here

    lapses = _lapses(place, pair, progress)
    for stage, lapse in lapses.items():
        if lapse and place.options.first != stage and place.work(_MARKERS[stage]).exists():
            progress(f"{stage} runs again: {lapse}")
    if not any(lapses.values()):
        return pair
    again = partial(hashed_here, memo=place.memo, progress=progress, hashed=place.hashed)
    return _Pair(again(pair.source), again(pair.base), again(pair.fp8) if pair.fp8 else None)


def _lapses(place: _Place, pair: _Pair, progress: Progress) -> dict[str, str]:
    """Return why the result of each stage that reads tensors does not hold any more; empty where it does."""
    lapses = {"extract": partial(_extraction_lapse, place, pair.pins), "validate": partial(_validation_lapse, place)}
    if place.verifies:
        lapses["verify"] = partial(_verification_lapse, place, progress)
    first = place.options.first
    return {
        stage: "it was asked for" if first == stage else lapse()
        for stage, lapse in lapses.items()
        if place.options.includes(stage)
    }


def _require_module(variant: Variant, folder: Path) -> None:
    settings = variant.verification
    if settings and settings.runner == "decision" and not (folder / settings.module).is_file():
        raise VerificationError(
            f"{variant.source.where} has no {settings.module}",
            expected="the decision module of the source repository, at its root",
            next_step="correct module in the manifest's verification",
        )


def _extraction(place: _Place, pair: _Pair, *, engine: "Engine", progress: Progress) -> tuple[Extraction, bool]:
    """The extraction, and whether it is an earlier one that still holds."""
    evidence, marker = place.staged / EXTRACTION, place.work("extract.json")
    if not place.options.includes("extract"):
        return _finished_extraction(place, pair), False
    from publisher.pipeline.stages import extract as stage

    if place.options.first != "extract" and not _extraction_lapse(place, pair.pins):
        return Extraction.read(evidence), True
    extraction = stage.extract(
        place.variant,
        base=pair.base,
        tuned=pair.source,
        staged=place.staged,
        work=place.work(""),
        engine=engine,
        progress=progress,
    )
    _require_unchanged(place, pair)
    written = [place.staged / name for name in extraction.summary.written]
    key = _extraction_key(place.variant, pair.pins)
    mark(marker, key, folder=place.staged, files=[evidence, *written])
    return extraction, False


def _require_unchanged(place: _Place, pair: _Pair) -> None:
    """Nothing is kept of an extraction whose checkpoints were changed while it read them: which bytes is not known."""
    from publisher.pipeline.stages.fetch import changed_since_hashed

    changed = [file for side in (pair.source, pair.base) for file in changed_since_hashed(side, place.memo)]
    if changed:
        for folder in place.work("").glob("modules-*"):
            shutil.rmtree(folder)
        raise FetchError(
            f"{', '.join(changed)} changed while this run was reading from it",
            expected="checkpoints that stay as they are until the run has ended",
            next_step="run the same command again: it reads the files as they are now",
        )


def _finished_extraction(place: _Place, pair: _Pair) -> Extraction:
    """Return the extraction that later stages start from; its files and checkpoints must be as they were then."""
    extraction = Extraction.read(place.staged / EXTRACTION)
    lapse = unproven(place.work("extract.json"), folder=place.staged)
    if (extraction.source, extraction.base) != (pair.source.checkpoint, pair.base.checkpoint):
        lapse = lapse or "the files of source and base are others than it names"
    if lapse:
        raise FetchError(
            f"{place.staged} is not known to be as its extraction left it: {lapse}",
            expected="the files of an extraction that was finished",
            next_step=f"publish extract --manifest {place.options.manifest_file}",
        )
    return extraction


def _extraction_lapse(place: _Place, pins: Sequence[tuple[str, str, str]]) -> str:
    return lapse_of(place.work("extract.json"), _extraction_key(place.variant, pins), folder=place.staged)


def _extraction_key(variant: Variant, pins: Sequence[tuple[str, str, str]]) -> str:
    settings = variant.model_dump(exclude={"source", "base", "verification", "fp8"})
    return digest_of([pins, settings, code_digest(_EXTRACTING)])


def _validation(
    place: _Place, pair: _Pair, *, extraction: Extraction, engine: "Engine", progress: Progress
) -> tuple[Validation | None, bool]:
    """What validation saw, and whether it is an earlier one that still holds."""
    result, marker = place.work("validation.json"), place.work("validate.json")
    if not place.options.includes("validate"):
        return None, False
    if place.options.first != "validate" and not _validation_lapse(place):
        return Validation.read(result), True
    from publisher.pipeline.stages.validate import validate

    validation = validate(
        place.variant,
        extraction,
        source=pair.source,
        base=pair.base,
        staged=place.staged,
        engine=engine,
        progress=progress,
    )
    validation.write(result)
    mark(marker, validation_key(place.staged), folder=marker.parent, files=[result])
    return validation, False


def validation_key(staged: Path) -> str:
    """Digest of what a validation rests on: the adapter's files, which name the checkpoints, and the judges.

    A file that is missing has no digest; to say so is the validation's business.
    """
    exports = (name for names in EXPORTS.values() for name in names)
    files = _digests(staged, EXTRACTION, ADAPTER_CONFIG, ADAPTER, RESIDUAL, *exports)
    return digest_of([files, code_digest(_VALIDATING)])


def _digests(folder: Path, *names: str) -> list[str]:
    return [sha256_of(file) if file.is_file() else "" for file in map(folder.joinpath, names)]


def _validation_lapse(place: _Place) -> str:
    marker = place.work("validate.json")
    return lapse_of(marker, validation_key(place.staged), folder=marker.parent)


def _loaders(place: _Place, validation: Validation, progress: Progress) -> tuple[LoaderVerdict, ...]:
    """Return the loaders' verdicts on the adapter that has passed this validation; they hold as long as both do."""
    from publisher.pipeline.stages.loaders import try_loaders
    from publisher.pipeline.stages.readback import base_config

    result, marker = place.staged / LOADERS, place.work("loaders.json")
    rests_on = [
        _digests(place.staged, EXTRACTION, ADAPTER_CONFIG, ADAPTER),
        validation.packages,
        place.variant.adapter.exports,
    ]
    key = digest_of([rests_on, code_digest(_JUDGING)])
    if place.options.first != "validate" and not lapse_of(marker, key, folder=place.staged):
        return Loaders.read(result).verdicts
    progress(f"trying loaders on {place.variant.label}")
    found = try_loaders(place.variant, staged=place.staged, base=base_config(place.variant), validation=validation)
    mark(marker, key, folder=place.staged, files=[result])
    return found.verdicts


def _verification(
    place: _Place, pair: _Pair, *, extraction: Extraction, engine: "Engine", progress: Progress
) -> tuple[Verification | None, bool]:
    """What the two models' answers come to, and whether that is an earlier result that still holds."""
    variant, options = place.variant, place.options
    if variant.verification is None and options.includes("verify"):
        (place.staged / VERIFICATION).unlink(missing_ok=True)  # of an earlier manifest
    if not place.verifies:
        return None, False
    marker, key = place.work("verify.json"), _verification_key(place, progress)
    if options.first != "verify" and not lapse_of(marker, key, folder=place.staged):
        return Verification.read(place.staged / VERIFICATION), True
    from publisher.pipeline.stages.verify import Inputs, verify

    found = verify(
        variant,
        extraction,
        inputs=Inputs(
            base=pair.base,
            tuned=pair.source,
            fp8=pair.fp8,
            request_files=place.requests,
            model_gpus=options.model_gpus,
        ),
        staged=place.staged,
        work=place.work(""),
        engine=engine,
        progress=progress,
    )
    mark(marker, key, folder=place.staged, files=[place.staged / VERIFICATION])
    return found, False


def _requests(variant: Variant, progress: Progress) -> tuple[RequestFile, ...]:
    """The request files of the manifest's sets, read and checked."""
    settings = variant.verification
    if settings is None:
        return ()
    return tuple(
        read_request_file(_request_file(one, progress), name=one.file, runner=settings.runner, limit=one.limit)
        for one in settings.sets
    )


def _request_file(one: RequestSet, progress: Progress) -> Path:
    if (dataset := one.dataset) is None:
        return Path(one.file)
    from publisher.hub import client as hub

    progress(f"fetching {one.file} of {dataset.repo}@{dataset.revision[:8]}")
    return hub.download_from_dataset(dataset.repo, dataset.revision, filename=one.file)


def _verification_key(place: _Place, progress: Progress) -> str:
    """Digest of what a verification rests on: the adapter's files, requests, settings, code."""
    variant, staged = place.variant, place.staged
    files = _digests(staged, EXTRACTION, ADAPTER_CONFIG, ADAPTER)
    settings = variant.model_dump(include={"verification", "fp8", "model_class", "source", "base"})
    local = _companions(Path(variant.source.path)) if variant.source.path else ""
    fp8 = _local_revision(variant.fp8, place, progress) if variant.fp8 and variant.fp8.path else ""
    return digest_of([files, settings, local, fp8, [file.content for file in place.requests], code_digest(_VERIFYING)])


def _companions(folder: Path) -> str:
    from publisher.checkpoints.files import checkpoint_files, companions_digest

    return companions_digest(folder, checkpoint_files(folder))


def _local_revision(reference: Reference, place: _Place, progress: Progress) -> str:
    from publisher.pipeline.stages.fetch import fetch

    return fetch(reference, memo=place.memo, progress=progress, hashed=place.hashed).checkpoint.revision


def _verification_lapse(place: _Place, progress: Progress) -> str:
    return lapse_of(place.work("verify.json"), _verification_key(place, progress), folder=place.staged)


# --- the whole repository: card, push -----------------------------------------------------------------------


def rendered_card(manifest: Manifest, options: Run) -> dict[str, str]:
    """README.md and its charts from the JSON artefacts alone, by path in the release."""
    return card_files(manifest, load_evidence(manifest, options.staged), beside=options.manifest_file.parent)


def _card(manifest: Manifest, options: Run, progress: Progress) -> bool:
    """Write README.md, its charts and the manifest's copy; whether the card changed."""
    progress("rendering the card")
    files, readme = rendered_card(manifest, options), options.staged / CARD
    stale = stale_charts(manifest, files, options.staged)
    changed = bool(stale) or not readme.is_file() or readme.read_bytes() != files[CARD].encode()
    for path in stale:
        (options.staged / path).unlink(missing_ok=True)
    for path, text in files.items():
        write_text(options.staged / path, text)
    write_text(options.staged / MANIFEST, options.manifest_file.read_text(encoding="utf-8"))
    return changed


def _require_signer(manifest: Manifest, options: Run) -> None:
    """A signature is there, or what it takes is at hand, before a real push; a key that is named is the right one."""
    if manifest.sign is None or not options.includes("push"):
        return
    must = options.writes and not options.rehearse and not is_signed(manifest, options.staged)
    if must or (options.signing_key is not None and manifest.sign.key is not None):
        require_means(manifest.sign, options.signing_key)


def _sign(manifest: Manifest, options: Run, *, target: Target, progress: Progress) -> Signing | None:
    """A dry run and a rehearsal do what can be done here, and go on without a signature where that is nothing."""
    if manifest.sign is not None:
        progress("signing")
    at = target.destination if options.writes else None if manifest.is_local else THE_HUB
    means = Means(options.signing_key, published_at=at, publishing=options.writes and not options.rehearse)
    return sign_release(manifest, options.staged, means=means)


def _plan(manifest: Manifest, options: Run, progress: Progress) -> CommitPlan:
    progress("planning the commit")
    return dry_plan(manifest, options.staged)


def _push(manifest: Manifest, options: Run, *, target: Target, progress: Progress) -> PushOutcome:
    """Push the staged tree, and read it back."""
    from publisher.pipeline.stages.readback import Published, read_back

    progress(f"pushing to {target.destination.label}")
    outcome = push(manifest, options.staged, target=target, progress=progress)
    files = staged_files(manifest, options.staged)
    published = Published(manifest.repo, outcome.commit, files=files, at=target.destination)
    return outcome.model_copy(
        update={"read_back": read_back(manifest, options.staged, published=published, progress=progress)}
    )


def _require_publishable(manifest: Manifest, options: Run, *, places: Sequence[_Place], progress: Progress) -> None:
    """The staged tree is of this manifest, and passed validation; `places` are those of the variants worked on."""
    _require_fresh(manifest, options)
    known = {place.variant.path: place for place in places}
    for variant in manifest.variants:
        place = known.get(variant.path) or _place(variant, options, progress, hashed=set())
        _require_validated(place, progress)
        _require_verified(place, progress)


def _require_fresh(manifest: Manifest, options: Run) -> None:
    """The card and the manifest's copy are those of this manifest and these artefacts."""
    files = rendered_card(manifest, options)
    wanted = {**files, MANIFEST: options.manifest_file.read_text(encoding="utf-8")}
    stale = [name for name, text in wanted.items() if not _holds_text(options.staged / name, text)]
    stale += stale_charts(manifest, files, options.staged)
    if stale:
        raise PushError(
            f"{options.staged / stale[0]} is stale", next_step=f"publish card --manifest {options.manifest_file}"
        )


def _holds_text(file: Path, text: str) -> bool:
    return file.is_file() and file.read_bytes() == text.encode()


def _require_validated(place: _Place, progress: Progress) -> None:
    """Nothing is published that did not pass validation in this run, or earlier with the same files and judges.

    Where it was judged with other packages, those installed here look at it too, as far as no weights are needed.
    """
    if lapse := _validation_lapse(place) or _edited(place):
        raise PushError(
            f"{place.staged} has not passed validation as it is now: {lapse}",
            expected="a validation of these very files",
            next_step=f"publish --manifest {place.options.manifest_file}",
        )
    from publisher.pipeline.stages import readback, validate

    if Validation.read(place.work("validation.json")).packages == validate.packages():
        return
    progress(f"loading {place.staged} with the packages installed here")
    extraction = Extraction.read(place.staged / EXTRACTION)
    base = Snapshot(checkpoint=extraction.base, folder=readback.base_config(place.variant))
    validate.require_structure(place.variant, extraction, base=base, staged=place.staged)


def _edited(place: _Place) -> str:
    """Return why loaders.json may be another than the one that was written; empty where it is not."""
    return unproven(place.work("loaders.json"), folder=place.staged)


def _require_verified(place: _Place, progress: Progress) -> None:
    """Where the manifest asks for a verification, nothing is published that did not pass it as it is now."""
    if place.variant.verification is None:
        return
    if lapse := _verification_lapse(place, progress):
        raise PushError(
            f"{place.staged} has not passed verification as it is now: {lapse}",
            expected="a verification of this very adapter with these requests, within the manifest's bounds",
            next_step=f"publish verify --manifest {place.options.manifest_file}, then card",
        )


@contextmanager
def _target(options: Run) -> Iterator[Target]:
    """Where to push; for a rehearsal, an embedded Hub that lives as long as the block and keeps its repositories."""
    if not options.rehearse:
        yield Target(tag=options.tag, pull_request=options.pull_request)
        return
    from publisher.hub.local import LocalHub

    with LocalHub(options.work / "hub") as local, embedded(local.endpoint, local.token) as destination:
        yield Target(destination, tag=options.tag, pull_request=options.pull_request)
