"""Whether a fine-tune was merged into a quantised base: a QLoRA, whose merge took the dequantised weights with it.

Then every linear layer differs from the base, adapted or not, by the error of the quantisation; that error is known
in every element, and what differs contains it or has nothing to do with it. Layers that were quantised and not adapted
are the dequantised base, in every bit. Which of them there are, and which settings leave the least, tell the rest:
double quantisation, and the dtype of the weights. Of any other fine-tune a few blocks are looked at. It refuses
nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from publisher.checkpoints import nf4
from publisher.checkpoints.dtypes import ADAPTER_DTYPES, torch_dtype
from publisher.checkpoints.pairs import CheckpointPair
from publisher.extraction.pair_job import BLOCK
from publisher.numerics.merge_arithmetic import SHOWN
from publisher.numerics.svd import decompose
from publisher.records.checkpoint import Dtype, Quantisation, QuantisedBase

_SIDE = 256  # rows and columns of a part
_SAMPLES = 5  # weights whose beginnings are looked at
_WHOLE = 6  # weights that are compared in every setting
_BY_CHANCE = 6.0  # deviations, twice: of the product of noise and what two settings are apart
_KINDS: tuple[str, ...] = ("nf4", "fp4")
_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")


def quantised_base(both: CheckpointPair, changed: Sequence[str]) -> QuantisedBase | None:
    """Return the quantisation of the base that a fine-tune was merged into, and the weights that it is of.

    Args:
        both: base and tuned, open for reading; the base as it is stored.
        changed: names of the linear weights that differ.

    Returns:
        The quantisation; None where the fine-tune was merged into the base as it is.
    """
    plain = [name for name in changed if _may_be_quantised(name, both)]
    step = max(1, len(plain) // _SAMPLES)
    found = [kind for name in plain[::step][:_SAMPLES] if (kind := _kind(name, both))]
    if not found:
        return None
    kind = max(_KINDS, key=found.count)
    tensors = [name for name in plain if _kind(name, both) == kind]
    way = _settings(kind, tensors, both)
    return QuantisedBase(**dict(way), tensors=tuple(sorted(tensors)))


def _may_be_quantised(name: str, both: CheckpointPair) -> bool:
    base, tuned = both.headers.base[name], both.headers.tuned[name]
    dtypes = {header.dtype for header in (base, tuned)}
    is_plain = not any(part for header in (base, tuned) for part in (header.scale, header.mxfp4))
    return is_plain and dtypes <= {"BF16", "F16", "F32"}


def _kind(name: str, both: CheckpointPair) -> str:
    """Return by which quantisation the beginning of this weight has its error in the delta; empty where by none."""
    columns = both.headers.base[name].shape[-1]
    rows = max(1, BLOCK // columns)
    sides = (next(iter(reader.blocks(name, rows * columns))).float() for reader in both.readers)
    base, tuned = (side.reshape(-1, columns) for side in sides)
    if not bool((tuned - base).isfinite().all()):  # others refuse it by name
        return ""
    errors = {kind: _error(kind, base) for kind in _KINDS}
    found = _held(errors, delta=tuned - base)
    return min(found, key=lambda kind: float((tuned - base - errors[kind]).norm()), default="")


def _error(kind: str, base: Tensor) -> Tensor:
    way = Quantisation.model_validate({"kind": kind, "double": False, "dtype": "float32"})
    return nf4.dequantised(base, way) - base


def _held(errors: Mapping[str, Tensor], *, delta: Tensor) -> list[str]:
    """Return the kinds of quantisation whose error the delta contains, beyond what chance can give.

    A large update hides it. Then a part of the delta is looked at without its leading singular vectors: a few hundred
    rows and columns, of which at least a tenth of the error must be left.
    """
    found = [kind for kind, error in errors.items() if _is_shared(delta, error, least=0.5)]
    if found:
        return found
    part = delta[:_SIDE, :_SIDE].contiguous()
    svd = decompose(part, rank=max(1, min(part.shape) // 4), threshold=0.0, name="quantisation")
    part = torch.addmm(part, svd.u * svd.s, svd.v.T, alpha=-1)
    return [kind for kind, error in errors.items() if _is_shared(part, error[:_SIDE, :_SIDE], least=0.1)]


def _is_shared(delta: Tensor, error: Tensor, *, least: float) -> bool:
    """Return whether a delta contains at least this share of an error, in more than chance can give."""
    products = (delta * error).double()
    total, deviation = float(products.sum()), math.sqrt(float(products.square().sum()))
    return total > max(SHOWN * deviation, least * float(error.double().square().sum()), 0.0)


def _settings(kind: str, tensors: Sequence[str], both: CheckpointPair) -> Quantisation:
    """Return the setting that most of a few weights equal, and among several, the one whose fits leave the least."""
    ways = list(_ways(kind, tensors[0], both))
    sizes = sorted(tensors, key=lambda name: (math.prod(both.headers.base[name].shape), name))
    spread = tensors[:: max(1, len(tensors) // _WHOLE)][:_WHOLE]
    names = list(dict.fromkeys([*sizes[:2], *spread]))
    equals = {way: [name for name in names if _equals(name, way, both)] for way in ways}
    most = max(map(len, equals.values()))
    best = [way for way in ways if len(equals[way]) == most]
    adapted = [name for name in names if name not in equals[best[0]]]
    return _closest(best, [_left_over(name, best, both) for name in adapted])


def _closest(ways: Sequence[Quantisation], left: Sequence[Sequence[Tensor]]) -> Quantisation:
    """Return the setting that leaves least over all weights; of those that chance may have put apart, the likeliest.

    Args:
        ways: the settings, the likeliest first.
        left: for each weight, what each setting leaves of its delta.
    """
    squares = [sum(float(each[place].square().sum()) for each in left) for place in range(len(ways))]
    best = min(range(len(ways)), key=squares.__getitem__)
    spread = math.sqrt(squares[best] / max(1, sum(each[best].numel() for each in left)))
    for place, way in enumerate(ways):
        apart = math.sqrt(sum(float((each[place] - each[best]).square().sum()) for each in left))
        if squares[place] - squares[best] <= _BY_CHANCE * spread * apart:
            return way
    return ways[best]


def _left_over(name: str, ways: Sequence[Quantisation], both: CheckpointPair) -> list[Tensor]:
    """Return what each setting leaves of a part of the delta, without the leading singular vectors of the first one's.

    These are those of the update, which is the same in all.
    """
    base, tuned = both.readers.base.read(name), both.readers.tuned.read(name).float()
    deltas = [(tuned - nf4.dequantised(base, way).float())[:_SIDE, :_SIDE].contiguous() for way in ways]
    found = decompose(deltas[0], rank=max(1, min(deltas[0].shape) // 4), threshold=0.0, name=name)
    halves = [delta - found.u @ (found.u.T @ delta) for delta in deltas]
    return [half - (half @ found.v) @ found.v.T for half in halves]


def _ways(kind: str, name: str, both: CheckpointPair) -> Iterator[Quantisation]:
    """Yield the settings, the likeliest first: the dtype of the release, then that of the base's file."""
    likely = [torch_dtype(header) for header in (both.headers.tuned[name], both.headers.base[name])]
    order = [*likely, *ADAPTER_DTYPES.values()]
    dtypes = sorted(_DTYPES, key=lambda dtype: order.index(ADAPTER_DTYPES[dtype]))
    for dtype, double in product(dtypes, (True, False)):
        yield Quantisation.model_validate({"kind": kind, "double": double, "dtype": dtype})


def _equals(name: str, way: Quantisation, both: CheckpointPair) -> bool:
    return nf4.within(nf4.dequantised(both.readers.base.read(name), way), both.readers.tuned.read(name))
