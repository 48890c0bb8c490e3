"""Tensors of a checkpoint on the Hub, read there by ranges and never stored.

Of a streamed snapshot only config.json and the index are files on this machine; of its tensors there are those in
work, and the few small ones that came along with the last. It refuses nothing that `remote_headers` has not refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from publisher.checkpoints.dtypes import torch_dtype
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.reading import in_blocks
from publisher.checkpoints.remote_headers import RemoteRange
from publisher.records.checkpoint import Snapshot

_AHEAD = 1 << 23  # bytes that small neighbours in a file may have together to come in one request


class StreamReader:
    """Reads tensors of a streamed snapshot by name; small neighbours in a file come in one request, ahead of time."""

    def __init__(self, snapshot: Snapshot, headers: Mapping[str, TensorHeader]) -> None:
        """Prepare to read the tensors of these headers, which come from `streamed_headers`."""
        self._snapshot = snapshot
        self._headers = headers
        order = sorted(self._headers.items(), key=lambda item: (item[1].file, item[1].start, item[1].stop))
        self._next = {name: after for (name, one), (after, other) in pairwise(order) if one.file == other.file}
        self._ahead: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor on the CPU, in its stored dtype."""
        tensor = self._ahead.pop(name, None)
        if tensor is None:
            self._ahead = self._fetched(self._neighbours(name))
            tensor = self._ahead.pop(name)
        return tensor

    def blocks(self, name: str, elements: int) -> Iterator[torch.Tensor]:
        """Return the tensor flat, in blocks of `elements` elements as they arrive; the last may be shorter.

        Of a large tensor, what is not asked for is not fetched.
        """
        header = self._headers[name]
        if header.stop - header.start <= _AHEAD:
            yield from in_blocks(self.read(name), elements)
            return
        dtype, left = torch_dtype(header), header.stop - header.start
        arriving = self._range(header, header)
        while left:
            block = arriving.take(min(elements * dtype.itemsize, left))
            left -= len(block)
            yield torch.frombuffer(block, dtype=dtype)

    def _neighbours(self, name: str) -> list[str]:
        """Return this tensor and those after it in its file that fit into the same request."""
        run, first = [name], self._headers[name]
        after = self._next.get(name)
        while after is not None and self._headers[after].stop - first.start <= _AHEAD:
            run.append(after)
            after = self._next.get(after)
        return run

    def _fetched(self, run: Sequence[str]) -> dict[str, torch.Tensor]:
        headers = {name: self._headers[name] for name in run}
        arriving = self._range(headers[run[0]], headers[run[-1]])
        return {name: _tensor(arriving.take(header.stop - header.start), header) for name, header in headers.items()}

    def _range(self, first: TensorHeader, last: TensorHeader) -> RemoteRange:
        return RemoteRange(self._snapshot.checkpoint, first.file.name, start=first.start, stop=last.stop)


def _tensor(content: bytearray, header: TensorHeader) -> torch.Tensor:
    """Return these bytes as a tensor, without a copy."""
    dtype = torch_dtype(header)
    if not content:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(header.shape)
