"""The run: which stages, in which order, and which of their earlier results still hold.

    fetch -> extract -> validate -> verify -> card -> push

Each stage takes frozen values and returns one. A finished stage leaves a marker in the work folder: the digest of
everything it rests on (checkpoints, settings, the code that decides), and of what it wrote. As long as both hold its
result is reused, also on another machine: extraction.json and validation.json state the device and the packages they
were made with. DIST/NAME is the staged tree, byte for byte what is pushed; DIST/NAME.work holds what is not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from publisher.artefacts import ADAPTER, CARD, CONFIG, EXTRACTION, MANIFEST, RESIDUAL, VERIFICATION
from publisher.commitplan import dry_plan, staged_files
from publisher.errors import FetchError, ManifestError, PushError, VerificationError
from publisher.files import digest_of, room_in, sha256_of, write_text
from publisher.hub import THE_HUB, Destination
from publisher.lock import locked
from publisher.manifest import Manifest, Reference, Variant, load_manifest
from publisher.progress import Progress
from publisher.provenance import code_digest
from publisher.records import (
    CommitPlan,
    Extraction,
    FileDigest,
    Marker,
    Outcome,
    PushOutcome,
    Signing,
    Snapshot,
    Validation,
    VariantOutcome,
    Verification,
)
from publisher.requests import RequestFile, read_requests
from publisher.signing import Means, is_signed, require_means, sign_release
from publisher.stages.card import load_evidence, render_card
from publisher.stages.push import Target, preflight, push

STAGES = ("fetch", "extract", "validate", "verify", "card", "push")
_VALIDATION_CODE = (
    "adapter.py",
    "dequantised.py",
    "fp8.py",
    "loading.py",
    "lora.py",
    "records.py",
    "residual.py",
    "tensors.py",
    "weights.py",
    "stages/validate.py",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the pipeline.

    Attributes:
        manifest_file: the manifest.
        dist: where the staged tree and the work folder go.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
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
    outcomes = tuple(_variant(variant, options, progress) for variant in variants)
    changed = _card(manifest, options, progress) if options.includes("card") else None
    if options.writes:
        _require_publishable(manifest, options, progress)
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


def _variant(variant: Variant, options: Run, progress: Progress) -> VariantOutcome:
    untouched = VariantOutcome(
        path=variant.path, label=variant.label, reused=(), summary=None, validation=None, verification=None
    )
    if not options.touches_checkpoints:
        return untouched
    place = _Place(variant, options)
    if (carried := _carried(place, progress)) is not None:
        return carried
    pair = _fetch(variant, options, progress)
    if options.last == "fetch":
        return untouched
    extraction, extract_held = _extraction(place, pair, progress)
    validation, validate_held = _validation(place, pair, extraction=extraction, progress=progress)
    verification, verify_held = _verification(place, pair, extraction=extraction, progress=progress)
    held = (("extract", extract_held), ("validate", validate_held), ("verify", verify_held))
    return VariantOutcome(
        path=variant.path,
        label=variant.label,
        reused=tuple(stage for stage, holds in held if holds),
        summary=extraction.summary,
        validation=validation,
        verification=verification,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one variant's files are in this run."""

    variant: Variant
    options: Run

    @property
    def staged(self) -> Path:
        return self.options.staged / self.variant.folder

    def work(self, name: str) -> Path:
        return self.options.work / (self.variant.folder or "root") / name


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two checkpoints of a variant."""

    source: Snapshot
    base: Snapshot

    @property
    def pins(self) -> list[tuple[str, str, str]]:
        """Kind, name and revision of both; a local folder's revision is the digest of its files."""
        return [(c.kind, c.name, c.revision) for c in (self.source.checkpoint, self.base.checkpoint)]


def _carried(place: _Place, progress: Progress) -> VariantOutcome | None:
    """The outcome where the results of earlier stages hold and no checkpoint is needed to know it.

    That is so where both come from the Hub: a commit id fixes their bytes. Nothing is fetched then.
    """
    variant, evidence = place.variant, place.staged / EXTRACTION
    whole = place.options.first == "fetch" and place.options.includes("validate")
    if not (whole and variant.source.repo and variant.base.repo and evidence.is_file()):
        return None
    pins = [("hub", ref.repo or "", ref.revision or "") for ref in (variant.source, variant.base)]
    lapse = _lapse(place.work("extract.json"), _extraction_key(variant, pins), folder=place.staged)
    lapse = lapse or _validation_lapse(place)
    verifies = variant.verification is not None and place.options.includes("verify")
    if verifies and not lapse:
        lapse = _verification_lapse(place, progress)
    if lapse:
        progress(f"{place.staged} is not reused: {lapse}")
        return None
    progress(f"{place.staged} holds; its checkpoints are not fetched")
    return VariantOutcome(
        path=variant.path,
        label=variant.label,
        reused=("extract", "validate", *(["verify"] if verifies else [])),
        summary=Extraction.read(evidence).summary,
        validation=Validation.read(place.work("validation.json")),
        verification=Verification.read(place.staged / VERIFICATION) if verifies else None,
    )


def _fetch(variant: Variant, options: Run, progress: Progress) -> _Pair:
    from publisher.stages.fetch import fetch

    memo = options.work / "digests.json"
    references = (variant.source, variant.base)
    source, base = (fetch(one, memo=memo, progress=progress, stream=options.stream) for one in references)
    return _Pair(source, base)


def _extraction(place: _Place, pair: _Pair, progress: Progress) -> tuple[Extraction, bool]:
    """The extraction, and whether it is an earlier one that still holds."""
    evidence, marker = place.staged / EXTRACTION, place.work("extract.json")
    if not place.options.includes("extract"):
        return Extraction.read(evidence), False
    from publisher.devices import chosen_device
    from publisher.stages import extract as stage

    device = chosen_device(place.options.device)
    key = _extraction_key(place.variant, pair.pins)
    if place.options.first != "extract" and not _lapse(marker, key, folder=place.staged):
        return Extraction.read(evidence), True
    extraction = stage.extract(
        place.variant,
        pair.source,
        base=pair.base,
        staged=place.staged,
        work=place.work(""),
        device=device,
        progress=progress,
    )
    residual = [place.staged / RESIDUAL] if place.variant.adapter.residual else []
    _mark(marker, key, files=[evidence, place.staged / CONFIG, place.staged / ADAPTER, *residual])
    return extraction, False


def _extraction_key(variant: Variant, pins: Sequence[tuple[str, str, str]]) -> str:
    from publisher.stages.extract import CODE

    return digest_of([pins, variant.model_dump(exclude={"source", "base", "verification", "fp8"}), code_digest(CODE)])


def _validation(
    place: _Place, pair: _Pair, *, extraction: Extraction, progress: Progress
) -> tuple[Validation | None, bool]:
    """What validation saw, and whether it is an earlier one that still holds."""
    result, marker = place.work("validation.json"), place.work("validate.json")
    if not place.options.includes("validate"):
        return None, False
    if place.options.first != "validate" and not _validation_lapse(place):
        return Validation.read(result), True
    from publisher.devices import chosen_device
    from publisher.stages.validate import validate

    validation = validate(
        place.variant,
        extraction,
        source=pair.source,
        base=pair.base,
        staged=place.staged,
        device=chosen_device(place.options.device),
        progress=progress,
    )
    validation.write(result)
    _mark(marker, validation_key(place.staged), files=[result])
    return validation, False


def validation_key(staged: Path) -> str:
    """Digest of what a validation rests on: the adapter's files, which name the checkpoints, and the judges.

    A file that is missing has no digest; to say so is the validation's business.
    """
    files = _digests(staged, EXTRACTION, CONFIG, ADAPTER, RESIDUAL)
    return digest_of([files, code_digest(_VALIDATION_CODE)])


def _digests(folder: Path, *names: str) -> list[str]:
    return [sha256_of(file) if file.is_file() else "" for file in map(folder.joinpath, names)]


def _validation_lapse(place: _Place) -> str:
    marker = place.work("validate.json")
    return _lapse(marker, validation_key(place.staged), folder=marker.parent)


def _verification(
    place: _Place, pair: _Pair, *, extraction: Extraction, progress: Progress
) -> tuple[Verification | None, bool]:
    """What the two models' answers come to, and whether that is an earlier result that still holds."""
    variant, options = place.variant, place.options
    if variant.verification is None or not options.includes("verify"):
        return None, False
    requests = _requests(place, progress)
    marker, key = place.work("verify.json"), _verification_key(place, requests, progress=progress)
    if options.first != "verify" and not _lapse(marker, key, folder=place.staged):
        return Verification.read(place.staged / VERIFICATION), True
    from publisher.devices import chosen_device
    from publisher.stages.fetch import fetch, fetch_companions
    from publisher.stages.verify import Inputs, verify

    if options.stream:
        raise VerificationError(
            "the weights are streamed, and verification runs the models",
            next_step="run without --stream, or stop with --until validate",
        )
    fetch_companions(variant.source, pair.source, progress)
    memo = options.work / "digests.json"
    fp8 = fetch(variant.fp8, memo=memo, progress=progress) if variant.fp8 else None
    found = verify(
        variant,
        extraction,
        inputs=Inputs(pair.source, pair.base, files=requests, fp8=fp8),
        staged=place.staged,
        work=place.work(""),
        device=chosen_device(options.device),
        progress=progress,
    )
    _mark(marker, key, files=[place.staged / VERIFICATION])
    return found, False


def _requests(place: _Place, progress: Progress) -> list[RequestFile]:
    """The request files of the manifest's sets, read and checked."""
    settings = place.variant.verification
    beside = place.options.manifest_file.parent
    files = []
    for one in settings.sets if settings else ():
        path = beside / one.file
        if (dataset := one.dataset) is not None:
            from publisher import hub

            progress(f"fetching {one.file} of {dataset.repo}@{dataset.revision[:8]}")
            path = hub.download_from_dataset(dataset.repo, dataset.revision, filename=one.file)
        runner = settings.runner if settings else "logits"
        files.append(read_requests(path, name=one.file, runner=runner, limit=one.limit))
    return files


def _verification_key(place: _Place, requests: Sequence[RequestFile], *, progress: Progress) -> str:
    """Digest of what a verification rests on: the adapter's files, requests, settings, code."""
    from publisher.stages.verify import CODE

    variant, staged = place.variant, place.staged
    files = _digests(staged, EXTRACTION, CONFIG, ADAPTER)
    settings = variant.model_dump(include={"verification", "fp8", "model_class", "source", "base"})
    local = _local_content(variant.source) if variant.source.path else []
    fp8 = _local_revision(variant.fp8, place.options, progress) if variant.fp8 and variant.fp8.path else ""
    return digest_of([files, settings, local, fp8, [file.content for file in requests], code_digest(CODE)])


def _local_content(reference: Reference) -> list[tuple[str, str]]:
    """The small files of a local folder by digest, which no commit fixes: code, head, tokenizer, configuration."""
    folder = Path(reference.path or "")
    shards = "model*.safetensors"
    return [(f.name, sha256_of(f)) for f in sorted(folder.glob("*")) if f.is_file() and not f.match(shards)]


def _local_revision(reference: Reference, options: Run, progress: Progress) -> str:
    from publisher.stages.fetch import fetch

    return fetch(reference, memo=options.work / "digests.json", progress=progress).checkpoint.revision


def _verification_lapse(place: _Place, progress: Progress) -> str:
    key = _verification_key(place, _requests(place, progress), progress=progress)
    return _lapse(place.work("verify.json"), key, folder=place.staged)


def _lapse(marker: Path, key: str, *, folder: Path) -> str:
    """Why a stage's result does not hold any more; empty where it does."""
    try:
        found = Marker.read(marker)
    except FetchError as error:
        return error.found
    changed = [file.name for file in found.files if not _is_as_left(folder / file.name, file.sha256)]
    if changed:
        return f"{', '.join(changed)} changed since {marker} was written"
    return "" if found.key == key else f"{marker} was written for other files, settings or code"


def _is_as_left(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest


def _mark(marker: Path, key: str, *, files: Sequence[Path]) -> None:
    Marker(key=key, files=tuple(map(FileDigest.of, files))).write(marker)


# --- the whole repository: card, push -----------------------------------------------------------------------


def rendered_card(manifest: Manifest, options: Run) -> str:
    """README.md from the JSON artefacts alone."""
    return render_card(manifest, load_evidence(manifest, options.staged), beside=options.manifest_file.parent)


def _card(manifest: Manifest, options: Run, progress: Progress) -> bool:
    """Write README.md and the manifest's copy; whether the card changed."""
    progress("rendering the card")
    text, readme = rendered_card(manifest, options), options.staged / CARD
    changed = not readme.is_file() or readme.read_bytes() != text.encode()
    write_text(readme, text)
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
    from publisher.stages.readback import Published, read_back

    progress(f"pushing to {target.destination.label}")
    outcome = push(manifest, options.staged, target=target)
    files = staged_files(manifest, options.staged)
    published = Published(manifest.repo, outcome.commit, files=files, at=target.destination)
    return outcome.model_copy(
        update={"read_back": read_back(manifest, options.staged, published=published, progress=progress)}
    )


def _require_publishable(manifest: Manifest, options: Run, progress: Progress) -> None:
    """The staged tree is of this manifest, and passed validation."""
    _require_fresh(manifest, options)
    for variant in manifest.variants:
        _require_validated(_Place(variant, options), progress)
        _require_verified(_Place(variant, options), progress)


def _require_fresh(manifest: Manifest, options: Run) -> None:
    """The card and the manifest's copy are those of this manifest and these artefacts."""
    wanted = {
        CARD: rendered_card(manifest, options),
        MANIFEST: options.manifest_file.read_text(encoding="utf-8"),
    }
    for name, text in wanted.items():
        if (options.staged / name).read_bytes() != text.encode():
            raise PushError(
                f"{options.staged / name} is stale", next_step=f"publish card --manifest {options.manifest_file}"
            )


def _require_validated(place: _Place, progress: Progress) -> None:
    """Nothing is published that did not pass validation in this run, or earlier with the same files and judges.

    Where it was judged with other packages, those installed here look at it too, as far as no weights are needed.
    """
    if lapse := _validation_lapse(place):
        raise PushError(
            f"{place.staged} has not passed validation as it is now: {lapse}",
            expected="a validation of these very files",
            next_step=f"publish --manifest {place.options.manifest_file}",
        )
    from publisher.stages import readback, validate

    if Validation.read(place.work("validation.json")).packages == validate.packages():
        return
    progress(f"loading {place.staged} with the packages installed here")
    extraction = Extraction.read(place.staged / EXTRACTION)
    base = Snapshot(checkpoint=extraction.base, folder=readback.base_config(place.variant))
    validate.require_structure(place.variant, extraction, base=base, staged=place.staged)


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
    from publisher.localhub import LocalHub

    with LocalHub(options.work / "hub") as local:
        destination = Destination(local.endpoint, local.token, rehearsal=True)
        yield Target(destination, tag=options.tag, pull_request=options.pull_request)
