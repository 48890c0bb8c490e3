"""Tensors read from files, one at a time or in blocks, never the whole model.

A file that ends before its header says so is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import Protocol, Self

import torch

from publisher.border.files import open_regular
from publisher.checkpoints.dtypes import torch_dtype
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import FetchError


class Reader(Protocol):
    """Reads tensors of one checkpoint by name, on the CPU and in their stored dtype, wherever they are."""

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor of this name."""

    def blocks(self, name: str, elements: int) -> Iterator[torch.Tensor]:
        """Return the tensor flat, in blocks of `elements` elements, of which the last may be shorter.

        A block is good until the next one is asked for, which may take its place in memory. What is not asked for is
        not read.
        """


class TensorReader:
    """Reads tensors of one checkpoint from its files, each file opened once.

    They are read, not memory-mapped: mapped pages would stay resident, until in the end the whole model were.
    """

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        """Prepare to read the tensors of these headers, which come from `read_headers` or `file_headers`."""
        self._headers = headers
        self._stack = ExitStack()
        self._files: dict[Path, BufferedReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor on the CPU, in its stored dtype.

        Raises:
            FetchError: its file is missing or cut short.
        """
        header = self._headers[name]
        octets = torch.empty(header.stop - header.start, dtype=torch.uint8)
        return self._filled(octets, name, start=header.start).reshape(header.shape)

    def blocks(self, name: str, elements: int) -> Iterator[torch.Tensor]:
        """Return the tensor flat, in blocks of `elements` elements, of which the last may be shorter.

        All of them are in the same memory: fresh pages for each would take longer than reading and comparing them.

        Raises:
            FetchError: its file is missing or cut short.
        """
        header = self._headers[name]
        step = elements * torch_dtype(header).itemsize
        octets = torch.empty(min(step, header.stop - header.start), dtype=torch.uint8)
        for start in range(header.start, header.stop, step):
            yield self._filled(octets[: header.stop - start], name, start=start)

    def _filled(self, octets: torch.Tensor, name: str, *, start: int) -> torch.Tensor:
        """Fill `octets` from the file and return them in the tensor's dtype."""
        header = self._headers[name]
        if header.file not in self._files:
            self._files[header.file] = self._stack.enter_context(_opened(header.file))
        file = self._files[header.file]
        file.seek(start)
        if file.readinto(octets.numpy().data) != octets.numel():
            raise FetchError(
                f"{header.file} ends within {name}",
                expected="a file as long as its header says",
                next_step="download or save that file again",
            )
        return octets.view(torch_dtype(header))


def _opened(file: Path) -> BufferedReader:
    try:
        return open_regular(file)
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise FetchError(f"{file} {why}", next_step="download or save it again") from None


def in_blocks(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """Return the tensor flat, in blocks of `elements` elements, of which the last may be shorter."""
    flat = tensor.reshape(-1)
    return (flat[start : start + elements] for start in range(0, flat.numel(), elements))
