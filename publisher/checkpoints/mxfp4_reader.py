"""Experts in MXFP4 as the rest of the tool sees them: one tensor in bfloat16 for the blocks and the scales of each.

It works on any reader, of files or of ranges. Blocks without scales, or of other shapes than gpt-oss has, were refused
before (`tensor_formats`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from publisher.checkpoints.headers import Mxfp4, TensorHeader
from publisher.checkpoints.reading import Reader, in_blocks
from publisher.checkpoints.tensor_formats import is_mxfp4

if TYPE_CHECKING:
    import torch

_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = 32  # in a block


def unpacked_headers(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers with one of a bfloat16 tensor, (experts, in, out), in the place of blocks and scales."""
    found = dict[str, TensorHeader]()
    for name, header in headers.items():
        if not is_mxfp4(name, headers):
            found[name] = header
        elif name.endswith(_BLOCKS):
            stem = name.removesuffix(_BLOCKS)
            experts, rows, groups, _ = header.shape
            parts = Mxfp4(blocks=header, scales=headers[stem + _SCALES])
            found[stem] = replace(header, dtype="BF16", shape=(experts, groups * _VALUES, rows), mxfp4=parts)
    return found


def stored_names(name: str) -> tuple[str, str]:
    """Return the names of blocks and scales in which experts of this name are stored."""
    return name + _BLOCKS, name + _SCALES


def packed_headers(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers that `unpacked_headers` was given."""
    found = dict[str, TensorHeader]()
    for name, header in headers.items():
        if header.mxfp4 is None:
            found[name] = header
        else:
            found |= {name + _BLOCKS: header.mxfp4.blocks, name + _SCALES: header.mxfp4.scales}
    return found


class UnpackingReader:
    """Reads experts in MXFP4 dequantised, on top of a reader of the stored tensors."""

    def __init__(self, reader: Reader, headers: Mapping[str, TensorHeader]) -> None:
        """Prepare to read the tensors of headers from `unpacked_headers`.

        Args:
            reader: of the tensors of `packed_headers`.
            headers: as from `unpacked_headers`.
        """
        self._reader = reader
        self._packed = {name for name, header in headers.items() if header.mxfp4 is not None}

    def read(self, name: str) -> "torch.Tensor":
        """Return the tensor in its stored dtype, or in bfloat16 if it is stored in MXFP4."""
        if name not in self._packed:
            return self._reader.read(name)
        from publisher.checkpoints import mxfp4

        return mxfp4.dequantise(self._reader.read(name + _BLOCKS), self._reader.read(name + _SCALES))

    def blocks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """Return the tensor flat, in blocks of `elements` elements, of which the last may be shorter."""
        return in_blocks(self.read(name), elements) if name in self._packed else self._reader.blocks(name, elements)
