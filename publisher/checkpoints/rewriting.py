"""Safetensors files written anew with some of their tensors replaced, and everything else copied.

Where no tensor changes its dtype or shape, the header is copied too, so that equal tensors give an equal file. Tensors
keep their order. What is copied passes through in blocks; of what is replaced, one tensor is in memory.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from publisher.border.safetensors_header import DTYPES

_BLOCK = 1 << 24  # bytes that are copied at once
_ALIGNMENT = 8  # of the first tensor


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a tensor becomes; `dtype` in safetensors' spelling, `load` gives a tensor of it when its turn comes."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes of the old file."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """A file as it will be: its header, and its tensors in order."""

    source: Path
    header: bytes
    pieces: Mapping[str, Replacement | _Copy]

    @property
    def size(self) -> int:
        """Bytes of the new file."""
        return len(self.header) + self.content

    @property
    def content(self) -> int:
        """Bytes of its tensors."""
        return sum(piece.size for piece in self.pieces.values())

    def write(self, path: Path) -> Iterator[str]:
        """Write the file, safe on disk at the end; the name of each tensor before it is worked on."""
        with self.source.open("rb") as old, path.open("xb") as new:
            new.write(self.header)
            for name, piece in self.pieces.items():
                yield name
                _write(piece, old, new)
            new.flush()
            os.fsync(new.fileno())


def planned(source: Path, replaced: Mapping[str, Replacement | None]) -> Shard:
    """The file with these tensors replaced, or left out where there is nothing in their place.

    Args:
        source: a safetensors file that was found whole.
        replaced: by name; names of other files may be among them.
    """
    raw, entries = _header(source)
    metadata = entries.pop("__metadata__", None)
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    pieces: dict[str, Replacement | _Copy] = {}
    for name, entry in ordered:
        piece = replaced.get(name, _Copy(*(len(raw) + offset for offset in entry["data_offsets"])))
        if piece is not None:
            pieces[name] = piece
    if all(_is_alike(pieces.get(name), entry) for name, entry in entries.items()):
        return Shard(source, raw, pieces)
    return Shard(source, _new_header(entries, pieces, metadata=metadata), pieces)


def _header(source: Path) -> tuple[bytes, dict[str, Any]]:
    """The file's beginning up to the first tensor, and what it says."""
    with source.open("rb") as file:
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
    return length + text, json.loads(text)


def _is_alike(piece: Replacement | _Copy | None, entry: Mapping[str, Any]) -> bool:
    if isinstance(piece, Replacement):
        return (piece.dtype, piece.shape) == _kind(entry)
    return piece is not None


def _new_header(entries: Mapping[str, Any], pieces: Mapping[str, Replacement | _Copy], *, metadata: object) -> bytes:
    found: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for name, piece in pieces.items():
        kind = (piece.dtype, piece.shape) if isinstance(piece, Replacement) else _kind(entries[name])
        found[name] = {"dtype": kind[0], "shape": kind[1], "data_offsets": [start, start + piece.size]}
        start += piece.size
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _kind(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    return entry["dtype"], tuple(entry["shape"])


def _write(piece: Replacement | _Copy, old: BinaryIO, new: BinaryIO) -> None:
    if isinstance(piece, Replacement):
        new.write(piece.load().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return
    old.seek(piece.start)
    new.writelines(old.read(min(_BLOCK, piece.stop - start)) for start in range(piece.start, piece.stop, _BLOCK))
