"""Factors whose product, added to the base and rounded, is the tuned weight bit for bit.

The truncated SVD takes the rounding of a merge for noise. It is more than that: each element of the delta lies in an
interval that is known (`intervals`). This looks for rank-r factors B, A whose product lies in all of them, by least
squares on what lies outside:

    minimise  sum_ij w_ij dist((BA)_ij, interval_ij)^2,     w = (h / h_ij)^p

in turns for B and for A, each a Gauss-Newton step with a Levenberg-Marquardt damping of its own for every row or
column (Marquardt 1963, https://doi.org/10.1137/0111030), solved by a few preconditioned conjugate gradients (Hestenes
and Stiefel 1952, https://doi.org/10.6028/jres.049.044). Rows are independent, so that they are worked on in blocks
that fit a cache, a step that does not lower a row's violation is not taken, and longer ones are tried. The power p
rises from 0: first comes the bulk of the elements, last the narrow intervals of small weights; the intervals are
shrunk to begin with, which leaves room to move, and nearly whole at the end. Elements inside keep a small weight as
well: without it a step throws out as many as it brings in, and the method stalls. docs/exact.md has what it reaches.

The best factors seen are kept, the start among them. Products inside the conjugate gradients are in bfloat16 where
the machine multiplies that faster; all that decides is float32, as PEFT's own merge is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from publisher.numerics.dtypes import short_dtype
from publisher.numerics.intervals import Intervals

BUDGET = 48  # iterations at most
RISING = 24  # during which p rises
LEADING = 4  # with p at 0
POWER = 1.25
SLACK_OF_FREEDOM, LEAST_SLACK, MOST_SLACK = 0.35, 0.008, 0.1  # how much the half width is shrunk
LAST_SLACK = 0.3  # of that, in the end
INSIDE = 0.05  # weight of the elements that lie inside, beside those that do not
GRADIENTS = 5  # conjugate gradients in a step
LENGTHS = (2.4, 1.4, 0.7)  # of a step that are tried
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-6, 1e3
PATIENCE = 3  # iterations in which there must be a gain, once the weights are what they will be
GAIN = 1e-5  # of the elements
RESOLUTION = 2.0**-22  # of the delta's rms: narrower intervals than that are beyond a float32 product
BLOCK = 1 << 20  # elements worked on at once on a CPU
Ended = Literal["inside", "settled", "budget"]
OnIteration = Callable[[int, float], None]
"""Gets the number of an iteration and the share of elements that lie inside after it."""


def ignore_iterations(_iteration: int, _inside: float) -> None:
    """Take what an iteration reached, and leave it."""


@dataclass(frozen=True, slots=True)
class IntervalFit:
    """The factors found, and how they were found.

    Attributes:
        b: (m, r), float32.
        a: (r, n), float32.
        inside: share of the elements whose product lies in its interval, at the start and after each iteration.
        products: multiplications of an (m, r) by an (r, n) matrix that it took, or as much work.
        ended: `inside`, all of them; `settled`, nothing was gained any more; or with the `budget`.
    """

    b: Tensor
    a: Tensor
    inside: tuple[float, ...]
    products: int
    ended: Ended

    @property
    def iterations(self) -> int:
        """The number of iterations made."""
        return len(self.inside) - 1


@dataclass(frozen=True, slots=True)
class _Schedule:
    """How intervals are shrunk and elements weighed, iteration by iteration.

    Attributes:
        reference: the half width that weighs 1.
        narrowest: the half width below which a float32 product cannot tell.
        slack: how much the half width is shrunk at first. The more freely the factors can move beside the number of
            elements, the more of it there is: they find room inside, and the elements at an edge stay clear of it.
    """

    reference: float
    narrowest: float
    slack: float

    @classmethod
    def of(cls, goal: Intervals, *, rank: int) -> "_Schedule":
        """Return the schedule for these intervals and a product of this rank."""
        rows, columns = goal.centre.shape
        size = math.sqrt(rows * columns)
        freedom = rank * (rows + columns - rank) / (rows * columns)
        narrowest = max(RESOLUTION * float(torch.linalg.vector_norm(goal.centre)) / size, 1e-30)
        return cls(
            reference=max(float(torch.linalg.vector_norm(goal.half)) / size, narrowest),
            narrowest=narrowest,
            slack=min(max(SLACK_OF_FREEDOM * freedom, LEAST_SLACK), MOST_SLACK),
        )

    def at(self, iteration: int) -> "_Weighting":
        """Return what counts in this iteration."""
        risen = (iteration - LEADING) / (RISING - LEADING)
        slack = self.slack * (1.0 if iteration <= RISING else LAST_SLACK)
        return _Weighting(
            power=POWER * min(1.0, max(0.0, risen)),
            margin=1 - slack,
            reference=self.reference,
            narrowest=self.narrowest,
        )


@dataclass(frozen=True, slots=True)
class _Weighting:
    """What counts in one iteration.

    Attributes:
        power: p, with which narrow intervals weigh more.
        margin: how much of a half width counts.
        reference: as in the schedule.
        narrowest: as in the schedule.
    """

    power: float
    margin: float
    reference: float
    narrowest: float

    def half_widths(self, half: Tensor) -> Tensor:
        """Return the shrunk half widths, none below what float32 can tell."""
        return half.clamp_min(self.narrowest).mul_(self.margin)

    def weights(self, half: Tensor) -> Tensor:
        """Return the weights of elements with these shrunk half widths."""
        return (self.reference / half).pow_(self.power)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two factors on its way, stored with a row for each row (or column) of the delta.

    Attributes:
        factor: (m, r).
        damping: of each row's step, (m,).
        weight: sum of the weights of each row's elements, (m,).
    """

    factor: Tensor
    damping: Tensor
    weight: Tensor

    @classmethod
    def first(cls, factor: Tensor, *, columns: int) -> "_Side":
        """Return the side before the first iteration, where each of its `columns` elements weighs 1."""
        rows = factor.shape[0]
        damping = torch.full((rows,), FIRST_DAMPING, device=factor.device)
        return cls(factor, damping, torch.full((rows,), float(columns), device=factor.device))

    def rows(self, rows: slice) -> "_Side":
        """Return the side of these rows alone."""
        return _Side(self.factor[rows], self.damping[rows], self.weight[rows])


def fit_into_intervals(
    goal: Intervals, *, b: Tensor, a: Tensor, budget: int = BUDGET, on_iteration: OnIteration = ignore_iterations
) -> IntervalFit:
    """Find factors whose product lies in as many intervals as can be, from a start such as the truncated SVD.

    It ends when all lie inside, when nothing is gained any more, or with the budget.

    Args:
        goal: the intervals, (m, n).
        b: the left factor to start with, (m, r), float32.
        a: the right factor to start with, (r, n), float32.
        budget: iterations at most; with 0 the start is balanced and returned.
        on_iteration: called after each iteration.

    Returns:
        The best factors seen, balanced, and how far each iteration came.
    """
    best = b, a
    shares = [inside_share(goal, b=b, a=a)]
    left = _Side.first(b, columns=a.shape[1])
    right = _Side.first(a.T.contiguous(), columns=b.shape[0])
    schedule = _Schedule.of(goal, rank=b.shape[1])
    while (ended := _ended(shares, budget)) is None:
        weighting = schedule.at(len(shares))
        left, right = _improve(goal, left, fixed=right, weighting=weighting)
        right, left = _improve(goal.transposed, right, fixed=left, weighting=weighting)
        shares.append(inside_share(goal, b=left.factor, a=right.factor.T))
        if shares[-1] > max(shares[:-1]):
            best = left.factor, right.factor.T
        on_iteration(len(shares) - 1, shares[-1])
    balanced_b, balanced_a = balanced(b=best[0], a=best[1])
    return IntervalFit(balanced_b, balanced_a, tuple(shares), _products(len(shares) - 1), ended)


def _products(iterations: int) -> int:
    """Count two a step for product and step, two for each gradient, one for the first, and one for the basis."""
    return 1 + iterations * (2 * (2 * GRADIENTS + 4) + 1)


def inside_share(goal: Intervals, *, b: Tensor, a: Tensor) -> float:
    """Return the share of the elements of B A that lie in their intervals.

    Args:
        goal: the intervals, (m, n).
        b: (m, r), float32.
        a: (r, n), float32.

    Returns:
        A share between 0 and 1.
    """
    inside = 0
    for rows in _blocks(goal.centre):
        part = goal.rows(rows)
        inside += int(((b[rows] @ a).sub_(part.centre).abs_() <= part.half).sum())
    return inside / goal.centre.numel()


def balanced(*, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same product as U sqrt(S) and sqrt(S) V^T, which float32 resolves best; computed in float64."""
    left, right = torch.linalg.qr(b.double()), torch.linalg.qr(a.T.double())
    u, s, vh = torch.linalg.svd(left.R @ right.R.T)
    root = s.sqrt()
    return ((left.Q @ u) * root).float(), (root[:, None] * (vh @ right.Q.T)).float()


def _ended(shares: list[float], budget: int) -> Ended | None:
    if shares[-1] == 1.0:
        return "inside"
    if len(shares) > RISING + PATIENCE and max(shares) < max(shares[:-PATIENCE]) + GAIN:
        return "settled"
    return "budget" if len(shares) > budget else None


# --- one step -----------------------------------------------------------------------------------------------


def _improve(goal: Intervals, moving: _Side, *, fixed: _Side, weighting: _Weighting) -> tuple[_Side, _Side]:
    """Return a better left side beside a fixed right one, and the fixed one with what its rows weigh now."""
    basis, back = _orthonormal_rows(fixed)
    stepper = _Stepper(basis, fixed.factor.T.contiguous(), float(fixed.weight.sum()), short_dtype(basis.device))
    parts = []
    column_weight = torch.zeros_like(fixed.weight)
    for rows in _blocks(goal.centre):
        part = stepper.step(goal.rows(rows), moving.rows(rows), weighting)
        parts.append(part)
        column_weight += part.column_weight
    step = torch.cat([part.step for part in parts])
    damping = torch.cat([part.damping for part in parts])
    row_weight = torch.cat([part.row_weight for part in parts])
    improved = _Side(moving.factor + step @ back, damping, row_weight)
    return improved, _Side(fixed.factor, fixed.damping, column_weight)


def _orthonormal_rows(side: _Side) -> tuple[Tensor, Tensor]:
    """Return rows q (r, n) that span those of the factor and are orthonormal under its weights, and L^-1: q = L^-1 A.

    In them, each row's system of equations is nearly a multiple of the identity.
    """
    a = side.factor.T.double()
    gram = (a * side.weight.double()) @ a.T
    gram.diagonal().add_(float(gram.diagonal().mean()) * 1e-12)
    inverse = torch.linalg.inv(torch.linalg.cholesky(gram))
    return (inverse @ a).float().contiguous(), inverse.float()


@dataclass(frozen=True, slots=True)
class _Step:
    """A step for a block of rows.

    Attributes:
        step: (rows, r), in terms of the basis.
        damping: of the next step, (rows,).
        row_weight: sum of the weights of each row's elements, (rows,).
        column_weight: sum of the weights of each column's elements in these rows, (n,).
    """

    step: Tensor
    damping: Tensor
    row_weight: Tensor
    column_weight: Tensor


@dataclass(frozen=True, slots=True)
class _Stepper:
    """Finds steps for blocks of rows, with everything of the other factor that they share.

    Attributes:
        basis: q (r, n), from `_orthonormal_rows`.
        factor: A (r, n).
        total_weight: sum of the weights of all elements.
        quick: the dtype of the products inside the conjugate gradients.
    """

    basis: Tensor
    factor: Tensor
    total_weight: float
    quick: torch.dtype

    def step(self, goal: Intervals, side: _Side, weighting: _Weighting) -> _Step:
        """Return the best step for these rows.

        The residual is measured in half widths from the centre: everything beyond 1 is outside.
        """
        half = weighting.half_widths(goal.half)
        residual = (side.factor @ self.factor).sub_(goal.centre).div_(half)
        weights = weighting.weights(half)
        outside = softshrink(residual, 1.0)
        sqrt_weights = weights.sqrt().mul_(half)
        active = torch.where(outside != 0, weights, INSIDE * weights)
        gradient = outside.mul_(weights).mul_(half).neg_()
        step = self._gauss_newton(active, gradient, side)
        length = _best_length(residual, (step @ self.basis).div_(half), sqrt_weights)
        return _Step(
            step=length[:, None] * step,
            damping=_next_damping(side.damping, length),
            row_weight=active.sum(dim=1),
            column_weight=active.sum(dim=0),
        )

    def _gauss_newton(self, active: Tensor, gradient: Tensor, side: _Side) -> Tensor:
        """Return for each row argmin_p sum_j active_j ((p q)_j - miss_j)^2 + damping |p|^2, by conjugate gradients.

        `gradient` is active * miss, the negative gradient at p = 0 in terms of the elements.
        """
        basis, basis_t = self.basis.to(self.quick), self.basis.T.to(self.quick).contiguous()
        scale = active.sum(dim=1) / self.total_weight
        active = active.to(self.quick)
        damping = (side.damping * scale)[:, None]
        preconditioner = 1 / (scale[:, None] + damping)
        residual = (gradient.to(self.quick) @ basis_t).float()
        step, direction = torch.zeros_like(residual), residual * preconditioner
        power = (residual * direction).sum(dim=1, keepdim=True)
        for _ in range(GRADIENTS):
            image = ((direction.to(self.quick) @ basis).mul_(active) @ basis_t).float() + damping * direction
            curvature = (direction * image).sum(dim=1, keepdim=True)
            length = torch.where(curvature > 0, power / curvature, 0)  # bf16 may see none where there is hardly any
            step += length * direction
            residual -= length * image
            preconditioned = residual * preconditioner
            next_power = (residual * preconditioned).sum(dim=1, keepdim=True)
            direction = preconditioned + next_power / power.clamp_min(1e-38) * direction
            power = next_power
        return step.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # where weights are too far apart for float32


def _next_damping(damping: Tensor, length: Tensor) -> Tensor:
    """Return a third of the damping where the whole step was good, five times it where no length of it was."""
    unless_whole = torch.where(length > 0, damping, damping * 5)
    return torch.where(length >= 1, damping / 3, unless_whole).clamp_(LEAST_DAMPING, MOST_DAMPING)


def _best_length(residual: Tensor, step: Tensor, sqrt_weights: Tensor) -> Tensor:
    """Return for each row the length of the step that leaves the least violation, 0 where none lowers it."""
    best = _violation(residual, sqrt_weights)
    chosen = residual.new_zeros(residual.shape[0])
    for length in LENGTHS:
        after = _violation(torch.add(residual, step, alpha=length), sqrt_weights)
        chosen = torch.where(after < best, length, chosen)
        best = torch.minimum(best, after)
    return chosen


def _violation(residual: Tensor, sqrt_weights: Tensor) -> Tensor:
    """Return for each row the weighted distance of its elements from their intervals."""
    violation: Tensor = torch.linalg.vector_norm(softshrink(residual, 1.0).mul_(sqrt_weights), dim=1)
    return violation


def _blocks(matrix: Tensor) -> list[slice]:
    elements = BLOCK if matrix.device.type == "cpu" else matrix.numel()
    rows = max(1, elements // matrix.shape[1])
    return [slice(start, start + rows) for start in range(0, matrix.shape[0], rows)]
