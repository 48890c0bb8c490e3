"""From a truncated SVD to factors that merge exactly: which arithmetic merged the release, what of it can be undone.

What a release does not say is inferred: whether its delta was added and rounded once, or rounded by itself before. The
second leaves more noise, which shows in what the SVD leaves where the delta is large, and other intervals, which show
in the share that can be reached.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from publisher.numerics.delta import delta_of, row_blocks, squared_norm
from publisher.numerics.dtypes import step_of
from publisher.numerics.interval_fit import (
    BUDGET,
    Ended,
    IntervalFit,
    OnIteration,
    fit_into_intervals,
    ignore_iterations,
)
from publisher.numerics.intervals import ARITHMETICS, Arithmetic, exact_share, intervals
from publisher.numerics.noise import Noise, expected_error
from publisher.numerics.svd import Decomposition, decompose, factors_of
from publisher.records.extraction import PLATEAU

TOLD_APART = 1.02  # what the misfits of the two arithmetics must be apart by
REACHED = 0.9999  # a share from which no other arithmetic is tried
RANKS_BEYOND = 16  # of those above the noise, and as many again: how far a rank to be found is raised


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A weight of a merged fine-tune, and what is known of its delta.

    Attributes:
        name: the tensor's name, which seeds the arithmetic.
        base: the base weight, (m, n), in the dtype that it was merged in.
        tuned: the weight of the merged fine-tune, (m, n), bfloat16 or float16.
        delta: `delta_of` the two, float32 (m, n).
        noise: that its merge is expected to have left in the delta.
        roundings: of its merge: those that are known, or that what a fit leaves shows, or the usual one.
        is_known: no others are tried.
    """

    name: str
    base: Tensor
    tuned: Tensor
    delta: Tensor
    noise: Noise
    roundings: Arithmetic = "one rounding"
    is_known: bool = False

    def restored_share(self, *, b: Tensor, a: Tensor, arithmetic: Arithmetic) -> float:
        """Return the share of elements that these factors restore.

        Args:
            b: the left factor, (m, r).
            a: the right factor, (r, n).
            arithmetic: how their product is merged.

        Returns:
            A share between 0 and 1.
        """
        return exact_share(base=self.base, tuned=self.tuned, b=b, a=a, arithmetic=arithmetic)


@dataclass(frozen=True, slots=True)
class ExactFactors:
    """Factors in the adapter's dtype, the SVD that they started from, and what was found on the way.

    Attributes:
        svd: the truncated SVD that they started from; its rank is theirs.
        b: (m, r), in the adapter's dtype.
        a: (r, n), in the adapter's dtype.
        arithmetic: how the release was merged, as far as can be inferred.
        told_apart: the two arithmetics would show: in what a fit leaves, or in the share that each reaches.
        other_share: share reached with the other arithmetic, where it was tried.
        svd_share: share of elements that the truncated SVD restores, in float32.
        float32_share: share that the factors restore in float32.
        share: share that the factors restore as shipped.
        iterations: iterations that it took.
        ended: why it ended.
    """

    svd: Decomposition
    b: Tensor
    a: Tensor
    arithmetic: Arithmetic
    told_apart: bool
    other_share: float | None
    svd_share: float
    float32_share: float
    share: float
    iterations: int
    ended: Ended

    @property
    def reaches(self) -> bool:
        """Whether they restore (nearly) everything, as they do where nothing is wrong with the rank."""
        return self.float32_share >= PLATEAU


def recover_exactly(
    weight: MergedWeight,
    svd: Decomposition,
    *,
    raise_rank: bool,
    dtype: torch.dtype,
    on_iteration: OnIteration = ignore_iterations,
) -> ExactFactors:
    """Find factors that merge back to as many of the tuned values as can be.

    One rank too few leaves a plateau: a share far below 1 that no iteration raises. Where the rank is to be found, it
    is raised by 1, 2, 4, ... until the share jumps, and then taken back to where it does. Where it does not jump, the
    factors of the first rank stand.

    Args:
        weight: the merged weight.
        svd: the truncated SVD of its delta.
        raise_rank: whether the rank is to be found, and may be raised where it proves to be too low.
        dtype: the adapter's; factors in 16 bits cannot say everything, and both shares are reported.
        on_iteration: called after each iteration at each rank.

    Returns:
        The factors.
    """
    first = _at_svd(weight, svd, dtype=dtype, on_iteration=on_iteration)
    if not raise_rank or first.reaches:
        return first
    most = min(*weight.tuned.shape, 2 * svd.rank + RANKS_BEYOND)
    low, extra = svd.rank, 1
    while low + extra <= most:
        found = _at_rank(low + extra, weight, dtype=dtype, on_iteration=on_iteration)
        if found.reaches:
            return _lowest_that_reaches(found, weight, above=low, dtype=dtype, on_iteration=on_iteration)
        low, extra = low + extra, 2 * extra
    return first


def _lowest_that_reaches(
    found: ExactFactors, weight: MergedWeight, *, above: int, dtype: torch.dtype, on_iteration: OnIteration
) -> ExactFactors:
    """Return the factors of the lowest rank that reaches, between `above`, which does not, and the rank found."""
    low = above
    while found.svd.rank - low > 1:
        between = _at_rank((low + found.svd.rank) // 2, weight, dtype=dtype, on_iteration=on_iteration)
        if between.reaches:
            found = between
        else:
            low = between.svd.rank
    return found


def _at_rank(rank: int, weight: MergedWeight, *, dtype: torch.dtype, on_iteration: OnIteration) -> ExactFactors:
    svd = decompose(weight.delta, rank=rank, threshold=weight.noise.threshold, name=weight.name)
    return _at_svd(weight, svd, dtype=dtype, on_iteration=on_iteration)


def _at_svd(weight: MergedWeight, svd: Decomposition, *, dtype: torch.dtype, on_iteration: OnIteration) -> ExactFactors:
    """Return the factors of this SVD's rank, by the arithmetic that restores more."""
    start = factors_of(svd, torch.float32)
    likelier, apart = (weight.roundings, False) if weight.is_known else _likelier(weight, svd)
    best = _try(weight, start, arithmetic=likelier, on_iteration=on_iteration, share_to_beat=-1.0)
    other = None
    may_be_other = weight.base.dtype == weight.tuned.dtype and not weight.is_known  # PEFT rounds to no shorter dtype
    if best.share < REACHED and may_be_other:
        (unlikelier,) = (one for one in ARITHMETICS if one != likelier)
        other = _try(weight, start, arithmetic=unlikelier, on_iteration=on_iteration, share_to_beat=best.share)
        if other.share > best.share:
            best, other = other, best
    b, a = rounded_together(b=best.fit.b, a=best.fit.a, dtype=dtype)
    return ExactFactors(
        svd=svd,
        b=b,
        a=a,
        arithmetic=best.arithmetic,
        told_apart=apart or (other is not None and best.share - other.share > 1 - best.share),
        other_share=None if other is None else other.share,
        svd_share=weight.restored_share(b=start[0], a=start[1], arithmetic=best.arithmetic),
        float32_share=best.share,
        share=weight.restored_share(b=b, a=a, arithmetic=best.arithmetic),
        iterations=best.fit.iterations,
        ended=best.fit.ended,
    )


@dataclass(frozen=True, slots=True)
class _Try:
    """One arithmetic, the factors found for it, and the share of elements that they restore by it."""

    arithmetic: Arithmetic
    fit: IntervalFit
    share: float


def _try(
    weight: MergedWeight,
    start: tuple[Tensor, Tensor],
    *,
    arithmetic: Arithmetic,
    on_iteration: OnIteration,
    share_to_beat: float,
) -> _Try:
    """Find factors by this arithmetic.

    Where not even all possible elements would beat another's share, nothing is fitted, and that is the share.
    """
    goal = intervals(base=weight.base, tuned=weight.tuned, arithmetic=arithmetic)
    possible = int((goal.half > 0).sum()) / goal.half.numel()
    budget = BUDGET if possible > share_to_beat else 0
    fit = fit_into_intervals(goal, b=start[0], a=start[1], budget=budget, on_iteration=on_iteration)
    share = weight.restored_share(b=fit.b, a=fit.a, arithmetic=arithmetic)
    return _Try(arithmetic, fit, min(share, possible))


def _likelier(weight: MergedWeight, svd: Decomposition) -> tuple[Arithmetic, bool]:
    """Return the arithmetic whose noise explains the SVD's misfit better, and whether the two differ enough to tell.

    A delta that is rounded first adds the noise of its own steps, step^2 / 12 an element, to that of the sum.
    """
    if weight.roundings == "update rounded first":
        return weight.roundings, True
    first_rounding = 0.0
    for block in row_blocks(weight.tuned):
        delta = delta_of(base=weight.base[block], tuned=weight.tuned[block])
        first_rounding += squared_norm(step_of(delta, weight.tuned.dtype)) / 12
    rows, columns = weight.tuned.shape
    absorbed = expected_error(1.0, shape=(rows, columns), rank=svd.rank)
    once = weight.noise.norm * absorbed
    twice = math.hypot(weight.noise.norm, math.sqrt(first_rounding)) * absorbed
    apart = weight.base.dtype == weight.tuned.dtype and twice > TOLD_APART * once
    if apart and abs(svd.misfit - twice) < abs(svd.misfit - once):
        return "update rounded first", apart
    return "one rounding", apart


def rounded_together(*, b: Tensor, a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round both factors: A first, and B once it was fitted to what A became.

    More cannot be won: rounding each entry of B to its own 8 (or 11) bits is a lattice of cubes, of which none beside
    an orthonormal A packs closer by more than a few percent.

    Args:
        b: the left factor, (m, r), float32.
        a: the right factor, (r, n), float32.
        dtype: to round to.

    Returns:
        B (m, r) and A (r, n) in `dtype`, contiguous.
    """
    if dtype == torch.float32:
        return b.contiguous(), a.contiguous()
    shorter = a.to(dtype)
    wide = shorter.double()
    fitted = torch.linalg.solve(wide @ wide.T, (wide @ a.double().T) @ b.double().T).T
    return fitted.to(dtype).contiguous(), shorter.contiguous()
