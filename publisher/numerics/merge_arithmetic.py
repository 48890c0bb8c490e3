"""In which dtypes a release was merged: found in its weights, since nothing says it.

A release in bfloat16 comes from a base in float32 in two ways. Either the base is loaded in bfloat16, and BA is added
to what that left of it; or everything is done in float32, and the sum is cast. The two differ by the rounding of the
base, W - cast(W), which is known in every element: what a fit leaves contains it, or has nothing to do with it.

A release may also be stored in a longer dtype than it was merged in. Then all its values are ones of the shorter.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from publisher.numerics.delta import row_blocks
from publisher.numerics.dtypes import step_of
from publisher.numerics.intervals import Arithmetic
from publisher.numerics.svd import Decomposition
from publisher.records.checkpoint import Dtype
from publisher.records.extraction import MergeArithmetic

SHOWN = 8.0  # deviations that chance does not reach
_SHORT = (torch.bfloat16, torch.float16)
_NAMED: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class Merging(NamedTuple):
    """Both weights in the dtypes that they had in the merge.

    Attributes:
        base: the base weight, (m, n): its dtype is the one in which the sum was taken.
        tuned: the weight of the merged fine-tune, (m, n), in the dtype that the sum was rounded to.
    """

    base: Tensor
    tuned: Tensor


def as_merged(*, base: Tensor, tuned: Tensor, arithmetic: MergeArithmetic | None) -> Merging:
    """Return both weights in the dtypes that the evidence says.

    Args:
        base: the base weight as stored, (m, n).
        tuned: the weight of the merged fine-tune as stored, (m, n).
        arithmetic: of the module; None for the usual one, the base in the dtype of `tuned`.

    Returns:
        The weights.
    """
    if arithmetic is None:
        return Merging(base.to(tuned.dtype), tuned)
    return Merging(base.to(_NAMED[arithmetic.merged_in]), tuned.to(_NAMED[arithmetic.rounded_to]))


def arithmetic_of(merging: Merging, *, stored: torch.dtype, roundings: Arithmetic) -> MergeArithmetic | None:
    """Return what the evidence says of a merge; None of the usual one.

    Args:
        merging: the weights in the dtypes of the merge.
        stored: the dtype in which the tuned weight is stored.
        roundings: of the sum alone, or of the update too.

    Returns:
        The arithmetic.
    """
    if {merging.base.dtype, merging.tuned.dtype} == {stored} and roundings == "one rounding":
        return None
    names = {dtype: name for name, dtype in _NAMED.items()}
    return MergeArithmetic(
        merged_in=names[merging.base.dtype], rounded_to=names[merging.tuned.dtype], roundings=roundings
    )


def shortest(weight: Tensor) -> torch.dtype:
    """Return the shortest dtype that holds every value of the weight (m, n): its own, or one of 16 bits."""
    for dtype in _SHORT:
        if weight.dtype not in (dtype, torch.bfloat16) and _holds(dtype, weight):
            return dtype
    return weight.dtype


def _holds(dtype: torch.dtype, weight: Tensor) -> bool:
    blocks = (weight[rows] for rows in row_blocks(weight))
    return all(torch.equal(block.to(dtype).to(block.dtype), block) for block in blocks)


def usual(*, base: Tensor, tuned: Tensor) -> Merging:
    """Return the weights of the usual merge: the base was cast to the release's dtype first.

    Args:
        base: the base weight as stored, (m, n).
        tuned: the weight of the merged fine-tune as stored, (m, n).
    """
    release = shortest(tuned)
    return Merging(base.to(release), tuned.to(release))


def loses_digits(base: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast may round values of the base, so that the order of cast and merge can show."""
    return torch.promote_types(base.dtype, dtype) != dtype


def holds_cast_error(rest: Tensor, *, base: Tensor, cast: Tensor, svd: Decomposition | None = None) -> bool:
    """Return whether the rounding of the base is in the delta, so that the merge was of the base before its cast.

    The two are multiplied element by element and summed. If they are independent, that sum has the expectation 0 and
    the deviation sqrt(sum of the squared products): it lies beyond 8 deviations in no weight that was ever merged.

    Args:
        rest: tuned - cast, float32 (m, n).
        base: the base weight as stored, (m, n).
        cast: the same in the release's dtype.
        svd: what is taken off `rest` before, if anything: beside a large update the rounding is too small to show.

    Returns:
        Whether the merge was of the base before its cast; False too where nothing can be told.
    """
    product = square = 0.0
    for rows in row_blocks(rest):
        left = rest[rows]
        if svd is not None and svd.rank:
            left = torch.addmm(left, svd.u[rows] * svd.s, svd.v.T, alpha=-1)
        each = left * (cast[rows].float() - base[rows].float())
        product -= float(each.double().sum())
        square += float(each.double().square().sum())
    return product > SHOWN * math.sqrt(square)


def kept(*, base: Tensor, tuned: Tensor) -> Iterator[Merging]:
    """Yield the ways in which a base may have been merged that was not cast before, the simplest first.

    Args:
        base: the base weight as stored, (m, n).
        tuned: the weight of the merged fine-tune, (m, n), in the dtype that the sum was rounded to.
    """
    yield Merging(base.float(), tuned)
    if tuned.dtype == torch.bfloat16:
        yield Merging(base.half(), tuned)


def update_steps(delta: Tensor, dtype: torch.dtype, *, others: Tensor | None = None) -> Tensor:
    """Return the steps of an update that is rounded by itself before it is added, as `rounding_noise` takes them.

    Args:
        delta: the update, or the delta, which has nearly the same steps, float32 (m, n).
        dtype: that the update is rounded to.
        others: independent steps that add to these, float32 (m, n).

    Returns:
        The steps, float32 (m, n).
    """
    steps = step_of(delta, dtype)
    return steps if others is None else steps.hypot_(others)
