"""The rounding intervals of a merge: what its rounding says about the update, element by element.

A released value F is the result of a rounding, so the update that was added to the base W lies where W + x rounds to
F: an interval about D = F - W, half a step of F's dtype to either side. Towards zero it is a quarter of a step where
F is a power of two, since the steps below one are half as long. Steps are those of bf16 and fp16, in which a source may
be; float32 has none wide enough to tell anything.

A merge whose update was rounded first (PEFT's `safe_merge`, or a product taken in bf16) says more and less at once:
`W + round(x)` rounds to F for the few numbers of the dtype that the interval holds, and x for whatever rounds to them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from publisher.numerics.lora import row_blocks, step_of, update_of

Arithmetic = Literal["one rounding", "update rounded first"]
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Where each element of the update lies: centre - half to centre + half.

    Attributes:
        centre: float32, (m, n).
        half: float32, (m, n); 0 where this arithmetic cannot give the released value, whatever the update.
    """

    centre: Tensor
    half: Tensor

    @property
    def transposed(self) -> "Intervals":
        """The same of the transposed update; a view."""
        return Intervals(self.centre.T, self.half.T)

    def rows(self, rows: slice) -> "Intervals":
        """These rows, laid out one after the other."""
        return Intervals(self.centre[rows].contiguous(), self.half[rows].contiguous())


def intervals(base: Tensor, source: Tensor, arithmetic: Arithmetic) -> Intervals:
    """The intervals of the update between `base` (m, n), any float dtype, and `source` (m, n), bf16 or fp16."""
    centre = update_of(base, source)
    half = torch.empty_like(centre)
    for rows in row_blocks(source):
        below, above = _around(source[rows])
        if arithmetic == "update rounded first":
            ends = centre[rows] - below, centre[rows] + above
            low, high = _rounding_into(*ends, base=base[rows], source=source[rows])
            centre[rows], half[rows] = (low + high) / 2, ((high - low) / 2).clamp_min(0)
        else:
            centre[rows] += (above - below) / 2
            half[rows] = (above + below) / 2
    return Intervals(centre, half)


def _around(source: Tensor) -> tuple[Tensor, Tensor]:
    """How far the numbers that round to `source` reach below and above it; float32."""
    values = source.float()
    outward = step_of(values.clone(), source.dtype) / 2
    shorter = (values.abs() == outward * (2 / torch.finfo(source.dtype).eps)) & (
        values.abs() > torch.finfo(source.dtype).smallest_normal
    )
    inward = torch.where(shorter, outward / 2, outward)
    positive = values > 0
    return torch.where(positive, inward, outward), torch.where(positive, outward, inward)


def _rounding_into(low: Tensor, high: Tensor, *, base: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Where x lies if it rounds to one of the dtype's numbers between low and high; low above high if there is none.

    Sums with those at the ends are often ties, which round to F or to its neighbour: trying tells.
    """
    first, last = low.to(source.dtype), high.to(source.dtype)
    wrong = merged(base, first.float(), dtype=source.dtype) != source
    first = torch.where(wrong, (first.float() + 2 * _around(first)[1]).to(source.dtype), first)
    wrong = merged(base, last.float(), dtype=source.dtype) != source
    last = torch.where(wrong, (last.float() - 2 * _around(last)[0]).to(source.dtype), last)
    return first.float() - _around(first)[0], last.float() + _around(last)[1]


def merged(base: Tensor, product: Tensor, *, dtype: torch.dtype, arithmetic: Arithmetic = "one rounding") -> Tensor:
    """Base (m, n) with the update `product`, float32, merged into `dtype` as this arithmetic does it."""
    if arithmetic == "update rounded first":
        product = product.to(dtype).float()
    return base.to(dtype).float().add_(product).to(dtype)
