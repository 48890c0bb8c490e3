"""A base in the 4-bit quantisation that a QLoRA was trained on, as the rest of the tool sees it: dequantised weights.

The files hold the weights before quantisation; each is quantised and dequantised when it is read. It works on any
reader, and refuses nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from publisher.border.safetensors_header import DTYPES
from publisher.checkpoints.headers import Quantised, TensorHeader
from publisher.checkpoints.reading import Reader, in_blocks
from publisher.records.checkpoint import QuantisedBase

if TYPE_CHECKING:
    import torch

_STORED = {dtype.torch: name for name, dtype in DTYPES.items()}


def quantised_headers(headers: Mapping[str, TensorHeader], how: QuantisedBase | None) -> dict[str, TensorHeader]:
    """Return the headers with those of quantised weights as these are read: in the dtype that they are dequantised to.

    Args:
        headers: of the base.
        how: the quantisation, and the tensors that it is of; None where nothing is quantised.

    Returns:
        The headers, by name.
    """
    found = dict(headers)
    for name in how.tensors if how else ():
        if how and name in found:
            found[name] = replace(found[name], dtype=_STORED[how.dtype], quantised=Quantised(found[name], how.way))
    return found


def unquantised_headers(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers that `quantised_headers` was given."""
    return {name: header.quantised.stored if header.quantised else header for name, header in headers.items()}


class QuantisedReader:
    """Reads weights quantised and dequantised, on top of a reader of the stored ones."""

    def __init__(self, reader: Reader, headers: Mapping[str, TensorHeader]) -> None:
        """Prepare to read the tensors of headers from `quantised_headers`.

        Args:
            reader: of the tensors of `unquantised_headers`.
            headers: as from `quantised_headers`.
        """
        self._reader = reader
        self._ways = {name: header.quantised.how for name, header in headers.items() if header.quantised is not None}

    def read(self, name: str) -> "torch.Tensor":
        """Return the tensor, dequantised if it is one of the quantised."""
        way = self._ways.get(name)
        if way is None:
            return self._reader.read(name)
        from publisher.checkpoints import nf4

        return nf4.dequantised(self._reader.read(name), way)

    def blocks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """Return the tensor flat, in blocks of `elements` elements, of which the last may be shorter."""
        return in_blocks(self.read(name), elements) if name in self._ways else self._reader.blocks(name, elements)
