"""Exact recovery: factors whose product, added to the base and rounded, is the released weight bit for bit.

The truncated SVD takes the rounding of a merge for noise. It is more than that: each element of the update lies in an
interval that is known (`rounding`). This looks for rank-r factors B, A whose product lies in all of them, by least
squares on what lies outside:

    minimise  sum_ij w_ij dist((BA)_ij, interval_ij)^2,     w = (h / h_ij)^p

in turns for B and for A, each a Gauss-Newton step with a Levenberg-Marquardt damping of its own for every row (or
column), solved by a few conjugate gradients. Rows are independent, so that they are worked on in blocks that fit a
cache, a step that does not lower a row's violation is not taken, and longer ones are tried. The power p rises from 0:
first comes the bulk of the elements, last the narrow intervals of small weights; the intervals are shrunk to begin
with, which leaves room to move, and nearly whole at the end. Elements inside keep a small weight as well: without it a
step throws out as many as it brings in, and the method stalls.

The best factors seen are kept, the SVD's among them. Products inside the conjugate gradients are in bf16 where the
machine multiplies that faster; all that decides is float32, as PEFT's own merge is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from publisher.numerics.intervals import Intervals
from publisher.numerics.lora import short_dtype

BUDGET = 48  # iterations at most
RISING = 24  # during which p rises
LEADING = 4  # with p at 0
POWER = 1.25
SLACK = 0.35, 0.008, 0.1  # how much the half width is shrunk: of the share of freedom, but at least and at most
LAST_SLACK = 0.3  # of that, in the end
INSIDE = 0.05  # weight of the elements that lie inside, beside those that do not
GRADIENTS = 5  # conjugate gradients in a step
LENGTHS = (2.4, 1.4, 0.7)  # of a step that are tried
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-6, 1e3
PATIENCE = 3  # iterations in which there must be a gain, once the weights are what they will be
GAIN = 1e-5  # of the elements
RESOLUTION = 2.0**-22  # of the update's rms: narrower intervals than that are beyond a float32 product
Ended = Literal["inside", "settled", "budget"]
BLOCK = 1 << 20  # elements worked on at once on a CPU


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found.

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
        """Iterations made."""
        return len(self.inside) - 1


@dataclass(frozen=True, slots=True)
class _Scale:
    """What follows from the intervals as a whole.

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
    def of(cls, goal: Intervals, *, rank: int) -> "_Scale":
        rows, columns = goal.centre.shape
        size = math.sqrt(rows * columns)
        of_freedom, least, most = SLACK
        freedom = rank * (rows + columns - rank) / (rows * columns)
        narrowest = max(RESOLUTION * float(torch.linalg.vector_norm(goal.centre)) / size, 1e-30)
        return cls(
            reference=max(float(torch.linalg.vector_norm(goal.half)) / size, narrowest),
            narrowest=narrowest,
            slack=min(max(of_freedom * freedom, least), most),
        )

    def asked(self, iteration: int) -> "_Asked":
        """What this iteration asks for."""
        power = POWER * min(1.0, max(0.0, (iteration - LEADING) / (RISING - LEADING)))
        slack = self.slack * (1.0 if iteration <= RISING else LAST_SLACK)
        return _Asked(power, 1 - slack, self)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The power of the weights, and how much of a half width counts."""

    power: float
    margin: float
    scale: _Scale

    def weights(self, half: Tensor) -> Tensor:
        """Of elements with these half widths."""
        return (self.scale.reference / half).pow_(self.power)


@dataclass(frozen=True, slots=True)
class _Side:
    """One factor (m, r) on its way: how much each row is damped, and the weight its elements have together."""

    factor: Tensor
    damping: Tensor
    weight: Tensor


def recover(
    goal: Intervals,
    b: Tensor,
    a: Tensor,
    *,
    budget: int = BUDGET,
    progress: Callable[[int, float], None] = lambda _iteration, _inside: None,
) -> Recovery:
    """Factors whose product lies in as many intervals as can be, from a start such as the truncated SVD.

    Args:
        goal: the intervals, (m, n).
        b: (m, r), float32.
        a: (r, n), float32.
        budget: iterations at most.
        progress: told of each iteration and of the share that lies inside.

    It ends when all lie inside, when nothing is gained any more, or with the budget.
    """
    best, shares = (b, a), [inside_share(goal, b, a)]
    left, right = _side(b, columns=a.shape[1]), _side(a.T.contiguous(), columns=b.shape[0])
    scale = _Scale.of(goal, rank=b.shape[1])
    while (ended := _ended(shares, budget)) is None:
        asked = scale.asked(len(shares))
        left, right = _improved(goal, left, fixed=right, asked=asked)
        right, left = _improved(goal.transposed, right, fixed=left, asked=asked)
        shares.append(inside_share(goal, left.factor, right.factor.T))
        if shares[-1] > max(shares[:-1]):
            best = left.factor, right.factor.T
        progress(len(shares) - 1, shares[-1])
    return Recovery(*balanced(*best), tuple(shares), _products(len(shares) - 1), ended)


def _products(iterations: int) -> int:
    """Per step two for the product and the step, two for each gradient, one for the pull and one for the metric."""
    return 1 + iterations * (2 * (2 * GRADIENTS + 4) + 1)


def inside_share(goal: Intervals, b: Tensor, a: Tensor) -> float:
    """The share of the elements of b a that lie in their intervals."""
    inside = 0
    for rows in _blocks(goal.centre):
        part = goal.rows(rows)
        inside += int(((b[rows] @ a).sub_(part.centre).abs_() <= part.half).sum())
    return inside / goal.centre.numel()


def balanced(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The same product as U sqrt(S) and sqrt(S) V^T, which float32 resolves best; in float64."""
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


def _side(factor: Tensor, *, columns: int) -> _Side:
    rows = factor.shape[0]
    damping = torch.full((rows,), FIRST_DAMPING, device=factor.device)
    return _Side(factor, damping, torch.full((rows,), float(columns), device=factor.device))


# --- one step -----------------------------------------------------------------------------------------------


def _improved(goal: Intervals, moving: _Side, *, fixed: _Side, asked: _Asked) -> tuple[_Side, _Side]:
    """A better left factor (m, r) beside a fixed right one (n, r); the fixed one learns what its rows weigh now."""
    basis, back = _metric(fixed)
    rows_of = _Rows(basis, fixed.factor.T.contiguous(), fixed.weight, quick=short_dtype(basis.device))
    parts, weight = [], torch.zeros_like(fixed.weight)
    for rows in _blocks(goal.centre):
        side = _Side(moving.factor[rows], moving.damping[rows], moving.weight[rows])
        part, outside = rows_of.improved(goal.rows(rows), side, asked)
        parts.append(part)
        weight += outside
    steps, damping, weights = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return _Side(moving.factor + steps @ back, damping, weights), _Side(fixed.factor, fixed.damping, weight)


def _metric(side: _Side) -> tuple[Tensor, Tensor]:
    """Rows q (r, n) that span those of the factor and are orthonormal under its weights, and L^-1 with q = L^-1 A.

    In them, each row's system of equations is nearly a multiple of the identity.
    """
    a = side.factor.T.double()
    gram = (a * side.weight.double()) @ a.T
    gram.diagonal().add_(float(gram.diagonal().mean()) * 1e-12)
    inverse = torch.linalg.inv(torch.linalg.cholesky(gram))
    return (inverse @ a).float().contiguous(), inverse.float()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Steps for blocks of rows, with everything of the other factor that they share.

    Attributes:
        basis: q (r, n), from `_metric`.
        factor: A (r, n).
        weight: of each column, (n,).
        quick: the dtype of the products inside the conjugate gradients.
    """

    basis: Tensor
    factor: Tensor
    weight: Tensor
    quick: torch.dtype

    def improved(self, goal: Intervals, side: _Side, asked: _Asked) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Steps p (rows, r) in terms of the basis, dampings and weights of these rows, and the weights of all columns.

        Products are measured in half widths from the centre, where everything beyond 1 is outside.
        """
        half = goal.half.clamp_min(asked.scale.narrowest).mul_(asked.margin)
        place = (side.factor @ self.factor).sub_(goal.centre).div_(half)
        weights, outside = asked.weights(half), softshrink(place, 1.0)
        weighing = weights.sqrt().mul_(half)
        active = torch.where(outside != 0, weights, INSIDE * weights)
        step = self._gauss_newton(active, outside.mul_(weights).mul_(half).neg_(), side)
        length = _longest(place, (step @ self.basis).div_(half), weighing)
        damping = torch.where(length >= 1, side.damping / 3, torch.where(length > 0, side.damping, side.damping * 5))
        damping = damping.clamp_(LEAST_DAMPING, MOST_DAMPING)
        return (length[:, None] * step, damping, active.sum(dim=1)), active.sum(dim=0)

    def _gauss_newton(self, active: Tensor, pull: Tensor, side: _Side) -> Tensor:
        """Per row: argmin_p sum_j active_j ((p q)_j - miss_j)^2 + damping |p|^2, by conjugate gradients."""
        quick, turned = self.basis.to(self.quick), self.basis.T.to(self.quick).contiguous()
        scale = active.sum(dim=1) / float(self.weight.sum())
        active = active.to(self.quick)
        damping = (side.damping * scale)[:, None]
        inverse = 1 / (scale[:, None] + damping)
        residual = (pull.to(self.quick) @ turned).float()
        step, direction = torch.zeros_like(residual), residual * inverse
        power = (residual * direction).sum(dim=1, keepdim=True)
        for _ in range(GRADIENTS):
            image = ((direction.to(self.quick) @ quick).mul_(active) @ turned).float() + damping * direction
            curvature = (direction * image).sum(dim=1, keepdim=True)
            length = torch.where(curvature > 0, power / curvature, 0)  # bf16 may see none where there is hardly any
            step += length * direction
            residual -= length * image
            ahead = residual * inverse
            following = (residual * ahead).sum(dim=1, keepdim=True)
            direction = ahead + following / power.clamp_min(1e-38) * direction
            power = following
        return step.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # where weights are too far apart for float32


def _longest(place: Tensor, step: Tensor, weighing: Tensor) -> Tensor:
    """Per row the length of the step that leaves the least violation, 0 where none lowers it."""
    best, chosen = _violation(place, weighing), place.new_zeros(place.shape[0])
    for length in LENGTHS:
        after = _violation(torch.add(place, step, alpha=length), weighing)
        chosen = torch.where(after < best, length, chosen)
        best = torch.minimum(best, after)
    return chosen


def _violation(place: Tensor, weighing: Tensor) -> Tensor:
    violation: Tensor = torch.linalg.vector_norm(softshrink(place, 1.0).mul_(weighing), dim=1)
    return violation


def _blocks(matrix: Tensor) -> list[slice]:
    elements = BLOCK if matrix.device.type == "cpu" else matrix.numel()
    rows = max(1, elements // matrix.shape[1])
    return [slice(start, start + rows) for start in range(0, matrix.shape[0], rows)]
