"""Whether a tuned weight is a base plus a low rank of which every row was scaled afterwards, as a merged DoRA is.

DoRA (Liu et al. 2024, https://arxiv.org/abs/2402.09353) trains a magnitude for each row of W + BA, so that the merged
weight is F = diag(s) (W + BA). F - W has full rank wherever s is not 1. But with the right s, diag(1/s) F - W = BA has
a low one. Both are found in turn: the rank-k part L of diag(1/s) F - W by an SVD, and s by least squares of each row of
F on that of W + L.
"""

import math

import torch
from torch import Tensor

from publisher.numerics.delta import squared_norm
from publisher.numerics.noise import rounding_noise
from publisher.numerics.svd import decompose

SIDE = 512  # rows and columns that are looked at: a part of a low rank has a low rank, and the same scales
PASSES = 12
LEFT = 2.0  # times the rounding noise, which PEFT's three roundings of a DoRA in bfloat16 stay below
GAIN = 2.0  # times less must be left than without the scaling, where that is no more than noise
_SETTLED = 0.99  # of what the pass before left
CERTAIN = 100.0  # times less, where more than noise is left: of float32, whose noise is next to nothing


def is_row_scaled(name: str, *, base: Tensor, tuned: Tensor) -> bool:
    """Return whether scaled rows, or columns, explain what a low rank alone does not.

    Args:
        name: the tensor's name, which seeds the arithmetic.
        base: the base weight, (m, n), any float dtype.
        tuned: the weight of the merged fine-tune, (m, n).

    Returns:
        Whether diag(1/s) F - W has a low rank but for rounding noise, and F - W has not, for rows or for columns.
    """
    base, tuned = (weight[:SIDE, :SIDE] for weight in (base, tuned))
    noise = rounding_noise(tuned, name=name).norm
    weight, release = base.float(), tuned.float()
    plain = _left_over(name, weight, release, passes=1)
    scaled = (_left_over(name, one, other, passes=PASSES) for one, other in ((weight, release), (weight.T, release.T)))
    return any((left <= LEFT * noise and GAIN * left < plain) or CERTAIN * left < plain for left in scaled)


def _left_over(name: str, weight: Tensor, release: Tensor, *, passes: int) -> float:
    """Return the norm of what a low rank leaves of the release; with more than one pass, each row may be scaled."""
    rank = max(1, min(weight.shape) // 4)
    low, scale = torch.zeros_like(weight), torch.ones(weight.shape[0], 1)
    left = math.inf
    for _ in range(passes):
        if passes > 1:
            fitted = weight + low
            along, squares = ((other * fitted).sum(1, keepdim=True) for other in (release, fitted))
            scale = torch.where(along > 0, along / squares, 1.0)
        delta = release / scale - weight
        if not bool(torch.isfinite(delta).all()):
            return math.inf
        found = decompose(delta, rank=rank, threshold=0.0, name=name)
        low = (found.u * found.s) @ found.v.T
        before, left = left, math.sqrt(squared_norm(scale * (delta - low)))
        if left > _SETTLED * before:
            break
    return left
