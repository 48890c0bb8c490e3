"""Safetensors files written anew with some of their tensors replaced, and everything else copied.

Where no tensor changes its dtype or shape, the header is copied too, so that equal tensors give an equal file. Tensors
keep their order. What is copied passes through in blocks; of what is replaced, one tensor is in memory.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from publisher.border.safetensors_header import DTYPES, encode_header
from publisher.checkpoints.headers import read_header
from publisher.checkpoints.writing import write_tensor

_BLOCK = 1 << 24  # bytes that are copied at once


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a tensor becomes.

    Attributes:
        dtype: in safetensors' spelling.
        shape: of the new tensor.
        load: gives it when its turn comes.
        name: under which it is written; None where it keeps the old one.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    name: str | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes in the file."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].size


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor of the old file, which stays as it is: its header, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RewrittenFile:
    """A file as it will be.

    Attributes:
        original: the file that is rewritten.
        header: the bytes before the first tensor.
        pieces: what becomes of each tensor, by name, in order.
    """

    original: Path
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
        """Write the file, safe on disk at the end.

        Yields:
            The name of each tensor before it is written.
        """
        with self.original.open("rb") as old, path.open("xb") as new:
            new.write(self.header)
            for name, piece in self.pieces.items():
                yield name
                if isinstance(piece, Replacement):
                    write_tensor(new, piece.load())
                else:
                    _copy(piece, old, new)
            new.flush()
            os.fsync(new.fileno())


def rewritten(original: Path, replaced: Mapping[str, Replacement | None]) -> RewrittenFile:
    """Return the file with these tensors replaced, or left out where None takes their place.

    Args:
        original: a safetensors file.
        replaced: by name; names of other files may be among them.

    Raises:
        FetchError: the file is missing, cut short or no safetensors file.
    """
    before, header = read_header(original)
    pieces: dict[str, Replacement | _Copy] = {}
    for name, entry in sorted(header.entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        piece = replaced.get(name, _Copy(entry.dtype, entry.shape, entry.start, entry.stop))
        if piece is not None:
            pieces[(piece.name if isinstance(piece, Replacement) else None) or name] = piece
    kinds = {name: (piece.dtype, piece.shape) for name, piece in pieces.items()}
    if kinds == {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}:
        return RewrittenFile(original, before, pieces)
    return RewrittenFile(original, encode_header(kinds, metadata=header.metadata), pieces)


def _copy(piece: _Copy, old: BinaryIO, new: BinaryIO) -> None:
    old.seek(piece.start)
    new.writelines(old.read(min(_BLOCK, piece.stop - start)) for start in range(piece.start, piece.stop, _BLOCK))
