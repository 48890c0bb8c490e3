"""Markers of finished stages: what each rests on, and the digests of the files that it left.

A stage's result is taken again only while both hold. A marker that is damaged, or was written by other code, is as
good as none.
"""

from collections.abc import Sequence
from pathlib import Path

from publisher.records.checkpoint import FileDigest
from publisher.records.files import sha256_of
from publisher.records.marker import Marker
from publisher.records.sealed import read_sealed, write_sealed


def mark(marker: Path, key: str, *, folder: Path, files: Sequence[Path]) -> None:
    """Write the marker of a stage that is done.

    Args:
        marker: its file.
        key: digest of all that the stage rests on.
        folder: where the files are looked for later.
        files: what it left there.
    """
    digests = (FileDigest.of(file, name=file.relative_to(folder).as_posix()) for file in files)
    write_sealed(marker, Marker(key=key, files=tuple(digests)))


def marked(marker: Path) -> Marker | None:
    """Return what this file says; None where it is missing or damaged."""
    return read_sealed(marker, Marker)


def lapse_of(marker: Path, key: str, *, folder: Path) -> str:
    """Why a stage's result does not hold any more; empty where it does."""
    if lapse := unproven(marker, folder=folder):
        return lapse
    found = marked(marker)
    holds = found is not None and found.key == key
    return "" if holds else f"{marker} was written for other files, settings or code"


def unproven(marker: Path, *, folder: Path) -> str:
    """Why the files of a stage may be other than it left them; empty where they are not."""
    found = marked(marker)
    if found is None:
        return f"{marker} is damaged" if marker.exists() else f"{marker} does not exist"
    changed = changed_since(found, folder)
    return f"{', '.join(changed)} changed since {marker} was written" if changed else ""


def changed_since(marker: Marker, folder: Path) -> list[str]:
    """The files of a stage that are not as it left them."""
    return [file.name for file in marker.files if not _is_as_left(folder / file.name, file.sha256)]


def _is_as_left(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest
