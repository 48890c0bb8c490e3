"""All evidence of one release on this machine, for commands that only read it.

It comes from the staged tree of a manifest, whose evidence must be the manifest's, or from any folder that holds an
extraction.json: a downloaded repository, say. A folder without one is refused.
"""

from dataclasses import dataclass
from pathlib import Path

from publisher.border.files import regular_files
from publisher.errors import FetchError, ManifestError
from publisher.manifest.reading import load_manifest, read_manifest
from publisher.manifest.schema import Manifest
from publisher.records.extraction import Extraction
from publisher.records.filenames import EXTRACTION, LOADERS, MANIFEST, VERIFICATION
from publisher.records.loaders import LoaderVerdict
from publisher.records.verification import Verification
from publisher.release.card import load_evidence, load_loaders, load_verification


@dataclass(frozen=True, slots=True)
class Part:
    """One variant: what its JSON artefacts say."""

    extraction: Extraction
    verification: Verification | None
    loaders: tuple[LoaderVerdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Dossier:
    """A release: its title, a sentence about it, where it is published, if that is known, and its variants."""

    title: str
    summary: str
    repo: str
    parts: tuple[Part, ...]


def dossier(manifest: Path | None, folder: Path | None, *, staged: Path | None) -> Dossier:
    """From one of the two; `staged` is the manifest's staged tree.

    Raises:
        ManifestError: neither is named, or both are; the manifest has problems.
        CardError: evidence is missing, or not the manifest's.
        FetchError: the folder holds no extraction.json, or a file is damaged.
    """
    if manifest is not None and folder is None and staged is not None:
        return _of_manifest(load_manifest(manifest), staged)
    if folder is not None and manifest is None:
        return _of_folder(folder)
    raise ManifestError(
        "both --manifest and --folder are given" if manifest else "neither --manifest nor --folder is given",
        expected="a manifest that was run, or a folder with an extraction.json",
    )


def _of_manifest(manifest: Manifest, staged: Path) -> Dossier:
    parts = tuple(Part(item.extraction, item.verification, item.loaders) for item in load_evidence(manifest, staged))
    return Dossier(manifest.card.title, manifest.card.summary, manifest.repo, parts)


def _of_folder(folder: Path) -> Dossier:
    there = frozenset(regular_files(folder))
    files = sorted((file for file in there if file.name == EXTRACTION), key=lambda file: (len(file.parts), file))
    if not files:
        raise FetchError(
            f"{folder} holds no {EXTRACTION}",
            expected="the staged tree of a run, or a downloaded release",
            next_step="name another folder, or a manifest that was run",
        )
    parts = tuple(_part(file, there) for file in files)
    known = read_manifest(folder / MANIFEST, templates=False)[0] if folder / MANIFEST in there else None
    if known is None:
        return Dossier(folder.resolve().name, "", "", parts)
    return Dossier(known.card.title, known.card.summary, known.repo, parts)


def _part(file: Path, there: frozenset[Path]) -> Part:
    extraction, verification, loaders = Extraction.read(file), file.with_name(VERIFICATION), file.with_name(LOADERS)
    return Part(
        extraction,
        load_verification(None, extraction, file=verification) if verification in there else None,
        load_loaders(extraction, loaders) if loaders in there else extraction.loaders,
    )
