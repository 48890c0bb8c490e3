"""Writes safetensors files one tensor at a time: byte for byte what safetensors itself writes, without all in memory.

It refuses nothing by itself. A full disk is reported as one, which safetensors' own error does not do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from publisher.border.safetensors_header import DTYPES, encode_header
from publisher.checkpoints.dtypes import safetensors_dtype
from publisher.records.files import atomic

_RANKS = {name: rank for rank, name in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: what the header says of it, and how to get it when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes that it takes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Planned]) -> None:
    """Write the file atomically, with `{"format": "pt"}` as its metadata, in the order of safetensors' own writer.

    That order is by dtype, from the last of `DTYPES` to the first, and then by name.

    Raises:
        NoRoomError: the disk is full.
    """
    dtypes = {name: safetensors_dtype(planned.dtype) for name, planned in tensors.items()}
    order = sorted(tensors, key=lambda name: (-_RANKS[dtypes[name]], name))
    header = encode_header({name: (dtypes[name], tensors[name].shape) for name in order}, metadata={"format": "pt"})
    size = len(header) + sum(planned.size for planned in tensors.values())
    with atomic(path, size=size) as partial, partial.open("wb") as file:
        file.write(header)
        for name in order:
            write_tensor(file, tensors[name].load())


def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Write the bytes of a tensor on the CPU, row by row, as a safetensors file has them."""
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
