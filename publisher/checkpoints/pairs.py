"""Two checkpoints beside each other: the base and the tuned one, and the tensors that both have.

It refuses nothing by itself. The base always comes first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from publisher.checkpoints.converting_reader import in_parts_beside
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.nf4_reader import QuantisedReader, quantised_headers
from publisher.checkpoints.reading import Reader
from publisher.checkpoints.snapshots import headers_of, reader_of
from publisher.records.checkpoint import QuantisedBase, Snapshot

T = TypeVar("T")
Naming = Callable[[Mapping[str, TensorHeader]], Mapping[str, TensorHeader]]


class Sides(NamedTuple, Generic[T]):
    """The same thing of both checkpoints."""

    base: T
    tuned: T


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """The tensor of one name in both checkpoints, with what it takes to read it on any machine."""

    name: str
    base: TensorHeader
    tuned: TensorHeader

    @property
    def size(self) -> int:
        """Bytes of the larger one, as stored."""
        return max(header.stop - header.start for header in (self.base, self.tuned))


@dataclass(frozen=True, slots=True)
class CheckpointPair:
    """Both checkpoints, open for reading.

    Attributes:
        snapshots: what they are.
        headers: of all their tensors, as from `headers_of`.
        readers: of their tensors.
    """

    snapshots: Sides[Snapshot]
    headers: Sides[Mapping[str, TensorHeader]]
    readers: Sides[Reader]

    def on_quantised(self, how: QuantisedBase | None) -> "CheckpointPair":
        """Return the pair with its base read in this quantisation; as it is where that is None."""
        if how is None:
            return self
        headers = quantised_headers(self.headers.base, how)
        base = self.snapshots.base.model_copy(update={"quantised": how})
        return CheckpointPair(
            Sides(base=base, tuned=self.snapshots.tuned),
            Sides(base=headers, tuned=self.headers.tuned),
            Sides(base=QuantisedReader(self.readers.base, headers), tuned=self.readers.tuned),
        )

    def tensors(self, name: str) -> TensorPair:
        """Return the tensor that both have by this name."""
        return TensorPair(name=name, base=self.headers.base[name], tuned=self.headers.tuned[name])


@contextmanager
def open_pair(*, base: Snapshot, tuned: Snapshot, names: Naming) -> Iterator[CheckpointPair]:
    """Open both checkpoints for as long as the block runs, with their headers read.

    Args:
        base: the base.
        tuned: the merged fine-tune.
        names: gives headers by the names of the model class.

    Yields:
        Both, by these names.

    Raises:
        FetchError, HubError: as `headers_of` and `reader_of`.
    """
    of_both = Sides(base=quantised_headers(names(headers_of(base)), base.quantised), tuned=names(headers_of(tuned)))
    headers = Sides[Mapping[str, TensorHeader]](
        base=in_parts_beside(of_both.base, of_both.tuned), tuned=in_parts_beside(of_both.tuned, of_both.base)
    )
    with reader_of(base, headers.base) as of_base, reader_of(tuned, headers.tuned) as of_tuned:
        yield CheckpointPair(Sides(base=base, tuned=tuned), headers, Sides(base=of_base, tuned=of_tuned))


@contextmanager
def readers_of(snapshots: Sides[Snapshot], pairs: Sequence[TensorPair]) -> Iterator[Sides[Reader]]:
    """Open readers of these tensors, on this or another machine, for as long as the block runs.

    Raises:
        FetchError: a local checkpoint is not on this machine.
    """
    with (
        reader_of(snapshots.base, {pair.name: pair.base for pair in pairs}) as of_base,
        reader_of(snapshots.tuned, {pair.name: pair.tuned for pair in pairs}) as of_tuned,
    ):
        yield Sides(base=of_base, tuned=of_tuned)
