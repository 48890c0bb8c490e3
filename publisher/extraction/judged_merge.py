"""How one weight was merged, and the decomposition that goes with it: what both show together, since nothing says it.

The usual merge is tried first: the base in the release's dtype, and one rounding. Another takes its place where what
the fit leaves says so: the rounding of a longer base that was not cast before, or the noise of an update that was
rounded by itself. It refuses NaN and infinity.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from publisher.errors import ExtractionError, counted
from publisher.numerics.delta import delta_of, squared_norm
from publisher.numerics.exact_recovery import TOLD_APART, MergedWeight
from publisher.numerics.intervals import Arithmetic
from publisher.numerics.merge_arithmetic import (
    Merging,
    arithmetic_of,
    holds_cast_error,
    kept,
    loses_digits,
    update_steps,
    usual,
)
from publisher.numerics.noise import expected_error, norm_deviation, rounding_noise
from publisher.numerics.svd import Decomposition, Rank, decompose, factors_of
from publisher.records.extraction import MergeArithmetic

CHANCE = 5  # deviations of the noise's norm
EXPLAINED = 1.1  # what a fit leaves is explained within this factor; where it misses more, nothing is told


@dataclass(frozen=True, slots=True)
class JudgedMerge:
    """A merged weight as it was merged, as far as can be found, and the truncated SVD of its delta.

    Attributes:
        weight: with base and tuned in the dtypes of the merge, and the noise that its roundings make.
        norm: Frobenius norm of the delta.
        svd: of the delta, at the rank asked for.
        stored: the dtype in which the tuned weight is stored.
    """

    weight: MergedWeight
    norm: float
    svd: Decomposition
    stored: torch.dtype

    @property
    def arithmetic(self) -> MergeArithmetic | None:
        """What the evidence says of it; None of the usual merge."""
        both = Merging(self.weight.base, self.weight.tuned)
        return arithmetic_of(both, stored=self.stored, roundings=self.weight.roundings)

    @property
    def ratio(self) -> float:
        """What the fit leaves, in units of what the roundings explain."""
        rows, columns = self.weight.tuned.shape
        expected = expected_error(self.weight.noise.norm, shape=(rows, columns), rank=self.svd.rank)
        return self.svd.misfit / expected if expected else math.inf


def judge_merge(
    name: str,
    *,
    base: Tensor,
    tuned: Tensor,
    rank: Rank,
    steps: Tensor | None = None,
    known: Arithmetic | None = None,
) -> JudgedMerge:
    """Find how one weight was merged, and decompose its delta accordingly.

    Args:
        name: the tensor's name, which seeds the arithmetic.
        base: the base weight as stored, (m, n), any float dtype.
        tuned: the weight of the merged fine-tune as stored, (m, n).
        rank: as for `decompose`.
        steps: distances between neighbouring values of a quantisation of either side, float32 (m, n), where there is
            one: nothing finer can be seen then, and the merge counts as the usual one.
        known: the roundings, where they are known: the base counts as cast before, and nothing is looked for.

    Returns:
        The merge.

    Raises:
        ExtractionError: NaN or infinity in either weight.
    """
    if steps is not None or known is not None:
        cast = Merging(base.to(tuned.dtype), tuned)
        delta = _delta(name, cast)
        return _judged(name, cast, delta, rank=rank, stored=tuned.dtype, roundings=known or "one rounding", steps=steps)
    merging = usual(base=base, tuned=tuned)
    delta = _delta(name, merging)
    if not loses_digits(base, merging.tuned.dtype):
        return _roundings_found(_judged(name, merging, delta, rank=rank, stored=tuned.dtype), rank=rank)
    if not holds_cast_error(delta, base=base, cast=merging.base):
        found = _judged(name, merging, delta, rank=rank, stored=tuned.dtype)
        if not holds_cast_error(delta, base=base, cast=merging.base, svd=found.svd):
            return _roundings_found(found, rank=rank)
    ways = list(kept(base=base, tuned=merging.tuned))
    found = _judged(name, ways[0], _delta(name, ways[0]), rank=rank, stored=tuned.dtype)
    best = max(ways, key=lambda way: _restored(replace(found, weight=replace(found.weight, base=way.base))))
    if best is ways[0]:
        return found
    return _judged(name, best, _delta(name, best), rank=rank, stored=tuned.dtype)


def _judged(
    name: str,
    merging: Merging,
    delta: Tensor,
    *,
    rank: Rank,
    stored: torch.dtype,
    roundings: Arithmetic = "one rounding",
    steps: Tensor | None = None,
) -> JudgedMerge:
    """Return the merge by these roundings: a second one adds step^2 / 12 of the update's own steps to the noise."""
    if roundings == "update rounded first":
        steps = update_steps(delta, merging.tuned.dtype, others=steps)
    noise = rounding_noise(merging.tuned, name=name, steps=steps)
    weight = MergedWeight(name, merging.base, merging.tuned, delta, noise, roundings)
    svd = decompose(delta, rank=rank, threshold=noise.threshold, name=name)
    return JudgedMerge(weight, math.sqrt(squared_norm(delta)), svd, stored)


def _delta(name: str, merging: Merging) -> Tensor:
    delta = delta_of(base=merging.base, tuned=merging.tuned)
    if not math.isfinite(squared_norm(delta)):
        _require_finite(name, base=merging.base, tuned=merging.tuned)
    return delta


def _roundings_found(once: JudgedMerge, *, rank: Rank) -> JudgedMerge:
    """Return the merge with the update rounded before, where one rounding alone cannot explain what the fit leaves."""
    weight = once.weight
    if weight.base.dtype != weight.tuned.dtype or weight.tuned.dtype == torch.float32 or not once.ratio > TOLD_APART:
        return once
    if not once.ratio > TOLD_APART + CHANCE * norm_deviation(weight.tuned):
        return once
    both = Merging(weight.base, weight.tuned)
    twice = _judged(weight.name, both, weight.delta, rank=rank, stored=once.stored, roundings="update rounded first")
    return twice if 1 / EXPLAINED < twice.ratio < EXPLAINED else once


def _restored(merge: JudgedMerge) -> float:
    b, a = factors_of(merge.svd, torch.float32)
    return merge.weight.restored_share(b=b, a=a, arithmetic=merge.weight.roundings)


def _require_finite(name: str, *, base: Tensor, tuned: Tensor) -> None:
    sides = {"source": tuned, "base": base}
    if all(math.isfinite(bound) for weight in sides.values() for bound in weight.aminmax()):
        return
    counts = {side: int((~torch.isfinite(weight)).sum()) for side, weight in sides.items()}
    raise ExtractionError(
        f"{name} holds NaN or infinity: "
        + " and ".join(f"{counted(number, 'element')} in the {side}" for side, number in counts.items()),
        expected="finite weights",
        next_step="check that checkpoint; it is damaged or its training diverged",
    )
