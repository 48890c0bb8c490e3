"""Files as they come in: regular ones alone, opened without waiting, read up to a bound, found without following links.

A FIFO, a device or a socket would make a reader wait, or read for ever; a link inside a folder that somebody else has
made leads to a file that he could not read himself. None of them is opened.
"""

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

from publisher.border.limits import LIMITS

_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
_AT_ONCE: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class UnreadableError(OSError):
    """What is there is no file that can be read here; `strerror` says why."""

    def __init__(self, path: Path, why: str) -> None:
        """Keep the reason where other errors of the system have theirs."""
        super().__init__(None, why, str(path))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, which never waits.

    Raises:
        UnreadableError: something else is there; a name that no file can have counts as that.
        OSError: the system refuses.
    """
    try:
        require_kind(path, path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    except ValueError as error:  # a name with NUL
        raise UnreadableError(path, str(error)) from None
    try:
        require_kind(path, os.fstat(descriptor).st_mode)
    except UnreadableError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def require_kind(path: Path, mode: int) -> None:
    """Raise an error that says what is there if it is no regular file."""
    if not stat.S_ISREG(mode):
        raise UnreadableError(path, f"it is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, not a file")


def read_regular(path: Path, *, limit: int) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file.
        limit: the most bytes that it may have.

    Returns:
        All its bytes.

    Raises:
        UnreadableError: it is larger, or no regular file.
        OSError: the system refuses.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UnreadableError(path, f"it has more than the {limit:,} bytes that are read of such a file")
    return content


def read_text(path: Path, *, limit: int = LIMITS.text_bytes) -> str:
    """Return the text of a regular file, with its line ends as they are.

    Args:
        path: the file.
        limit: the most bytes that it may have.

    Returns:
        The text; bytes that are not UTF-8 are shown as U+FFFD.

    Raises:
        UnreadableError: it is larger, or no regular file.
        OSError: the system refuses.
    """
    return read_regular(path, limit=limit).decode(errors="replace")


def regular_files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder, sorted, without following any link out of it.

    A snapshot in huggingface_hub's cache is made of links into the cache's own `blobs`: those are files too.

    Raises:
        UnreadableError: there are more files than any release has.
    """
    for path, kind in entries(folder):
        if kind == "a file":
            yield path


def entries(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield everything below a folder that is no folder, sorted, and in words what it is: `a file`, `a link`, ...

    Raises:
        UnreadableError: there are more entries than any release has.
    """
    blobs = folder.absolute().parent.parent / "blobs"
    count = 0
    for place, folders, files in os.walk(folder, followlinks=False):
        folders.sort()
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in sorted([*files, *links]):
            count += 1
            if count > LIMITS.repository_files:
                raise UnreadableError(folder, f"it holds more than {LIMITS.repository_files:,} files")
            path = Path(place, name)
            yield path, _kind_of(path, blobs)


def _kind_of(path: Path, blobs: Path) -> str:
    state = path.lstat()
    mode = state.st_mode
    if stat.S_ISREG(mode):
        return "a file whose bytes were never written (it is nearly all hole)" if _is_hollow(state) else "a file"
    if stat.S_ISLNK(mode) and blobs.is_dir() and _is_blob(path, blobs):
        return "a file"
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def _is_hollow(state: os.stat_result) -> bool:
    """Return whether a large file has next to no bytes on the disk: to read terabytes of zeros would never end."""
    blocks = getattr(state, "st_blocks", None)  # of 512 bytes; Windows does not tell
    return blocks is not None and state.st_size > LIMITS.hollow_bytes and blocks * 512 * 16 < state.st_size


def _is_blob(link: Path, blobs: Path) -> bool:
    """Return whether a link of a snapshot leads to a regular file in the cache's own folders of contents.

    huggingface_hub keeps a large file once for all repositories, in `blobs` beside their folders, and links it from
    each repository's own `blobs`.
    """
    target = _target_of(link)
    if target.parent != blobs or not target.exists():
        return False
    if target.is_symlink():
        target = _target_of(target)
        if target.parent.parent != blobs.parent.parent / "blobs":
            return False
    return target.exists() and stat.S_ISREG(target.lstat().st_mode)


def _target_of(link: Path) -> Path:
    return Path(os.path.normpath(link.absolute().parent / link.readlink()))
