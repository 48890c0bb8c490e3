"""Two checkpoints side by side: the base and the tuned one, and the tensors that both have."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.reading import Reader
from publisher.checkpoints.snapshots import headers_of, reader_of
from publisher.records.checkpoint import Snapshot


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
