"""Push: the staged tree becomes one commit. This module plans it; nothing here writes to the Hub.

The staged tree must be the release, whole and nothing else. Files that an earlier release put into the repository
and this one no longer has are deleted by the same commit; files the publisher does not own are left alone.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from publisher import artefacts, hub
from publisher.errors import HubError, MissingRepositoryError, PushError
from publisher.files import git_blob_of, sha256_of
from publisher.hub import RemoteFile
from publisher.manifest import Manifest
from publisher.records import Change, CommitPlan, FileDigest, Operation

BRANCH = "main"


def plan_push(manifest: Manifest, staged: Path) -> CommitPlan:
    """The commit that would publish `staged`, compared with the repository's head where one can be reached.

    Raises:
        PushError: the staged tree lacks a file, or holds one that is no part of a release.
    """
    files = staged_files(manifest, staged)
    if manifest.is_local:
        return _plan(manifest, files, compared_with="nothing: local checkpoints cannot be published on the Hub")
    try:
        parent = hub.resolve_revision(manifest.repo, BRANCH)
        remote = hub.list_files(manifest.repo, parent)
    except MissingRepositoryError:
        return _plan(manifest, files, compared_with="a new repository")
    except HubError as error:
        return _plan(manifest, files, compared_with=f"nothing: {error.found}")
    operations = compare_with_head(files, remote, staged=staged)
    return CommitPlan(
        repo=manifest.repo, parent=parent, compared_with=f"{BRANCH} at {parent[:8]}", operations=operations
    )


def staged_files(manifest: Manifest, staged: Path) -> tuple[FileDigest, ...]:
    """Every file of the release with its digest, sorted by path.

    Raises:
        PushError: naming what is missing or does not belong.
    """
    folders = [variant.folder for variant in manifest.variants]
    required = {_join(folder, name) for folder in folders for name in artefacts.PER_VARIANT}
    required |= set(artefacts.PER_REPOSITORY)
    optional = {_join(folder, name) for folder in folders for name in artefacts.OPTIONAL_PER_VARIANT}
    found = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    lost, foreign = sorted(required - found), sorted(found - required - optional)
    if lost:
        raise PushError(
            f"{staged} lacks {', '.join(lost)}",
            expected="a finished run",
            next_step="publish --manifest MANIFEST --dry-run",
        )
    if foreign:
        raise PushError(
            f"{staged} holds {', '.join(foreign)}, which is no part of this release",
            expected="only what the stages wrote",
            next_step="move it elsewhere, and run again",
        )
    return tuple(
        FileDigest(name=name, size=(staged / name).stat().st_size, sha256=sha256_of(staged / name))
        for name in sorted(found)
    )


def compare_with_head(
    files: Sequence[FileDigest], remote: Sequence[RemoteFile], *, staged: Path
) -> tuple[Operation, ...]:
    """What the commit does to each staged file, and to each file an earlier release left behind."""
    there = {file.path: file for file in remote}
    operations = [
        Operation(path=file.name, size=file.size, sha256=file.sha256, change=_change(file, there, staged=staged))
        for file in files
    ]
    kept = {file.name for file in files}
    gone = sorted(path for path in there if path not in kept and _is_owned(path, there.keys()))
    operations += [Operation(path=path, size=None, sha256=None, change="deleted") for path in gone]
    return tuple(operations)


def _change(file: FileDigest, there: Mapping[str, RemoteFile], *, staged: Path) -> Change:
    remote = there.get(file.name)
    if remote is None:
        return "added"
    same = remote.sha256 == file.sha256 if remote.sha256 else remote.blob == git_blob_of(staged / file.name)
    return "same" if same else "changed"


def _is_owned(path: str, there: Collection[str]) -> bool:
    """An artefact's name in a folder that holds an extraction.json: an earlier release put it there."""
    place = PurePosixPath(path)
    return place.name in artefacts.ALL and (place.parent / artefacts.EXTRACTION).as_posix() in there


def _plan(manifest: Manifest, files: Sequence[FileDigest], *, compared_with: str) -> CommitPlan:
    change: Change = "added" if compared_with == "a new repository" else "not compared"
    operations = tuple(Operation(path=file.name, size=file.size, sha256=file.sha256, change=change) for file in files)
    return CommitPlan(repo=manifest.repo, parent=None, compared_with=compared_with, operations=operations)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
