"""The weights of a snapshot, wherever they are: in its folder, or on the Hub, read there by ranges and never stored.

The stages ask here for headers and tensors and need not know which it is. Of a streamed snapshot only config.json
and the index are files on this machine; of its tensors there are those in work, and the few small ones that came
along with the last. A file of weights whose header does not describe its bytes exactly is refused.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from publisher.border.safetensors_header import DTYPES, LENGTH_BYTES, Entry, header_length, parse_header
from publisher.checkpoints.fp8_reader import Dequantising, dequantised, stored
from publisher.checkpoints.headers import (
    INDEX,
    Reader,
    TensorHeader,
    TensorReader,
    in_blocks,
    read_config,
    read_headers,
    require_held,
)
from publisher.errors import FetchError
from publisher.hub import client as hub
from publisher.records.checkpoint import Checkpoint, FileDigest, Snapshot

if TYPE_CHECKING:
    import torch

WEIGHTS = ".safetensors"
_AHEAD = 1 << 23  # bytes that small neighbours in a file may have together to come in one request


def headers_of(snapshot: Snapshot) -> dict[str, TensorHeader]:
    """Name, dtype, shape and the file's digest of every tensor, sorted by name; FP8 weights with scales dequantised.

    Raises:
        FetchError: missing or damaged files, no tensors, one that the index names and no shard holds, or scales of FP8
            weights that do not fit.
        HubError: a streamed file cannot be read.
    """
    headers = _streamed_headers(snapshot) if snapshot.streamed else _local_headers(snapshot)
    return dequantised(headers, lambda: read_config(snapshot.folder), where=snapshot.checkpoint.short)


def _local_headers(snapshot: Snapshot) -> dict[str, TensorHeader]:
    digests = {file.name: file.sha256 for file in snapshot.checkpoint.files}
    headers = read_headers(snapshot.folder)
    return {name: replace(header, sha256=digests.get(header.file.name)) for name, header in headers.items()}


@contextmanager
def reader_of(snapshot: Snapshot, headers: Mapping[str, TensorHeader]) -> Iterator[Reader]:
    """What reads the snapshot's tensors; `headers` as from `headers_of`, of all of them or of some.

    The headers may come from another machine. One that has not the snapshot's folder reads a checkpoint of the Hub
    there.

    Raises:
        FetchError: a local checkpoint is not on this machine.
    """
    remote = _is_remote(snapshot)
    files = {name: replace(header, file=snapshot.folder / header.file.name) for name, header in stored(headers).items()}
    with nullcontext(StreamReader(snapshot, files)) if remote else TensorReader(files) as reader:
        yield Dequantising(reader, headers) if len(files) > len(headers) else reader


def _is_remote(snapshot: Snapshot) -> bool:
    if snapshot.streamed or snapshot.folder.is_dir():
        return snapshot.streamed
    if snapshot.checkpoint.kind == "hub":
        return True
    raise not_here(snapshot)


def not_here(snapshot: Snapshot) -> FetchError:
    """A local checkpoint is not on this machine, which is one of several."""
    return FetchError(
        f"there is no {snapshot.folder} on {socket.gethostname()}",
        expected="a local checkpoint at the same path on every machine of the cluster",
        next_step="mount it there, or name a checkpoint of the Hub in the manifest",
    )


# --- source and base ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sides:
    """Source and base, in this order, opened for reading.

    Attributes:
        snapshots: what they are.
        headers: of all their tensors, as from `headers_of`.
        readers: of their tensors.
    """

    snapshots: tuple[Snapshot, Snapshot]
    headers: tuple[Mapping[str, TensorHeader], Mapping[str, TensorHeader]]
    readers: tuple[Reader, Reader]

    def pair(self, name: str) -> "TensorPair":
        """The tensor that both have by this name."""
        return TensorPair(name, *(headers[name] for headers in self.headers))


@contextmanager
def opened(source: Snapshot, base: Snapshot) -> Iterator[Sides]:
    """Both checkpoints, with their headers read.

    Raises:
        FetchError, HubError: as `headers_of`.
    """
    snapshots, headers = (source, base), (headers_of(source), headers_of(base))
    with reader_of(source, headers[0]) as sources, reader_of(base, headers[1]) as bases:
        yield Sides(snapshots, headers, (sources, bases))


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The tensor of one name on both sides, with what it takes to read it on any machine."""

    name: str
    source: TensorHeader
    base: TensorHeader

    @property
    def size(self) -> int:
        """Bytes of the larger one, as stored."""
        return max(header.stop - header.start for header in (self.source, self.base))


@contextmanager
def readers_of(snapshots: tuple[Snapshot, Snapshot], pairs: Sequence[TensorPair]) -> Iterator[tuple[Reader, Reader]]:
    """Readers of source and base, for these tensors."""
    source, base = snapshots
    with (
        reader_of(source, {pair.name: pair.source for pair in pairs}) as sources,
        reader_of(base, {pair.name: pair.base for pair in pairs}) as bases,
    ):
        yield sources, bases


def elsewhere(snapshot: Snapshot) -> Snapshot:
    """As another process may look for it, which works in another folder."""
    return snapshot.model_copy(update={"folder": snapshot.folder.absolute()})


# --- headers by ranges --------------------------------------------------------------------------------------


_known: dict[str, dict[str, Entry]] = {}  # by the file's digest: a file that both repositories have is asked for once


def _streamed_headers(snapshot: Snapshot) -> dict[str, TensorHeader]:
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
        _known[file.sha256] = _places(snapshot, file)
    place = snapshot.folder / file.name
    return {
        name: TensorHeader(entry.dtype, entry.shape, place, file.sha256, entry.start, entry.stop)
        for name, entry in _known[file.sha256].items()
    }


def _places(snapshot: Snapshot, file: FileDigest) -> dict[str, Entry]:
    """The header of a remote file, read by two requests."""
    try:
        length = header_length(_taken(snapshot, file, 0, LENGTH_BYTES), file_size=file.size)
        return parse_header(_taken(snapshot, file, LENGTH_BYTES, LENGTH_BYTES + length), file_size=file.size)
    except ValueError as error:
        raise _damaged(snapshot, file, str(error)) from None


def _taken(snapshot: Snapshot, file: FileDigest, start: int, stop: int) -> bytes:  # noqa: PLR0917 - a range
    stop = min(stop, file.size)
    return bytes(_Range(snapshot.checkpoint, file.name, start=start, stop=stop).take(max(stop - start, 0)))


def _damaged(snapshot: Snapshot, file: FileDigest, why: str) -> FetchError:
    return FetchError(
        f"{file.name} of {snapshot.checkpoint.short} ({file.size:,} bytes) is not a whole safetensors file: {why}",
        expected="a file as long as its header says",
        next_step="name a commit whose weights are whole",
    )


# --- tensors by ranges --------------------------------------------------------------------------------------


class StreamReader:
    """Reads tensors of a streamed snapshot by name; small neighbours in a file come in one request, ahead of time."""

    def __init__(self, snapshot: Snapshot, headers: Mapping[str, TensorHeader]) -> None:
        """`headers` as from `headers_of`."""
        self._snapshot = snapshot
        self._headers = headers
        order = sorted(self._headers.items(), key=lambda item: (item[1].file, item[1].start, item[1].stop))
        self._next = {name: after for (name, one), (after, other) in pairwise(order) if one.file == other.file}
        self._ahead: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> "torch.Tensor":
        """The tensor, in its stored dtype."""
        tensor = self._ahead.pop(name, None)
        if tensor is None:
            fetched = self._fetched(self._run(name))
            tensor, self._ahead = fetched.pop(name), fetched
        return tensor

    def blocks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """The tensor flat, block by block as it arrives; whoever stops early leaves the rest unread."""
        header = self._headers[name]
        if header.stop - header.start <= _AHEAD:
            yield from in_blocks(self.read(name), elements)
            return
        width, total = DTYPES[header.dtype][1], header.stop - header.start
        arriving = self._range(header, header)
        for start in range(0, total, elements * width):
            block = arriving.take(min(elements * width, total - start))
            yield _tensor(block, header.dtype, shape=(len(block) // width,))

    def _run(self, name: str) -> list[str]:
        """This tensor, and those after it in its file that fit into the same request."""
        run, first = [name], self._headers[name]
        while (after := self._next.get(run[-1])) and self._headers[after].stop - first.start <= _AHEAD:
            run.append(after)
        return run

    def _fetched(self, run: Sequence[str]) -> "dict[str, torch.Tensor]":
        headers = {name: self._headers[name] for name in run}
        arriving = self._range(headers[run[0]], headers[run[-1]])
        return {
            name: _tensor(arriving.take(header.stop - header.start), header.dtype, shape=header.shape)
            for name, header in headers.items()
        }

    def _range(self, first: TensorHeader, last: TensorHeader) -> "_Range":
        return _Range(self._snapshot.checkpoint, first.file.name, start=first.start, stop=last.stop)


class _Range:
    """Part of a remote file, from front to back; asked for when something is taken from it."""

    def __init__(self, checkpoint: Checkpoint, filename: str, *, start: int, stop: int) -> None:
        self._pieces = hub.stream(checkpoint.name, checkpoint.revision, filename=filename, start=start, stop=stop)
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytearray:
        """The next bytes, in one buffer of their own."""
        block, filled = bytearray(size), 0
        while filled < size:
            self._rest = self._rest or memoryview(next(self._pieces))
            part = self._rest[: size - filled]
            block[filled : filled + len(part)] = part
            filled, self._rest = filled + len(part), self._rest[len(part) :]
        return block


def _tensor(content: bytearray, dtype: str, *, shape: tuple[int, ...]) -> "torch.Tensor":
    """These bytes as a tensor, without a copy."""
    import torch

    kind = getattr(torch, DTYPES[dtype][0])
    return torch.frombuffer(content, dtype=kind).reshape(shape) if content else torch.empty(shape, dtype=kind)
