"""The commit that would publish the staged tree: what it adds, changes, leaves and deletes. Nothing here writes.

The staged tree must be the release, whole and nothing else. Files that an earlier release put into the repository
and this one no longer has are deleted; files the publisher does not own are left alone.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from publisher.errors import HubError, MissingRepositoryError, PushError
from publisher.hub import client as hub
from publisher.hub.client import Destination, RemoteFile
from publisher.manifest.schema import Manifest
from publisher.records import filenames
from publisher.records.checkpoint import FileDigest
from publisher.records.publication import Change, CommitPlan, Operation

BRANCH = "main"
NEW_REPOSITORY = "a new repository"


def plan_push(manifest: Manifest, staged: Path, *, at: Destination = hub.THE_HUB) -> CommitPlan:
    """Return the commit that would publish the staged tree, compared with the repository's head.

    Args:
        manifest: the release's; it names the repository.
        staged: the staged tree.
        at: the Hub that is asked.

    Returns:
        What the commit adds, changes, leaves and deletes.

    Raises:
        PushError: the staged tree lacks a file, or holds one that is no part of a release.
        HubError: the Hub cannot be reached, or refuses.
    """
    files = staged_files(manifest, staged)
    head = head_of(manifest.repo, at)
    if head is None:
        return unreached_plan(manifest, staged, compared_with=NEW_REPOSITORY)
    operations = compare_with_head(files, hub.list_files(manifest.repo, head, at=at), staged=staged)
    return CommitPlan(repo=manifest.repo, parent=head, compared_with=f"{BRANCH} at {head[:8]}", operations=operations)


def dry_plan(manifest: Manifest, staged: Path) -> CommitPlan:
    """Return what `plan_push` does, or, where there is no head to compare with, a plan that says why."""
    if manifest.is_local:
        return unreached_plan(manifest, staged, compared_with="nothing: local checkpoints are only rehearsed")
    try:
        return plan_push(manifest, staged)
    except HubError as error:
        return unreached_plan(manifest, staged, compared_with=f"nothing: {error.found}")


def unreached_plan(manifest: Manifest, staged: Path, *, compared_with: str) -> CommitPlan:
    """Return the plan of a commit that is compared with no head.

    Args:
        manifest: the release's.
        staged: the staged tree.
        compared_with: why there is no head, in words; `NEW_REPOSITORY` where the commit would be the first one.

    Returns:
        Every file of the release, as added to a new repository, else as not compared.

    Raises:
        PushError: the staged tree lacks a file, or holds one that is no part of a release.
    """
    change: Change = "added" if compared_with == NEW_REPOSITORY else "not compared"
    operations = tuple(
        Operation(path=file.name, size=file.size, sha256=file.sha256, change=change)
        for file in staged_files(manifest, staged)
    )
    return CommitPlan(repo=manifest.repo, parent=None, compared_with=compared_with, operations=operations)


def staged_files(manifest: Manifest, staged: Path) -> tuple[FileDigest, ...]:
    """Return every file of the release with its digest, sorted by path.

    Raises:
        PushError: the staged tree lacks a file, or holds one that is no part of a release.
    """
    folders = [variant.folder for variant in manifest.variants]
    required = {_join(folder, name) for folder in folders for name in filenames.PER_VARIANT}
    required |= set(filenames.PER_REPOSITORY)
    optional = {_join(folder, name) for folder in folders for name in filenames.OPTIONAL_PER_VARIANT}
    optional |= set(filenames.OPTIONAL_PER_REPOSITORY)
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
    return tuple(FileDigest.of(staged / name, name=name) for name in sorted(found))


def compare_with_head(
    files: Sequence[FileDigest], remote: Sequence[RemoteFile], *, staged: Path
) -> tuple[Operation, ...]:
    """Return what the commit does to each staged file, and to each file that an earlier release left behind.

    Args:
        files: the staged ones.
        remote: what the repository holds at its head.
        staged: the staged tree.

    Returns:
        One operation for each file.
    """
    there = {file.path: file for file in remote}
    operations = [
        Operation(path=file.name, size=file.size, sha256=file.sha256, change=_change(file, there, staged=staged))
        for file in files
    ]
    kept = {file.name for file in files}
    gone = sorted(path for path in there if path not in kept and _is_owned(path, there.keys()))
    operations += [Operation(path=path, size=None, sha256=None, change="deleted") for path in gone]
    return tuple(operations)


def holds_bytes(remote: RemoteFile | None, sha256: str | None, *, local: Path) -> bool:
    """Return whether a file of the Hub has just these bytes.

    Args:
        remote: the Hub's file; None where there is none of that name.
        sha256: of the local file; large files are compared by it.
        local: the local file; others are compared by git's blob id.

    Returns:
        Whether the two are the same.
    """
    if remote is None:
        return False
    return remote.sha256 == sha256 if remote.sha256 else remote.blob == _git_blob(local)


def _change(file: FileDigest, there: Mapping[str, RemoteFile], *, staged: Path) -> Change:
    if file.name not in there:
        return "added"
    return "same" if holds_bytes(there[file.name], file.sha256, local=staged / file.name) else "changed"


def _is_owned(path: str, there: Collection[str]) -> bool:
    """Return whether an earlier release put it there: it has an artefact's name, and its folder an extraction.json.

    A signature is of the manifest beside it, whichever folders the adapters are in.
    """
    if path in filenames.OPTIONAL_PER_REPOSITORY:
        return filenames.MANIFEST in there
    place = filenames.placed(path)
    return place is not None and (place[0] / filenames.EXTRACTION).as_posix() in there


def _git_blob(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def head_of(repo: str, at: Destination) -> str | None:
    """Return the commit that the branch is at; None where there is no such repository."""
    try:
        return hub.resolve_revision(repo, BRANCH, at=at)
    except MissingRepositoryError:
        return None
