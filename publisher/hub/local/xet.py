"""Xet storage (CAS v1), as the default client with hf_xet uses it.

Xorbs are kept as they come. When a shard announces files, each is rebuilt from its chunks at once and put into LFS
storage under its SHA-256; so nothing is announced that cannot be read, and a client without hf_xet can download it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from threading import Lock

from publisher.hub.local.lfs import LfsStore
from publisher.hub.local.refusals import bad_request
from publisher.hub.local.xet_format import Segment, XetFile, chunk_content, chunk_offsets, files_in_shard

_HASH = re.compile(r"[0-9a-f]{64}")


class XetStore:
    """A folder with `xorbs/` by hash, `files/` by Xet hash, and `names/` from SHA-256 to Xet hash."""

    def __init__(self, folder: Path, *, lfs: LfsStore) -> None:
        self._folder = folder
        self._lfs = lfs
        self._adding = Lock()  # shards come in on several threads, and may announce the same file
        for name in ("xorbs", "files", "names"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def xorb(self, xorb_hash: str) -> Path:
        """Return where a xorb is, or would be."""
        return self._path("xorbs", xorb_hash)

    def add_xorb(self, xorb_hash: str, content: bytes) -> bool:
        """Keep a xorb, and return whether it is new."""
        path = self.xorb(xorb_hash)
        if path.exists():
            return False
        path.write_bytes(content)
        return True

    def add_shard(self, shard: bytes) -> None:
        """Take in the files of a shard; refused (400) if one cannot be rebuilt or has another SHA-256."""
        try:
            with self._adding:
                for file in files_in_shard(shard):
                    self._add_file(file)
        except (ValueError, RuntimeError, FileNotFoundError) as error:  # LZ4 raises RuntimeError
            raise bad_request(f"the shard cannot be used: {type(error).__name__}") from error

    def segments(self, file_hash: str) -> tuple[Segment, ...] | None:
        """Return the segments of a file by its Xet hash; None if it is not here."""
        path = self._path("files", file_hash)
        return tuple(Segment(**fields) for fields in json.loads(path.read_text())) if path.exists() else None

    def hash_of(self, oid: str) -> str | None:
        """Return the Xet hash of the file with this SHA-256, if it came by Xet."""
        path = self._path("names", oid)
        return path.read_text() if path.exists() else None

    def byte_range(self, segment: Segment) -> tuple[int, int]:
        """Return first and last byte of a segment's chunks in its xorb, both included."""
        offsets = chunk_offsets(self.xorb(segment.xorb).read_bytes())
        return offsets[segment.first], offsets[segment.end] - 1

    def _add_file(self, file: XetFile) -> None:
        self._lfs.require_room(sum(segment.length for segment in file.segments))
        with self._lfs.incoming() as rebuilt:
            for piece in self._pieces(file.segments):
                rebuilt.write(piece)
            oid = rebuilt.keep(file.sha256)
        _write_whole(self._path("files", file.hash), json.dumps([asdict(segment) for segment in file.segments]))
        _write_whole(self._path("names", oid), file.hash)

    def _pieces(self, segments: tuple[Segment, ...]) -> Iterator[bytes]:
        opened = lru_cache(maxsize=1)(self._read_xorb)  # neighbouring segments mostly lie in one xorb of up to 64 MiB
        for segment in segments:
            content, offsets = opened(segment.xorb)
            if not segment.first < segment.end < len(offsets):
                raise ValueError("a segment names chunks that its xorb does not have")
            left = segment.length
            for chunk in range(segment.first, segment.end):
                piece = chunk_content(content[offsets[chunk] : offsets[chunk + 1]])
                left -= len(piece)
                if left < 0:
                    raise ValueError("a segment is longer than the shard says")
                yield piece

    def _read_xorb(self, xorb_hash: str) -> tuple[bytes, tuple[int, ...]]:
        content = self.xorb(xorb_hash).read_bytes()
        return content, chunk_offsets(content)

    def _path(self, folder: str, name: str) -> Path:
        if not _HASH.fullmatch(name):
            raise bad_request("Xet names things by 64 hex digits")
        return self._folder / folder / name


def _write_whole(path: Path, text: str) -> None:
    """Write a text so that a reader sees all of it or none; only one thread at a time adds files."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
