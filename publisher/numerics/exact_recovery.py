"""From a truncated SVD to factors that merge exactly: which arithmetic merged the release, what of it can be undone.

What a release does not say is inferred: whether its update was added and rounded once, or rounded by itself before. The
second leaves more noise, which shows in what the SVD leaves where the update is large, and other intervals, which show
in the share that can be reached.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from publisher.numerics import lora
from publisher.numerics.interval_fit import BUDGET, Recovery, recover
from publisher.numerics.intervals import ARITHMETICS, Arithmetic, intervals, merged
from publisher.records.extraction import PLATEAU, ExactRecovery

TOLD_APART = 1.02  # what the residuals of the two arithmetics must be apart by
REACHED = 0.9999  # a share from which no other arithmetic is tried
RANKS_BEYOND = 16  # of those above the noise, and as many again: how far a rank to be found is raised
Told = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Recovered:
    """Factors in the adapter's dtype, (m, r) and (r, n), the SVD they come from, and what was found on the way."""

    found: lora.Decomposition
    b: Tensor
    a: Tensor
    figures: ExactRecovery


def recovered(
    base: Tensor,
    source: Tensor,
    *,
    found: lora.Decomposition,
    again: Callable[[int], lora.Decomposition] | None,
    noise: lora.Noise,
    dtype: torch.dtype,
    told: Told,
) -> Recovered:
    """Factors of `source - base` that merge back to as many of the released values as can be.

    Args:
        base: (m, n), any float dtype.
        source: (m, n), bf16 or fp16.
        found: the truncated SVD of their difference.
        again: the same at another rank, where the rank is to be found: it is raised where it proves to be too low.
        noise: of one rounding.
        dtype: the adapter's; factors in 16 bits cannot say everything, and both shares are reported.
        told: of each iteration and the share reached.
    """
    at = partial(_at_rank, base, source, noise=noise, dtype=dtype, told=told)
    first = at(found)
    if again is None:
        return first
    most = min(*source.shape, 2 * found.rank + RANKS_BEYOND)
    return _at_the_rank_that_reaches(first, lambda rank: at(again(rank)), most=most)


def _at_rank(
    base: Tensor, source: Tensor, found: lora.Decomposition, *, noise: lora.Noise, dtype: torch.dtype, told: Told
) -> Recovered:
    start = lora.factors_of(found, torch.float32)
    likelier, apart = _likelier(base, source, found=found, noise=noise)
    tries = {likelier: _tried(base, source, start, arithmetic=likelier, told=told, beat=-1.0)}
    if tries[likelier].share < REACHED:
        other = next(one for one in ARITHMETICS if one != likelier)
        tries[other] = _tried(base, source, start, arithmetic=other, told=told, beat=tries[likelier].share)
    arithmetic = max(tries, key=lambda one: tries[one].share)
    best = tries.pop(arithmetic)
    b, a = rounded_together(best.recovery.b, best.recovery.a, dtype)
    figures = ExactRecovery(
        arithmetic=arithmetic,
        told_apart=apart or any(best.share - other.share > 1 - best.share for other in tries.values()),
        other_share=next((other.share for other in tries.values()), None),
        rank_shown=int((found.s > noise.edge).sum()),
        svd_share=exact_share(base, source, b=start[0], a=start[1], arithmetic=arithmetic),
        float32_share=best.share,
        share=exact_share(base, source, b=b, a=a, arithmetic=arithmetic),
        iterations=best.recovery.iterations,
        ended=best.recovery.ended,
    )
    return Recovered(found, b, a, figures)


def _at_the_rank_that_reaches(first: Recovered, at_rank: Callable[[int], Recovered], *, most: int) -> Recovered:
    """`first`, or the recovery with the lowest rank above its own that restores (nearly) everything, if there is one.

    One rank too few leaves a plateau: a share far below 1 that no iteration raises. So the rank is raised by 1, 2, 4,
    ... until the share jumps, and then taken back to where it does. Where it does not, `first` stands.

    Args:
        first: at the rank that stands above the noise.
        at_rank: the recovery at another rank.
        most: the highest rank that is tried.
    """
    low, extra, found = first.a.shape[0], 1, first
    while found.figures.float32_share < PLATEAU:
        if low + extra > most:
            return first
        found = at_rank(low + extra)
        if found.figures.float32_share < PLATEAU:
            low, extra = low + extra, 2 * extra
    while found.a.shape[0] - low > 1 and found is not first:
        between = at_rank((low + found.a.shape[0]) // 2)
        if between.figures.float32_share < PLATEAU:
            low = between.a.shape[0]
        else:
            found = between
    return found


@dataclass(frozen=True, slots=True)
class _Try:
    """One arithmetic: the factors, and the share that they restore by it."""

    recovery: Recovery
    share: float


def _tried(
    base: Tensor, source: Tensor, start: tuple[Tensor, Tensor], *, arithmetic: Arithmetic, told: Told, beat: float
) -> _Try:
    """Where not even all possible elements would beat another's share, nothing is recovered, and that is the share."""
    goal = intervals(base, source, arithmetic)
    possible = int((goal.half > 0).sum()) / goal.half.numel()
    recovery = recover(goal, *start, progress=told, budget=BUDGET if possible > beat else 0)
    share = exact_share(base, source, b=recovery.b, a=recovery.a, arithmetic=arithmetic)
    return _Try(recovery, min(share, possible))


def _likelier(base: Tensor, source: Tensor, *, found: lora.Decomposition, noise: lora.Noise) -> tuple[Arithmetic, bool]:
    """The arithmetic whose noise explains the SVD's residual better, and whether the two differ enough to tell."""
    twice = 0.0
    for rows in lora.row_blocks(source):
        update = lora.update_of(base[rows], source[rows])
        twice += lora.squared_norm(lora.step_of(update, source.dtype)) / 12
    absorbed = lora.expected_error(1.0, shape=(source.shape[0], source.shape[1]), rank=found.rank)
    once, both = noise.norm * absorbed, math.hypot(noise.norm, math.sqrt(twice)) * absorbed
    apart = both > TOLD_APART * once
    nearer = apart and abs(found.residual - both) < abs(found.residual - once)
    return ("update rounded first" if nearer else "one rounding"), apart


def exact_share(base: Tensor, source: Tensor, *, b: Tensor, a: Tensor, arithmetic: Arithmetic) -> float:
    """The share of the elements for which base and product, merged in this way, give the released value."""
    same, wide = 0, a.float()
    for rows in lora.row_blocks(source):
        product = b[rows].float() @ wide
        same += int((merged(base[rows], product, dtype=source.dtype, arithmetic=arithmetic) == source[rows]).sum())
    return same / source.numel()


def rounded_together(b: Tensor, a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """B (m, r) and A (r, n) in `dtype`: A is rounded, and B fitted to what it became before its turn comes.

    More cannot be won: rounding each entry of B to its own 8 (or 11) bits is a lattice of cubes, of which none beside
    an orthonormal A packs closer by more than a few percent.
    """
    if dtype == torch.float32:
        return b.contiguous(), a.contiguous()
    shorter = a.to(dtype)
    wide = shorter.double()
    fitted = torch.linalg.solve(wide @ wide.T, (wide @ a.double().T) @ b.double().T).T
    return fitted.to(dtype).contiguous(), shorter.contiguous()
