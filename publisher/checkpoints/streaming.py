"""The weights of a checkpoint on the Hub, read there by ranges and never stored.

Of a streamed snapshot only config.json and the index are files on this machine; of its tensors there are those in
work, and the few small ones that came along with the last. A file of weights whose header does not describe its bytes
exactly is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from publisher.border.safetensors_header import LENGTH_BYTES, Header, header_length, parse_header
from publisher.checkpoints.dtypes import torch_dtype
from publisher.checkpoints.files import INDEX
from publisher.checkpoints.headers import TensorHeader, require_held
from publisher.checkpoints.reading import in_blocks
from publisher.errors import FetchError
from publisher.hub import client as hub
from publisher.records.checkpoint import Checkpoint, FileDigest, Snapshot

WEIGHTS = ".safetensors"
_AHEAD = 1 << 23  # bytes that small neighbours in a file may have together to come in one request
_known: dict[str, Header] = {}  # by the file's digest: a file that both repositories have is asked for once


def streamed_headers(snapshot: Snapshot) -> dict[str, TensorHeader]:
    """Return the header of every tensor of a streamed snapshot, sorted by name.

    Raises:
        FetchError: a damaged file, no tensors, or one that the index names and no shard holds.
        HubError: a file cannot be read.
    """
    files = [file for file in snapshot.checkpoint.files if file.name.endswith(WEIGHTS)]
    shards = {file.name: _file_headers(snapshot, file) for file in files}
    if any(file.name == INDEX for file in snapshot.checkpoint.files):
        require_held(snapshot.folder / INDEX, shards)
    headers = {name: header for shard in shards.values() for name, header in shard.items()}
    if not headers:
        raise FetchError(
            f"{snapshot.checkpoint.short} holds no tensor", expected="the model's weights", next_step="correct the pin"
        )
    return dict(sorted(headers.items()))


def _file_headers(snapshot: Snapshot, file: FileDigest) -> dict[str, TensorHeader]:
    if file.sha256 not in _known:
        _known[file.sha256] = _remote_header(snapshot.checkpoint, file)
    place = snapshot.folder / file.name
    return {
        name: TensorHeader(entry.dtype, entry.shape, place, file.sha256, entry.start, entry.stop)
        for name, entry in _known[file.sha256].entries.items()
    }


def _remote_header(checkpoint: Checkpoint, file: FileDigest) -> Header:
    """Return the header of a remote file, read by two requests."""

    def taken(start: int, stop: int) -> bytes:
        stop = min(stop, file.size)
        return bytes(_Range(checkpoint, file.name, start=start, stop=stop).take(max(stop - start, 0)))

    try:
        length = header_length(taken(0, LENGTH_BYTES), file_size=file.size)
        return parse_header(taken(LENGTH_BYTES, LENGTH_BYTES + length), file_size=file.size)
    except ValueError as error:
        raise FetchError(
            f"{file.name} of {checkpoint.short} ({file.size:,} bytes) is not a whole safetensors file: {error}",
            expected="a file as long as its header says",
            next_step="name a commit whose weights are whole",
        ) from None


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

    def _range(self, first: TensorHeader, last: TensorHeader) -> "_Range":
        return _Range(self._snapshot.checkpoint, first.file.name, start=first.start, stop=last.stop)


class _Range:
    """Part of a remote file, from front to back; asked for when something is taken from it."""

    def __init__(self, checkpoint: Checkpoint, filename: str, *, start: int, stop: int) -> None:
        self._pieces = hub.stream(checkpoint.name, checkpoint.revision, filename=filename, start=start, stop=stop)
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytearray:
        """Return the next bytes, in a buffer of their own."""
        block, filled = bytearray(size), 0
        while filled < size:
            self._rest = self._rest or memoryview(next(self._pieces))
            part = self._rest[: size - filled]
            block[filled : filled + len(part)] = part
            filled += len(part)
            self._rest = self._rest[len(part) :]
        return block


def _tensor(content: bytearray, header: TensorHeader) -> torch.Tensor:
    """Return these bytes as a tensor, without a copy."""
    dtype = torch_dtype(header)
    if not content:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(header.shape)
