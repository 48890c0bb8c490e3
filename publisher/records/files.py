"""Files as this project writes and names them: digests, canonical JSON, atomic writes, packaged folders.

Whatever is written appears whole or not at all, also where the machine loses power; a full disk is refused with what
is needed. JSON is canonical (sorted keys, one trailing newline), so that
equal content means equal bytes.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from publisher.border.files import open_regular
from publisher.errors import NoRoomError
from publisher.records import formats

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # of the disk, of the user, for one file
_PACKAGE = Path(__file__).resolve().parents[1]


def packaged_folder(name: str) -> Path:
    """Return the folder `templates` or `manifests`: inside the installed package, or beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Return a value as JSON with sorted keys, two spaces, no NaN, and one newline at the end."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value's canonical text: equal values have equal digests."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


@contextmanager
def atomic(path: Path, *, size: int) -> Iterator[Path]:
    """Give a temporary path beside `path` that replaces it when the block ends well, and vanishes when it does not.

    Once the block has ended the file is safe on disk, and its name too.

    Args:
        path: the file to write.
        size: bytes that it will have; the error states them where there is no room.

    Yields:
        The temporary path, to be written to.

    Raises:
        NoRoomError: the disk is full.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with room_in(path.parent, name=path.name, size=size):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            flush(partial)
            partial.replace(path)
            if os.name == "posix":  # elsewhere a folder cannot be opened, nor need it be
                flush(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make sure that this file, or this folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def room_in(folder: Path, *, name: str, size: int) -> Iterator[None]:
    """Turn a full disk in the block into an error that names the folder, the file and what it takes.

    Args:
        folder: the folder that is written to.
        name: what is written.
        size: bytes that it takes.

    Yields:
        Nothing.

    Raises:
        NoRoomError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise no_room(folder, name=name, size=size, reason=error.strerror or str(error)) from None


def no_room(folder: Path, *, name: str, size: int, reason: str) -> NoRoomError:
    """Return the error for a full disk, with what is free at this moment.

    Args:
        folder: the folder that has no room; it need not be there.
        name: what was to be written.
        size: bytes that it takes.
        reason: how the system names the fault.

    Returns:
        The error, to be raised.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return NoRoomError(
        f"{folder} has no room for {name} ({reason})",
        expected=f"{formats.size(size)} ({formats.size(shutil.disk_usage(there).free)} are free)",
        next_step="make room, or move the output to another disk; the same command goes on from what is finished",
    )


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, newlines as given."""
    content = text.encode()
    with atomic(path, size=len(content)) as partial:
        partial.write_bytes(content)
