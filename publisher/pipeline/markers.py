"""Markers of finished stages: what each result rests on, and the digests of the files that the stage left.

A result is reused only while both hold. A marker that is damaged, or was written by other code or for other inputs, is
as good as none.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from publisher.errors import FetchError
from publisher.pipeline.table import SiteT, Stage
from publisher.records.checkpoint import FileDigest
from publisher.records.files import digest_of, sha256_of
from publisher.records.marker import Marker
from publisher.records.provenance import code_digest
from publisher.records.sealed import read_sealed, write_sealed

if TYPE_CHECKING:
    from publisher.pipeline.sites import Site

# --- of a stage ---------------------------------------------------------------------------------------------


def key_of(stage: Stage[SiteT], site: SiteT) -> str:
    """Return the digest of all that the stage's result rests on, its code included.

    Raises:
        ValueError: the stage keeps no result.
    """
    if stage.rests_on is None:
        raise ValueError(f"{stage.name} keeps no result")
    return digest_of([stage.rests_on(site), code_digest(stage.module)])


def lapse(stage: Stage[SiteT], site: SiteT) -> str:
    """Return why the stage's earlier result does not hold any more; empty where it does."""
    if stage.rests_on is None:
        return "it keeps no result"
    return lapse_of(site.kept(stage.marker), key_of(stage, site), folder=site.folder_of(stage.name))


def mark_finished(stage: Stage[SiteT], site: SiteT, key: str) -> None:
    """Write the marker of a stage that has just run; of the files that it may leave, those that are there count.

    Args:
        stage: the stage.
        site: what it ran on.
        key: digest of all that its result rests on, as it was before it ran.
    """
    folder = site.folder_of(stage.name)
    files = [folder / name for name in stage.writes if (folder / name).is_file()]
    mark(site.kept(stage.marker), key, folder=folder, files=files)


def require_as_left(stage: Stage[SiteT], site: "Site") -> None:
    """Raise unless the files of an earlier stage are there, as it left them; with which settings is not asked.

    Raises:
        FetchError: a file is missing or was changed, or the stage was never finished.
    """
    folder, again = site.folder_of(stage.name), f"publish --manifest {site.options.manifest_file} --from {stage.name}"
    if not (folder / stage.writes[0]).is_file():
        raise FetchError(f"{folder / stage.writes[0]} does not exist", next_step=again)
    if why := unproven(site.kept(stage.marker), folder=folder):
        raise FetchError(
            f"{folder} is not known to be as the stage {stage.name} left it: {why}",
            expected="the files of a stage that was finished",
            next_step=again,
        )


# --- the file -----------------------------------------------------------------------------------------------


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
    """Return why a stage's result does not hold any more; empty where it does.

    Args:
        marker: the stage's marker.
        key: digest of all that the stage would rest on now.
        folder: where its files are.

    Returns:
        A clause, such as "adapter_config.json changed since extract.json was written".
    """
    if why := unproven(marker, folder=folder):
        return why
    found = marked(marker)
    holds = found is not None and found.key == key
    return "" if holds else f"{marker} was written for other files, settings or code"


def unproven(marker: Path, *, folder: Path) -> str:
    """Return why the files of a stage may be other than it left them; empty where they are not."""
    found = marked(marker)
    if found is None:
        return f"{marker} is damaged" if marker.exists() else f"{marker} does not exist"
    changed = [file.name for file in found.files if not _is_as_left(folder / file.name, file.sha256)]
    return f"{', '.join(changed)} changed since {marker} was written" if changed else ""


def _is_as_left(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest
