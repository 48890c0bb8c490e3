"""Large files by their SHA-256: what a git repository of the Hub only points to.

Content is kept under the digest it was announced with, and only if it has that digest.
"""

import hashlib
import hmac
import re
import shutil
import tempfile
from collections.abc import AsyncIterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from publisher.hub.local.refusals import bad_request, too_large

_POINTER = re.compile(rb"version https://git-lfs.github.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize ([0-9]{1,14})\n")
_OID = re.compile(r"[0-9a-f]{64}")
POINTER_BYTES = 256  # a file that is larger is no pointer
_PIECE = 2**20  # bytes that are written or read at once


@dataclass(frozen=True, slots=True)
class Pointer:
    """What git holds in place of a large file; `size` in bytes."""

    oid: str
    size: int

    def encoded(self) -> bytes:
        """Return the pointer file, byte for byte as git-lfs writes it."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.oid}\nsize {self.size}\n".encode()


def pointer_in(content: bytes) -> Pointer | None:
    """Return the pointer that these bytes of a git file are; None where they are none."""
    found = _POINTER.fullmatch(content)
    return Pointer(found[1].decode(), int(found[2])) if found else None


class LfsStore:
    """A folder of files named by their SHA-256. Files above `part_size` bytes are asked for in parts."""

    def __init__(self, folder: Path, *, part_size: int | None) -> None:
        self.part_size = part_size
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)

    def path(self, oid: str) -> Path:
        """Return where the content of this digest is, or would be."""
        if not _OID.fullmatch(oid):
            raise bad_request("an LFS object is named by 64 hex digits")
        return self._folder / oid

    def size(self, oid: str) -> int | None:
        """Return the bytes of a stored file; None if it is not here."""
        path = self.path(oid)
        return path.stat().st_size if path.exists() else None

    def part_count(self, size: int) -> int:
        """Return how many parts a file of this size is asked for in; 1 where it comes in one piece."""
        return -(-size // self.part_size) if self.part_size and size > self.part_size else 1

    def require_room(self, size: int) -> None:
        """Refuse (413) what the disk has no room for."""
        free = shutil.disk_usage(self._folder).free
        if size > free:
            raise too_large(free)

    @contextmanager
    def incoming(self) -> Iterator["Incoming"]:
        """Open a file to write to, which vanishes unless it is kept."""
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            try:
                yield Incoming(self, file)
            finally:
                Path(file.name).unlink(missing_ok=True)

    async def receive(self, oid: str, content: AsyncIterable[bytes]) -> None:
        """Store content under its digest; refused (400) if it has another."""
        self.path(oid)
        with self.incoming() as incoming:
            await _write(incoming, content)
            await run_in_threadpool(incoming.keep, oid)

    async def receive_part(self, oid: str, number: int, *, content: AsyncIterable[bytes]) -> str:
        """Keep one part of a file until all of them are there.

        Args:
            oid: the SHA-256 that the whole file was announced with.
            number: which part, counted from 1.
            content: the bytes of the part, as they arrive.

        Returns:
            The ETag of the part, which the client gives back to have the file assembled.
        """
        part = self._part(oid, number)
        with self.incoming() as incoming:
            await _write(incoming, content)
            return await run_in_threadpool(incoming.keep_as, part)

    def assemble(self, oid: str, parts: Sequence[tuple[int, str]]) -> None:
        """Join the parts, given as (number, ETag), which are then gone.

        Raises:
            Refusal: 400, if one is missing or is not the one received, or the whole has another digest.
        """
        try:
            with self.incoming() as incoming:
                for number, etag in sorted(parts):
                    self._append(incoming, self._part(oid, number), etag=etag)
                incoming.keep(oid)
        finally:
            for number, _ in parts:
                self._part(oid, number).unlink(missing_ok=True)

    @staticmethod
    def _append(incoming: "Incoming", part: Path, *, etag: str) -> None:
        digest = hashlib.sha256()
        if part.exists():
            with part.open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
                    incoming.write(piece)
        if not hmac.compare_digest(digest.hexdigest().encode(), etag.encode(errors="replace")):
            raise bad_request("a part is missing, or has another ETag")

    def _part(self, oid: str, number: int) -> Path:
        path = self.path(oid)
        return path.with_name(f"{path.name}.part{number}")


class Incoming:
    """Content on its way into a store."""

    def __init__(self, store: LfsStore, file: "tempfile._TemporaryFileWrapper[bytes]") -> None:
        self._store = store
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, piece: bytes) -> None:
        """Add to the end."""
        self._digest.update(piece)
        self._file.write(piece)

    def keep(self, expected: str | None) -> str:
        """Put all of it in its place; gives its SHA-256, and refuses (400) any other than the expected one."""
        oid = self._digest.hexdigest()
        if expected not in {None, oid}:
            raise bad_request("the content received does not have the announced SHA-256")
        return self.keep_as(self._store.path(oid))

    def keep_as(self, place: Path) -> str:
        """Put all of it in this place; gives its SHA-256."""
        self._file.flush()
        Path(self._file.name).replace(place)
        return self._digest.hexdigest()


async def _write(incoming: Incoming, content: AsyncIterable[bytes]) -> None:
    """Write what comes, a megabyte at a time, without holding up other requests."""
    gathered = bytearray()
    async for piece in content:
        gathered += piece
        if len(gathered) >= _PIECE:
            await run_in_threadpool(incoming.write, bytes(gathered))
            gathered.clear()
    await run_in_threadpool(incoming.write, bytes(gathered))
