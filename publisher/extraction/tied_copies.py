"""A tensor that shares another's values, written out in one checkpoint and left to the class in the other.

A language model's head that is tied to the embedding table is the usual case. Written out with the very values of the
table, it is no difference.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair, Sides
from publisher.checkpoints.reading import Reader, in_blocks
from publisher.extraction.pair_job import BLOCK
from publisher.extraction.tensor_bytes import equal


def without_tied_copies(both: CheckpointPair, tied: Mapping[str, str]) -> CheckpointPair:
    """Return the pair less each tensor that one side alone has, and that is there what the class ties it to.

    Args:
        both: base and tuned, open for reading by the class's names.
        tied: of a tensor that shares another's values, the name of that one.

    Returns:
        The pair, which is the same where there is no such tensor.
    """
    alone = {name for name in both.headers.base.keys() ^ both.headers.tuned.keys() if name in tied}
    kept = [
        {
            name: one
            for name, one in headers.items()
            if not (name in alone and _is_copy(name, tied[name], headers, reader=reader))
        }
        for headers, reader in zip(both.headers, both.readers, strict=True)
    ]
    return replace(both, headers=Sides(*kept)) if alone else both


def copied_on_both_sides(both: CheckpointPair, names: Iterable[str], *, tied: Mapping[str, str]) -> frozenset[str]:
    """Return those of the tensors that are on each side what the class ties them to: they change with that one.

    Args:
        both: base and tuned, open for reading by the class's names.
        names: tensors that both have.
        tied: of a tensor that shares another's values, the name of that one.

    Returns:
        Names of tensors that are copies in the base and in the tuned checkpoint.
    """
    sides = list(zip(both.headers, both.readers, strict=True))
    return frozenset(
        name
        for name in names
        if name in tied and all(_is_copy(name, tied[name], headers, reader=reader) for headers, reader in sides)
    )


def _is_copy(name: str, original: str, headers: Mapping[str, TensorHeader], *, reader: Reader) -> bool:
    if original not in headers or headers[original].shape != headers[name].shape:
        return False
    blocks = zip(reader.blocks(original, BLOCK), in_blocks(reader.read(name), BLOCK), strict=True)
    return all(equal(base=one, tuned=copy) for one, copy in blocks)
