"""What a weight is after bitsandbytes has quantised it to 4 bits and dequantised it again: QLoRA trains on that.

Blocks of 64 elements in the order in which they are stored; each is divided by its largest magnitude, and every element
becomes the nearest of 16 values: those of NF4 (Dettmers et al. 2023, appendix E, https://arxiv.org/abs/2305.14314), or
of FP4. Double quantisation takes the mean off the magnitudes, and stores what is left in 8 bits of a dynamic map, with
a float32 scale for each 256 of them. All is done in float32, and the product is rounded to the dtype that the weight
had. The values are those of bitsandbytes/functional.py and csrc/kernels.cu.
"""

from functools import cache

import torch
from torch import Tensor

from publisher.checkpoints.dtypes import ADAPTER_DTYPES
from publisher.records.checkpoint import Quantisation

BLOCK = 64  # elements that share a magnitude
STATISTICS = 256  # magnitudes that share a scale, where they are quantised themselves
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
FP4 = (0.0, 0.005208333333, 0.16666667, 0.25, 0.33333333, 0.5, 0.66666667, 1.0)  # and the same below zero
FP4_MIDDLES = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)  # as written there
OTHERWISE = 1e-4  # of the elements, which another machine may round otherwise
_AT_ONCE = 1 << 22  # elements


def dequantised(weight: Tensor, how: Quantisation) -> Tensor:
    """Return what a weight is once it is quantised and dequantised.

    Args:
        weight: of any shape, any float dtype.
        how: kind, double quantisation, and the dtype that the weight is cast to before, and has afterwards.

    Returns:
        The weight in the dtype of `how`, of the same shape.
    """
    dtype = ADAPTER_DTYPES[how.dtype]
    blocks = _padded(weight.to(dtype).reshape(-1), BLOCK)
    magnitudes = _magnitudes(blocks)
    scales = _quantised_magnitudes(magnitudes) if how.double else magnitudes
    found = torch.empty_like(blocks)
    step = _AT_ONCE // BLOCK
    for start in range(0, blocks.shape[0], step):
        part = slice(start, start + step)
        divided = _divided(blocks[part], magnitudes[part])
        values = _nearest(divided, NF4) if how.kind == "nf4" else _nearest_of_fp4(divided)
        found[part] = values * scales[part, None]
    return found.reshape(-1)[: weight.numel()].reshape(weight.shape)


def within(base: Tensor, tuned: Tensor) -> bool:
    """Return whether a weight is the dequantised base.

    Machines take the mean and the quotients of a quantisation with other last digits: one element in ten thousand may
    round to its neighbour.

    Args:
        base: the base's weight, dequantised.
        tuned: the merged fine-tune's, in any float dtype.
    """
    return int((base.to(tuned.dtype) != tuned).sum()) <= OTHERWISE * tuned.numel()


def _padded(flat: Tensor, size: int) -> Tensor:
    """Return the vector as rows of this size; zeros fill up the last, and change no largest magnitude."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).reshape(-1, size)


def _magnitudes(blocks: Tensor) -> Tensor:
    return torch.maximum(blocks.amax(dim=1), -blocks.amin(dim=1)).float()


def _divided(blocks: Tensor, magnitudes: Tensor) -> Tensor:
    return (blocks.float() * (1.0 / magnitudes.clamp(min=1e-38))[:, None]).clamp_(-1, 1)


def _nearest(values: Tensor, code: tuple[float, ...]) -> Tensor:
    """Return for each element the nearest value of an ascending code, float32; of two, the lower."""
    known = torch.tensor(code, dtype=torch.float32, device=values.device)
    return known[torch.bucketize(values, (known[:-1] + known[1:]) / 2)]


def _nearest_of_fp4(values: Tensor) -> Tensor:
    """Return for each element the nearest value of FP4, float32.

    Quotients of short numbers often lie in the very middle of two: the middles must be those of bitsandbytes.
    """
    known, middles = (torch.tensor(each, dtype=torch.float32, device=values.device) for each in (FP4, FP4_MIDDLES))
    return known[torch.bucketize(values.abs(), middles)].copysign(values)


def _quantised_magnitudes(magnitudes: Tensor) -> Tensor:
    """Return the magnitudes as double quantisation leaves them, float32."""
    offset = magnitudes.mean()
    rows = _padded(magnitudes - offset, STATISTICS)
    scales = _magnitudes(rows)
    found = _nearest(_divided(rows, scales), dynamic_map()) * scales[:, None]
    return found.reshape(-1)[: magnitudes.numel()] + offset


@cache
def dynamic_map() -> tuple[float, ...]:
    """Return the 256 values of the signed dynamic 8-bit map, ascending (Dettmers 2015, https://arxiv.org/abs/1511.04561).

    A byte has a sign, an exponent of ten from 0 to -6, and as many bits of a linear fraction as the exponent leaves:
    none at 10^-6, six at 1.
    """
    values = [0.0, 1.0]
    for bits in range(7):
        edges = torch.linspace(0.1, 1, 2**bits + 1, dtype=torch.float32)
        middles = (10 ** (bits - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += [*middles, *(-middle for middle in middles)]
    return tuple(sorted(values))
