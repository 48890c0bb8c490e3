"""Writes safetensors files one tensor at a time: byte for byte what safetensors itself writes, without all in memory.

It refuses nothing by itself. A full disk is told as one, which safetensors' own error does not.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from publisher.records.files import atomic

_DTYPES = {  # in the order safetensors sorts by
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_ALIGNMENT = 8  # of the first tensor


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: what the header says of it, and how to get it when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Planned]) -> None:
    """Write the file atomically: tensors by dtype, widest first, then by name, with `{"format": "pt"}`.

    Raises:
        NoRoomError: the disk is full.
    """
    rank = list(_DTYPES)
    ordered = dict(sorted(tensors.items(), key=lambda item: (rank.index(item[1].dtype), item[0])))
    header = _header(ordered)
    size = len(header) + sum(planned.size for planned in ordered.values())
    with atomic(path, size=size) as partial, partial.open("wb") as file:
        file.write(header)
        for planned in ordered.values():
            file.write(planned.load().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _header(tensors: Mapping[str, Planned]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, planned in tensors.items():
        offsets = [start, start + planned.size]
        entries[name] = {"dtype": _DTYPES[planned.dtype], "shape": planned.shape, "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
