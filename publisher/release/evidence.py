"""The evidence of a release: what its JSON artefacts say, read and held against the manifest.

It comes from the staged tree of a manifest, and must then be of that manifest: its paths, checkpoints and settings, and
a verification of this very adapter. Or it comes from any folder that holds an extraction.json, such as a downloaded
repository. Whatever does not fit is refused, with the command that makes it anew. Nothing is rendered here: that is
done by `card`, `report` and `explain`. No network, no torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from publisher.border.files import regular_files
from publisher.errors import CardError, FetchError, ManifestError
from publisher.manifest.reading import load_manifest, read_manifest
from publisher.manifest.schema import Bounds, Manifest, Reference, Variant, VerificationSettings
from publisher.records.checkpoint import Checkpoint
from publisher.records.extraction import Extraction
from publisher.records.filenames import EXTRACTION, LOADERS, MANIFEST, VERIFICATION
from publisher.records.loaders import Loaders, LoaderVerdict
from publisher.records.verification import Limits, Verification, VerificationSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the JSON artefacts of one adapter say.

    Attributes:
        extraction: its extraction.json.
        verification: its verification.json; None where none was run.
        loaders: the verdicts of its loaders.json; none where no loaders were tried.
    """

    extraction: Extraction
    verification: Verification | None
    loaders: tuple[LoaderVerdict, ...] = ()

    @property
    def sets(self) -> tuple[VerificationSet, ...]:
        """The test sets of the verification."""
        return self.verification.sets if self.verification else ()

    @property
    def fp8_sets(self) -> tuple[VerificationSet, ...]:
        """The test sets that were tried on the FP8 base."""
        return self.verification.fp8.sets if self.verification and self.verification.fp8 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantEvidence(Evidence):
    """The same of a variant of the manifest: what the card may say about it."""

    variant: Variant


@dataclass(frozen=True, slots=True)
class ReleaseEvidence:
    """A release as `report` and `explain` show it.

    Attributes:
        title: the card's title; the folder's name where there is no manifest.
        summary: a sentence about it; empty where there is no manifest.
        repo: the repository that it is for; empty where there is no manifest.
        adapters: the evidence of each adapter.
    """

    title: str
    summary: str
    repo: str
    adapters: tuple[Evidence, ...]


# --- of a whole release -------------------------------------------------------------------------------------


def read_release(manifest: Path | None, folder: Path | None, *, staged: Path | None) -> ReleaseEvidence:
    """Read the evidence of a release, from a manifest's staged tree or from a folder.

    Args:
        manifest: the manifest's file, or None.
        folder: a folder that holds an extraction.json, or None. One of the two must be given, and not both.
        staged: the manifest's staged tree, where a manifest is given.

    Returns:
        What its artefacts say.

    Raises:
        ManifestError: neither is given, or both are; the manifest has problems.
        CardError: evidence is missing, or not the manifest's.
        FetchError: the folder holds no extraction.json, or a file is damaged.
    """
    if manifest is not None and folder is None and staged is not None:
        known = load_manifest(manifest)
        return ReleaseEvidence(known.card.title, known.card.summary, known.repo, load_evidence(known, staged))
    if folder is not None and manifest is None:
        return _of_folder(folder)
    raise ManifestError(
        "both --manifest and --folder are given" if manifest else "neither --manifest nor --folder is given",
        expected="a manifest that was run, or a folder with an extraction.json",
    )


def _of_folder(folder: Path) -> ReleaseEvidence:
    present = frozenset(regular_files(folder))
    files = sorted((file for file in present if file.name == EXTRACTION), key=lambda file: (len(file.parts), file))
    if not files:
        raise FetchError(
            f"{folder} holds no {EXTRACTION}",
            expected="the staged tree of a run, or a downloaded release",
            next_step="name another folder, or a manifest that was run",
        )
    adapters = tuple(_of_adapter(file, present) for file in files)
    known = read_manifest(folder / MANIFEST, templates=False)[0] if folder / MANIFEST in present else None
    if known is None:
        return ReleaseEvidence(folder.resolve().name, "", "", adapters)
    return ReleaseEvidence(known.card.title, known.card.summary, known.repo, adapters)


def _of_adapter(file: Path, present: frozenset[Path]) -> Evidence:
    """Return the evidence beside an extraction.json; an artefact that is a link is not opened."""
    extraction = Extraction.read(file)
    verification, loaders = file.with_name(VERIFICATION), file.with_name(LOADERS)
    return Evidence(
        extraction=extraction,
        verification=load_verification(None, extraction, file=verification) if verification in present else None,
        loaders=load_loaders(extraction, loaders) if loaders in present else extraction.loaders,
    )


def load_evidence(manifest: Manifest, staged: Path) -> tuple[VariantEvidence, ...]:
    """Return the evidence of every variant, in the manifest's order, from the staged tree.

    Raises:
        CardError: an extraction.json is missing, or an artefact is not of this manifest or of this adapter.
        FetchError: an artefact is damaged or of another schema.
    """
    found = []
    for variant in manifest.variants:
        folder = staged / variant.folder
        extraction = load_extraction(variant, folder / EXTRACTION)
        verification = load_verification(variant, extraction, file=folder / VERIFICATION)
        loaders = load_loaders(extraction, folder / LOADERS)
        found.append(
            VariantEvidence(variant=variant, extraction=extraction, verification=verification, loaders=loaders)
        )
    return tuple(found)


# --- one artefact, held against the manifest ----------------------------------------------------------------


def load_extraction(variant: Variant, file: Path) -> Extraction:
    """Return the variant's extraction.json.

    Raises:
        CardError: it is missing, or of another path, checkpoint or setting than the manifest's.
        FetchError: it is damaged or of another schema.
    """
    if not file.is_file():
        raise CardError(f"{file} does not exist", next_step="publish extract --manifest MANIFEST")
    extraction = Extraction.read(file)
    require_recipe(extraction, variant, file=file)
    return extraction


def require_recipe(extraction: Extraction, variant: Variant, *, file: Path) -> None:
    """Raise an error if an extraction was not made as the manifest says.

    Args:
        extraction: what was read.
        variant: the manifest's entry.
        file: where it was read from, for the message.

    Raises:
        CardError: it is of another path, checkpoint or setting than the manifest's.
    """
    _require_agreement(file, _extraction_fields(extraction, variant), command="extract")


def load_verification(variant: Variant | None, extraction: Extraction, *, file: Path) -> Verification | None:
    """Return the variant's verification.json, if there is one.

    Args:
        variant: what the manifest asks for; without it the file is held against extraction.json alone.
        extraction: the extraction.json that it must be of.
        file: where verification.json would be.

    Returns:
        The record; None where there is no such file.

    Raises:
        CardError: it is of another path or adapter than extraction.json, or not as the manifest asks for.
        FetchError: it is damaged or of another schema.
    """
    if not file.is_file():
        return None
    verification = Verification.read(file)
    if variant is not None and variant.verification is None:
        raise CardError(
            f"{file} is there, and the manifest asks for no verification",
            next_step="delete it, or write the section verification into the manifest",
        )
    _require_agreement(file, _adapter_fields(verification, extraction), command="verify")
    if variant is not None and variant.verification is not None:
        _require_agreement(file, _verification_fields(verification, variant.verification), command="verify")
        _require_agreement(file, _fp8_fields(verification, variant), command="verify")
    return verification


def load_loaders(extraction: Extraction, file: Path) -> tuple[LoaderVerdict, ...]:
    """Return the verdicts of loaders.json; where there is none, those that an earlier version put in extraction.json.

    Raises:
        CardError: it is of another path or adapter than extraction.json.
        FetchError: it is damaged or of another schema.
    """
    if not file.is_file():
        return extraction.loaders
    found = Loaders.read(file)
    _require_agreement(file, _loaders_fields(found, extraction), command="validate")
    return found.verdicts


@dataclass(frozen=True, slots=True)
class _Field:
    """A field that an artefact and the manifest both have."""

    name: str
    found: object
    expected: object


def _require_agreement(file: Path, fields: Iterable[_Field], *, command: str) -> None:
    """Raise an error for the first field that differs; those after it may rest on it, and are not asked for."""
    for field in fields:
        if field.found != field.expected:
            raise CardError(
                f"{file}: {field.name} is {field.found}",
                expected=f"{field.expected}",
                next_step=f"publish {command} --manifest MANIFEST, then publish card --manifest MANIFEST",
            )


def _extraction_fields(extraction: Extraction, variant: Variant) -> Iterator[_Field]:
    yield _Field("path", extraction.path, variant.path)
    yield _Field("source", _identity(extraction.source), _pin(variant.source))
    yield _Field("base", _identity(extraction.base), _pin(variant.base))
    yield _Field("settings.model_class", extraction.settings.model_class, variant.model_class)
    settings = extraction.settings.model_dump()
    for name, value in variant.adapter.model_dump().items():
        yield _Field(f"settings.{name}", settings[name], value)


def _adapter_fields(verification: Verification, extraction: Extraction) -> Iterator[_Field]:
    yield _Field("path", verification.path, extraction.path)
    yield _Field("adapter_sha256", verification.adapter_sha256, extraction.summary.adapter.sha256)


def _loaders_fields(found: Loaders, extraction: Extraction) -> Iterator[_Field]:
    yield _Field("path", found.path, extraction.path)
    yield _Field("adapter_sha256", found.adapter_sha256, extraction.summary.adapter.sha256)
    yield _Field("config_sha256", found.config_sha256, extraction.summary.config.sha256)


def _verification_fields(verification: Verification, asked: VerificationSettings) -> Iterator[_Field]:
    yield _Field("runner", verification.runner, asked.runner)
    yield _Field("dtype", verification.dtype, asked.dtype)
    yield _Field("sets", [one.name for one in verification.sets], [one.name for one in asked.sets])
    for tested, wanted in zip(verification.sets, asked.sets, strict=True):
        yield _Field(f"sets.{wanted.name}.file", tested.file.name if tested.file else None, wanted.file)
        yield from _limit_fields(f"sets.{wanted.name}", tested.limits, wanted)


def _fp8_fields(verification: Verification, variant: Variant) -> Iterator[_Field]:
    tested, asked = verification.fp8, variant.fp8
    yield _Field("fp8", _identity(tested.base) if tested else None, _pin(asked) if asked else None)
    if tested is not None and asked is not None:
        yield _Field("fp8.against", tested.against, asked.against)
        yield _Field("fp8.sets", [one.name for one in tested.sets], [one.name for one in verification.sets])
        for one in tested.sets:
            yield from _limit_fields(f"fp8.{one.name}", one.limits, asked)


def _limit_fields(place: str, limits: Limits, bounds: Bounds) -> Iterator[_Field]:
    yield _Field(f"{place}.max_answers_changed", limits.max_answers_changed, bounds.max_answers_changed)
    yield _Field(f"{place}.max_kl", limits.max_kl, bounds.max_kl)


def _pin(reference: Reference) -> str:
    return f"{reference.repo}@{reference.revision}" if reference.repo else "a local folder"


def _identity(checkpoint: Checkpoint) -> str:
    # A local folder's revision is the digest of its files, which the manifest does not know.
    return f"{checkpoint.name}@{checkpoint.revision}" if checkpoint.kind == "hub" else "a local folder"
