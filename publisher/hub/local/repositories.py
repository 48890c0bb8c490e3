"""The repositories of a local Hub: bare git folders, read and written through libgit2.

A repository is read at a commit. It is written by compare-and-swap: a commit names the tip it builds on, and is
refused (412) if the branch has moved. A commit appears whole or not at all.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

import pygit2
from pygit2.enums import FileMode, ObjectType, SortMode

from publisher.border.limits import LIMITS
from publisher.border.paths import repository_path
from publisher.hub.local.refusals import (
    bad_path,
    bad_request,
    entry_not_found,
    exists_already,
    forbidden,
    repository_not_found,
    revision_not_found,
    stale_parent,
)

MAIN = "main"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_ABBREVIATED = re.compile(r"[0-9a-f]{7,40}")
_LFS_SUFFIXES = ("bin", "ckpt", "gguf", "gz", "h5", "npy", "npz", "onnx", "parquet", "pt", "pth", "safetensors", "zip")
_GITATTRIBUTES = "".join(f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in _LFS_SUFFIXES)
_WRITABLE = ("refs/heads/", "refs/pr/")
_AUTHOR = ("local Hub", "local-hub@localhost.invalid")


@dataclass(frozen=True, slots=True)
class Put:
    """Write a file: its content, or its LFS pointer."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a file, or a folder with all that is in it."""

    path: str


Change = Put | Delete


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a history."""

    id: str
    title: str
    message: str
    date: datetime


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a folder of a commit; `size` is what git holds, which for LFS is the size of the pointer."""

    path: str
    oid: str
    size: int
    folder: bool


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch, tag or pull request, and the commit it leads to."""

    ref: str
    commit: str


class Repository:
    """One bare repository. Errors are refusals with the status and the code that the client maps."""

    def __init__(self, folder: Path, resource: str) -> None:
        self.folder = folder
        self.resource = resource
        self._git = pygit2.Repository(str(folder))

    @property
    def private(self) -> bool:
        """Whether it is hidden from callers without a token."""
        return "localhub.private" in self._git.config

    def head(self, revision: str = MAIN) -> str:
        """Return the full commit id of a branch, tag, pull request ref, or (abbreviated) commit."""
        return str(self._commit(revision).id)

    def commits(self, revision: str = MAIN) -> tuple[Commit, ...]:
        """Return the history of a revision, newest first."""
        walked = self._git.walk(self._commit(revision).id, SortMode.TOPOLOGICAL)
        return tuple(_described(commit) for commit in walked)

    def date(self, revision: str = MAIN) -> datetime:
        """Return when the commit of a revision was made."""
        return datetime.fromtimestamp(self._commit(revision).commit_time, UTC)

    def refs(self) -> tuple[Ref, ...]:
        """Return every branch, tag and pull request, sorted."""
        names = sorted(self._git.references)
        return tuple(Ref(name, str(self._git.references[name].peel(pygit2.Commit).id)) for name in names)

    def files(self, revision: str = MAIN) -> dict[str, Entry]:
        """Return every file of a revision by its path, in git's order."""
        return {entry.path: entry for entry in self.entries(revision, recursive=True) if not entry.folder}

    def entries(self, revision: str, folder: str = "", *, recursive: bool = False) -> tuple[Entry, ...]:
        """Return what a folder holds.

        Args:
            revision: branch, tag, pull request ref or commit.
            folder: path of the folder; empty for the root.
            recursive: whether to return everything below the folder as well.

        Returns:
            Files and folders, in git's order.

        Raises:
            Refusal: 404, there is no such folder.
        """
        tree = self._commit(revision).tree
        if folder:
            try:
                found = tree[folder]
            except (KeyError, ValueError):  # the latter for what is no path at all
                raise entry_not_found(folder) from None
            if not isinstance(found, pygit2.Tree):
                raise entry_not_found(folder)
            tree = found
        return tuple(_walked(tree, f"{folder}/" if folder else "", recursive=recursive))

    def read(self, entry: Entry) -> bytes:
        """Return the bytes that git holds for a file."""
        return self._git[entry.oid].read_raw()

    def tree_with(self, changes: Iterable[Change], *, start: str) -> str:
        """Write the tree of `start` with the changes made, in order, and return its id; nothing refers to it yet.

        Raises:
            Refusal: 422 for a path that git or the Hub does not take, 404 for a deletion of what is not there.
        """
        index = pygit2.Index()
        index.read_tree(self._commit(start).tree)
        try:
            for change in changes:
                self._apply(change, index)
            return str(index.write_tree(self._git))
        except pygit2.GitError as error:
            raise bad_path(str(error)) from error

    def commit(self, tree: str, message: str, *, ref: str, parent: str | None) -> str:
        """Move a reference to a new commit.

        Args:
            tree: id of the tree that the commit holds.
            message: title, and after an empty line the rest.
            ref: full name of the reference, such as `refs/heads/main`.
            parent: id of the commit that the reference must be at; None for the first commit.

        Returns:
            The id of the new commit.

        Raises:
            Refusal: 412, the reference is no longer at `parent`.
        """
        author = pygit2.Signature(*_AUTHOR)
        try:
            made = self._git.create_commit(ref, author, author, message, tree, [parent] if parent else [])
        except pygit2.GitError as error:
            raise stale_parent() from error
        return str(made)

    def branch_ref(self, revision: str) -> str:
        """Return the full name of a branch or pull request; nothing else can be committed to."""
        ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        if not _is_ref_name(ref) or ref not in self._git.references or not ref.startswith(_WRITABLE):
            raise revision_not_found(revision)
        return ref

    def create_branch(self, name: str, start: str) -> None:
        """Create a branch at a revision; refused (409) if there is one of this name."""
        self._create_ref(f"refs/heads/{name}", self.head(start))

    def create_tag(self, name: str, revision: str, *, message: str = "") -> None:
        """Create a tag on the commit of a revision.

        Args:
            name: name of the tag.
            revision: branch, tag, pull request ref or commit.
            message: text of an annotated tag; empty for a plain one.

        Raises:
            Refusal: 409, there is a tag of this name, wherever it points.
        """
        _require_ref_name(f"refs/tags/{name}")
        commit = self.head(revision)
        if not message or f"refs/tags/{name}" in self._git.references:
            self._create_ref(f"refs/tags/{name}", commit)
            return
        self._git.create_tag(name, commit, ObjectType.COMMIT, pygit2.Signature(*_AUTHOR), message)

    def delete_ref(self, ref: str) -> None:
        """Remove a branch or a tag; refused (403) for the main branch."""
        if ref == f"refs/heads/{MAIN}":
            raise forbidden("Cannot delete refs/heads/main")
        if not _is_ref_name(ref) or ref not in self._git.references:
            raise revision_not_found(ref)
        self._git.references.delete(ref)

    def open_pull_request(self, title: str, *, start: str) -> int:
        """Create a reference `refs/pr/N` that starts at a commit, and return N."""
        number = 1 + sum(ref.startswith("refs/pr/") for ref in self._git.references)
        self._create_ref(f"refs/pr/{number}", self.head(start))
        self._git.config[f"pullrequest.{number}.title"] = title
        return number

    def pull_request_title(self, number: int) -> str:
        """Return the title of a pull request; refused (404) if there is none of this number."""
        self.branch_ref(f"refs/pr/{number}")
        return str(self._git.config[f"pullrequest.{number}.title"])

    def fsck(self) -> tuple[str, ...]:
        """Return what `git fsck --full --strict` complains of: nothing, in a sound repository."""
        command = ["git", "-C", str(self.folder), "fsck", "--full", "--strict", "--no-dangling", "--no-progress"]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        complaints = (checked.stdout + checked.stderr).splitlines()
        return tuple(complaints) if complaints or not checked.returncode else (f"git fsck: {checked.returncode}",)

    def _commit(self, revision: str) -> pygit2.Commit:
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref.startswith("refs/") and _is_ref_name(ref) and ref in self._git.references:
                return self._git.references[ref].peel(pygit2.Commit)
        found = self._git.get(revision) if _ABBREVIATED.fullmatch(revision) else None
        if not isinstance(found, pygit2.Commit):
            raise revision_not_found(revision)
        return found

    def _create_ref(self, ref: str, commit: str) -> None:
        _require_ref_name(ref)
        if ref in self._git.references:
            raise exists_already(f"Reference {ref}")
        self._git.references.create(ref, commit)

    def _apply(self, change: Change, index: pygit2.Index) -> None:
        if isinstance(change, Delete):
            _remove(change, index)
            return
        index.add(pygit2.IndexEntry(checked_path(change.path), self._git.create_blob(change.content), FileMode.BLOB))


class Repositories:
    """All repositories below one folder, as `models/team/name.git`; `writing` is held while one is changed."""

    def __init__(self, folder: Path) -> None:
        self.writing = Lock()
        self._folder = folder

    def get(self, resource: str) -> Repository:
        """Return the repository `models/team/name`; refused (404) if there is none."""
        folder = self._path(resource)
        if not folder.is_dir():
            raise repository_not_found()
        return Repository(folder, resource)

    def all(self) -> tuple[Repository, ...]:
        """Return every repository, sorted by kind and name."""
        folders = sorted(self._folder.glob("*/*/*.git"))
        return tuple(self.get(str(folder.relative_to(self._folder)).removesuffix(".git")) for folder in folders)

    def create(self, resource: str, *, private: bool, url: str) -> None:
        """Create a repository whose one commit holds .gitattributes, as on the Hub.

        Args:
            resource: its name, as `models/team/name`.
            private: whether it is hidden from callers without a token.
            url: address of its page, which the client shows where the repository exists.

        Raises:
            Refusal: 409, there is one of this name.
        """
        folder = self._path(resource)
        if folder.exists():
            raise exists_already(f"Repository {resource}", url=url)
        git = pygit2.init_repository(str(folder), bare=True, initial_head=MAIN)
        if private:
            git.config["localhub.private"] = True
        index = pygit2.Index()
        index.add(pygit2.IndexEntry(".gitattributes", git.create_blob(_GITATTRIBUTES.encode()), FileMode.BLOB))
        tree = str(index.write_tree(git))
        Repository(folder, resource).commit(tree, "initial commit", ref=f"refs/heads/{MAIN}", parent=None)

    def delete(self, resource: str) -> None:
        """Remove a repository for good."""
        shutil.rmtree(self.get(resource).folder)

    def _path(self, resource: str) -> Path:
        kind, _, name = resource.partition("/")
        if not _NAME.fullmatch(name):
            raise bad_request(f"{name!r} is no repository name")
        return self._folder / kind / f"{name}.git"


def checked_path(path: str) -> str:
    """Return a path as it may be committed; refused (422) if the Hub would not take it."""
    try:
        return repository_path(path)
    except ValueError as error:
        raise bad_path(str(error)) from None


def _is_ref_name(ref: str) -> bool:
    return len(ref) <= LIMITS.path_characters and "\0" not in ref and bool(pygit2.reference_is_valid_name(ref))


def _require_ref_name(ref: str) -> None:
    if not _is_ref_name(ref):
        raise bad_request(f"git does not take the name {ref!r}")


def _walked(tree: pygit2.Tree, prefix: str, *, recursive: bool) -> Iterator[Entry]:
    for item in tree:
        path = f"{prefix}{item.name}"
        size = item.size if isinstance(item, pygit2.Blob) else 0
        yield Entry(path, str(item.id), size, folder=isinstance(item, pygit2.Tree))
        if recursive and isinstance(item, pygit2.Tree):
            yield from _walked(item, f"{path}/", recursive=True)


def _remove(change: Delete, index: pygit2.Index) -> None:
    path = change.path.rstrip("/")
    doomed = [entry.path for entry in index if entry.path == path or entry.path.startswith(f"{path}/")]
    if not doomed:
        raise entry_not_found(change.path)
    for path in doomed:
        index.remove(path)


def _described(commit: pygit2.Commit) -> Commit:
    title, _, message = commit.message.partition("\n\n")
    return Commit(str(commit.id), title, message, datetime.fromtimestamp(commit.commit_time, UTC))
