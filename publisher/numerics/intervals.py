"""The rounding intervals of a merge: what its rounding says about the delta, element by element.

A tuned value F is the result of a rounding, so what was added to the base W lies where W + x rounds to F: an interval
about D = F - W, half a step of F's dtype to either side. Towards zero it is a quarter of a step where F is a power of
two, since the steps below one are half as long. Steps are those of bfloat16 and float16, in which a tuned weight may
be; float32 has none wide enough to tell anything. Where the merge was in float16 and the result then became bfloat16,
it was rounded in both: an interval ends half a step of float16 beyond the one of an even F, and before that of an odd.

A merge whose delta was rounded first (PEFT's `safe_merge`, or a product taken in bfloat16) says more and less at once:
`W + round(x)` rounds to F for the few numbers of the dtype that the interval holds, and x for whatever rounds to them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from publisher.numerics.delta import delta_of, row_blocks
from publisher.numerics.dtypes import step_of

Arithmetic = Literal["one rounding", "update rounded first"]
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Where each element of the delta lies: centre - half to centre + half.

    Attributes:
        centre: float32, (m, n).
        half: float32, (m, n); 0 where this arithmetic cannot give the tuned value, whatever was added.
    """

    centre: Tensor
    half: Tensor

    @property
    def transposed(self) -> "Intervals":
        """The intervals of the transposed delta, as a view."""
        return Intervals(self.centre.T, self.half.T)

    def rows(self, rows: slice) -> "Intervals":
        """Return the intervals of these rows, contiguous in memory."""
        return Intervals(self.centre[rows].contiguous(), self.half[rows].contiguous())


def intervals(*, base: Tensor, tuned: Tensor, arithmetic: Arithmetic) -> Intervals:
    """Return the intervals in which the elements of the delta lie.

    Args:
        base: the base weight, (m, n), in the dtype that it was merged in.
        tuned: the weight of the merged fine-tune, (m, n), bfloat16 or float16.
        arithmetic: how it was merged.

    Returns:
        The intervals, float32 (m, n).
    """
    centre = delta_of(base=base, tuned=tuned)
    half = torch.empty_like(centre)
    for rows in row_blocks(tuned):
        below, above = _reach(tuned[rows], through=base.dtype)
        if arithmetic == "update rounded first":
            low, high = _rounding_into(centre[rows] - below, centre[rows] + above, base=base[rows], tuned=tuned[rows])
            centre[rows] = (low + high) / 2
            half[rows] = ((high - low) / 2).clamp_min(0)
        else:
            centre[rows] += (above - below) / 2
            half[rows] = (above + below) / 2
    return Intervals(centre, half)


def _reach(values: Tensor, *, through: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return how far the numbers that round to `values` reach below and above them, float32.

    They are rounded to `through` first, where that is given and has longer numbers.
    """
    wide = values.float()
    outward = step_of(wide.clone(), values.dtype) / 2
    info = torch.finfo(values.dtype)
    is_power_of_two = wide.abs() == outward * (2 / info.eps)
    inward = torch.where(is_power_of_two & (wide.abs() > info.smallest_normal), outward / 2, outward)
    if (values.dtype, through) == (torch.bfloat16, torch.float16):
        first = step_of(wide.clone(), torch.float16) / 2
        is_even = (values.view(torch.int16) & 1) == 0
        outward, inward = (_rounded_before(reach, first, is_even=is_even) for reach in (outward, inward))
    positive = wide > 0
    return torch.where(positive, inward, outward), torch.where(positive, outward, inward)


def _rounded_before(reach: Tensor, first: Tensor, *, is_even: Tensor) -> Tensor:
    """Return the reach of numbers that a first rounding, to within `first`, may have moved to the middle or past it.

    From the very middle the second rounding goes to the even neighbour. Where the first is the coarser one, it decides.
    """
    return torch.where(first < reach, torch.where(is_even, reach + first, reach - first), first)


def _rounding_into(low: Tensor, high: Tensor, *, base: Tensor, tuned: Tensor) -> tuple[Tensor, Tensor]:
    """Return where x lies if it rounds to one of the dtype's numbers between low and high.

    The low end is above the high one where there is no such number. Sums with the numbers at the ends are often ties,
    which round to F or to its neighbour: they are tried.
    """
    first = low.to(tuned.dtype)
    last = high.to(tuned.dtype)
    wrong = merged(base=base, product=first.float(), dtype=tuned.dtype) != tuned
    first = torch.where(wrong, (first.float() + 2 * _reach(first)[1]).to(tuned.dtype), first)
    wrong = merged(base=base, product=last.float(), dtype=tuned.dtype) != tuned
    last = torch.where(wrong, (last.float() - 2 * _reach(last)[0]).to(tuned.dtype), last)
    return first.float() - _reach(first)[0], last.float() + _reach(last)[1]


def merged(*, base: Tensor, product: Tensor, dtype: torch.dtype, arithmetic: Arithmetic = "one rounding") -> Tensor:
    """Merge a product BA into the base as this arithmetic does it.

    Args:
        base: the base weight, (m, n), in the dtype that it is merged in: the sum is rounded to that first.
        product: BA, (m, n), float32.
        dtype: of the merged weight.
        arithmetic: `one rounding` rounds the sum alone; `update rounded first` rounds the product to `dtype` before.

    Returns:
        The merged weight, (m, n), in `dtype`.
    """
    if arithmetic == "update rounded first":
        product = product.to(dtype).float()
    return torch.add(base, product).to(base.dtype).to(dtype)


def exact_share(*, base: Tensor, tuned: Tensor, b: Tensor, a: Tensor, arithmetic: Arithmetic) -> float:
    """Return the share of the elements for which base and product, merged in this way, give the tuned value.

    Args:
        base: the base weight, (m, n), in the dtype that it is merged in.
        tuned: the weight of the merged fine-tune, (m, n).
        b: the left factor, (m, r).
        a: the right factor, (r, n).
        arithmetic: how the product is merged.

    Returns:
        A share between 0 and 1.
    """
    same = 0
    wide = a.float()
    for rows in row_blocks(tuned):
        product = b[rows].float() @ wide
        again = merged(base=base[rows], product=product, dtype=tuned.dtype, arithmetic=arithmetic)
        same += int((again == tuned[rows]).sum())
    return same / tuned.numel()
