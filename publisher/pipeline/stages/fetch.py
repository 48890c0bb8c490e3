"""Fetch: a reference of the manifest becomes a checkpoint on this machine, every file of it named by its digest.

Only config.json, the weights and their index are taken: the rest of a repository has no part in an adapter. A
local folder is used where it is. To stream, the weights are left on the Hub, and their digests are those that it
lists. Shards that are missing or cut short are refused here, before any long work.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from publisher.checkpoints.files import (
    INDEX,
    MODEL_CONFIG,
    SINGLE,
    checkpoint_files,
    read_config,
    shards_of,
    weight_entry,
)
from publisher.checkpoints.headers import read_headers
from publisher.checkpoints.remote_headers import remote_entries, text_on_hub
from publisher.checkpoints.snapshots import headers_of
from publisher.checkpoints.tensor_formats import speaks_of_quantisation
from publisher.engines.io_threads import thread_pool
from publisher.errors import FetchError, MissingFileError
from publisher.hub import client as hub
from publisher.manifest.schema import Reference
from publisher.records.checkpoint import Checkpoint, FileDigest, Snapshot
from publisher.records.files import digest_of, sha256_of
from publisher.records.progress import Octets, Progress, silent
from publisher.records.record import Record
from publisher.records.sealed import read_sealed, write_sealed

_SHA256_DIGITS = 64
_ENTRIES = (SINGLE, INDEX)


class _Known(Record):
    """A digest that spares work as long as nothing tells that the file is another: see `hashed_here`."""

    size: int
    inode: int
    written_ns: int
    changed_ns: int
    sha256: str


class _DigestMemo(Record):
    """Digests of files already read on this machine, by resolved path."""

    known: dict[str, _Known]


def fetch(
    reference: Reference,
    *,
    memo: Path,
    progress: Progress,
    stream: bool = False,
    hashed: set[Path] | None = None,
) -> Snapshot:
    """Return a whole checkpoint: on disk, or on the Hub to be streamed.

    Args:
        reference: a local folder, or a repository at a full commit id.
        memo: a JSON file that remembers digests between runs. It tells whether earlier results may still hold;
            whoever reads the tensors asks `hashed_here` too.
        progress: told what is being downloaded or hashed.
        stream: leave the weights of a repository on the Hub.
        hashed: the files that this run has hashed; those that are hashed here are added.

    Returns:
        Its folder, and its files by name, size and SHA-256.

    Raises:
        FetchError: missing, damaged or pickled weights.
        HubError: the Hub cannot be reached, or refuses.
    """
    if stream and reference.path is None:
        return _streamed(reference, progress)
    folder = Path(reference.path) if reference.path is not None else _download(reference, progress)
    read_headers(folder)
    files = _digests(folder, memo=memo, progress=progress, hashed=set() if hashed is None else hashed)
    if reference.path is None:
        checkpoint = _hub_checkpoint(reference.repo or "", reference.revision or "", files=files, folder=folder)
        return Snapshot(checkpoint=checkpoint, folder=folder)
    return Snapshot(checkpoint=_local_checkpoint(files, folder), folder=folder)


def hashed_here(snapshot: Snapshot, *, memo: Path, progress: Progress, hashed: set[Path]) -> Snapshot:
    """Return the snapshot with the digests that its files have in this run.

    A disk can lose bits, and a file can be written over with its old size and time. So the memo vouches for no file
    whose tensors are read: every one that this run has not hashed yet is hashed. Weights that are streamed have the
    digests that the Hub lists.

    Args:
        snapshot: as `fetch` gave it.
        memo: the JSON file that remembers digests between runs.
        progress: told what is being hashed.
        hashed: the files that this run has hashed; those that are hashed here are added.

    Returns:
        The same files, by the bytes that are there now.

    Raises:
        FetchError: a file of the Hub is not what the Hub says.
    """
    if snapshot.streamed:
        return snapshot
    there, folder = snapshot.checkpoint, snapshot.folder
    files = _digests(folder, memo=memo, progress=progress, hashed=hashed, anew=True)
    if there.kind == "local":
        return Snapshot(checkpoint=_local_checkpoint(files, folder), folder=folder)
    checkpoint = _hub_checkpoint(there.name, there.revision, files=files, folder=folder)
    return Snapshot(checkpoint=checkpoint, folder=folder)


def changed_since_hashed(snapshot: Snapshot, memo: Path) -> list[str]:
    """Return the files of a checkpoint on this machine that are no longer those whose digests `memo` has."""
    if snapshot.streamed:
        return []
    known = _remembered(memo, silent)
    files = [snapshot.folder / file.name for file in snapshot.checkpoint.files]
    return [str(file) for file in files if not file.is_file() or not _is_current(file.resolve(), known)]


def _local_checkpoint(files: tuple[FileDigest, ...], folder: Path) -> Checkpoint:
    content = digest_of([file.model_dump() for file in files])
    return Checkpoint(kind="local", name=folder.resolve().name, revision=content, files=files)


def _download(reference: Reference, progress: Progress) -> Path:
    repo, revision = reference.repo or "", reference.revision or ""
    progress(f"fetching {repo}@{revision[:8]}")
    folder = _download_config(repo, revision)
    config = read_config(folder)
    if speaks_of_quantisation(config) and not any(hub.is_cached(repo, revision, filename=one) for one in _ENTRIES):
        _require_plain_single(repo, revision, config)
    _download_entry(repo, revision)
    missing = [name for name in checkpoint_files(folder) if not hub.is_cached(repo, revision, filename=name)]
    sizes = {file.path: file.size for file in hub.list_files(repo, revision)} if missing else {}
    if missing and speaks_of_quantisation(config):  # what is not read here need not be downloaded first
        shards = [name for name in checkpoint_files(folder) if name.endswith(".safetensors")]
        remote_entries(_place(repo, revision), shards, sizes=sizes, config=config)
    total, before = Octets(sum(sizes.get(name, 0) for name in missing)), 0
    for name in missing:
        report = _reporting(f"downloading {repo} {name}", progress, before=before, total=total)
        report(0)
        hub.download(repo, revision, filename=name, on_bytes=report)
        before += sizes.get(name, 0)
    return folder


def _require_plain_single(repo: str, revision: str, config: Mapping[str, Any]) -> None:
    """Raise if the weights, where they are one file, are of a format that is not read; they are not downloaded."""
    sizes = {file.path: file.size for file in hub.list_files(repo, revision)}
    if SINGLE in sizes:
        remote_entries(_place(repo, revision), [SINGLE], sizes=sizes, config=config)


def _place(repo: str, revision: str) -> Checkpoint:
    return Checkpoint(kind="hub", name=repo, revision=revision, files=())


def _reporting(what: str, progress: Progress, *, before: int, total: Octets) -> Callable[[int], None]:
    """Return a function that adds up the pieces of one file, and reports them."""
    done = before

    def report(octets: int) -> None:
        nonlocal done
        done += octets
        progress(what, done, total)

    return report


def _download_config(repo: str, revision: str) -> Path:
    """Return the folder of config.json, without which a repository is said to be what it holds instead."""
    try:
        return hub.download(repo, revision, filename=MODEL_CONFIG).parent
    except MissingFileError:
        _require_entry(repo, revision)
        raise


def _download_entry(repo: str, revision: str) -> None:
    for entry in _ENTRIES:
        try:
            hub.download(repo, revision, filename=entry)
        except MissingFileError:
            continue
        return
    _require_entry(repo, revision)


def _require_entry(repo: str, revision: str) -> str:
    """Return the entry to the weights of a repository; where there is none, the error says what is there instead."""
    names = [file.path for file in hub.list_files(repo, revision)]
    return weight_entry(names, where=f"{repo}@{revision[:8]}", beside=text_on_hub(repo, revision))


def _streamed(reference: Reference, progress: Progress) -> Snapshot:
    """Return a checkpoint whose config and index are on disk, and whose weights have the digests that the Hub lists."""
    repo, revision = reference.repo or "", reference.revision or ""
    progress(f"listing {repo}@{revision[:8]}")
    listed = {file.path: file for file in hub.list_files(repo, revision)}
    entry = weight_entry(listed, where=f"{repo}@{revision[:8]}", beside=text_on_hub(repo, revision))
    small = [
        hub.download(repo, revision, filename=name) for name in (MODEL_CONFIG, INDEX) if name in {MODEL_CONFIG, entry}
    ]
    folder = small[0].parent
    read_config(folder)
    shards = shards_of(folder / INDEX) if entry == INDEX else (SINGLE,)
    weights = [_listed(listed.get(name), name, where=f"{repo}@{revision[:8]}") for name in shards]
    files = sorted([*map(_digest, small), *weights], key=lambda file: file.name)
    checkpoint = _hub_checkpoint(repo, revision, files=tuple(files), folder=folder)
    snapshot = Snapshot(checkpoint=checkpoint, folder=folder, streamed=True)
    headers_of(snapshot)
    return snapshot


def _listed(file: hub.RemoteFile | None, name: str, *, where: str) -> FileDigest:
    if file is None:
        raise FetchError(
            f"{INDEX} of {where} names the shard {name}, which is missing",
            expected="every shard beside its index",
            next_step="name a commit that is whole",
        )
    if file.sha256 is None:
        raise FetchError(
            f"{name} of {where} is kept in git itself, so the Hub knows no SHA-256 of it",
            expected="weights in LFS or Xet",
            next_step="run the same command without --stream",
        )
    return FileDigest(name=name, size=file.size, sha256=file.sha256)


def _digest(file: Path) -> FileDigest:
    return FileDigest.of(file)


def _digests(
    folder: Path, *, memo: Path, progress: Progress, hashed: set[Path], anew: bool = False
) -> tuple[FileDigest, ...]:
    """Return the files of a checkpoint; with `anew`, none goes by what an earlier run found."""
    known = _remembered(memo, progress)
    paths = {name: (folder / name).resolve() for name in checkpoint_files(folder)}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    changed = [name for name, path in paths.items() if not _is_current(path, known) or (anew and path not in hashed)]
    total = Octets(sum(sizes.values()))
    read = total - sum(sizes[name] for name in changed)
    with thread_pool(2) as threads:
        for name, hashing in [(name, threads.submit(_hashed, paths[name])) for name in changed]:
            progress(f"hashing {folder / name}", read, total)
            known[str(paths[name])] = hashing.result()
            hashed.add(paths[name])
            write_sealed(memo, _DigestMemo(known=known))
            read += sizes[name]
    found = ((name, known[str(path)]) for name, path in paths.items())
    return tuple(FileDigest(name=name, size=file.size, sha256=file.sha256) for name, file in found)


def _is_current(path: Path, known: Mapping[str, _Known]) -> bool:
    before = known.get(str(path))
    return before is not None and before == _state_of(path, sha256=before.sha256)


def _state_of(path: Path, *, sha256: str) -> _Known:
    return _known(path.stat(), sha256=sha256)


def _known(state: os.stat_result, *, sha256: str) -> _Known:
    return _Known(
        size=state.st_size,
        inode=state.st_ino,
        written_ns=state.st_mtime_ns,
        changed_ns=state.st_ctime_ns,
        sha256=sha256,
    )


def _hashed(path: Path) -> _Known:
    """Return what the file is: its state is taken before it is hashed, so that a change meanwhile makes it another."""
    before = path.stat()
    return _known(before, sha256=sha256_of(path))


def _remembered(memo: Path, progress: Progress) -> dict[str, _Known]:
    remembered = read_sealed(memo, _DigestMemo)
    if remembered is None and memo.exists():
        progress(f"{memo} is damaged: the files are hashed again")
    return dict(remembered.known) if remembered is not None else {}


def _hub_checkpoint(repo: str, revision: str, *, files: tuple[FileDigest, ...], folder: Path) -> Checkpoint:
    for file in files:
        # the cache's link is named by the SHA-256 that the Hub gives for an LFS or Xet file; behind it may stand
        # another link, to a blob shared between repositories and named by its Xet hash
        link = folder / file.name
        blob = link.readlink().name if link.is_symlink() else ""
        if len(blob) == _SHA256_DIGITS and blob != file.sha256:
            raise FetchError(
                f"{file.name} of {repo} has SHA-256 {file.sha256[:12]}…",
                expected=f"{blob[:12]}…, as the Hub says",
                next_step=f"delete {folder / file.name} and the blob it points to, and run again",
            )
    return Checkpoint(kind="hub", name=repo, revision=revision, files=files)
