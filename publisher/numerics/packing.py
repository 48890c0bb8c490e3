"""How the factors of stacked experts are packed: which rows of A and which columns of B belong to one expert.

A file holds E * r rows of A and as many columns of B; whether an expert's lie together, or the expert runs fastest, no
shape tells. The numbers do: training changes B and A by one gradient, so that the factors of an expert amplify each
other, and B A is larger than with columns in any other order. Factors of a singular value decomposition are told by
their right angles. Random factors are related to nothing, and give no answer (docs/compat.md has what was measured).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Grouping = Literal["expert", "rank"]
"""`expert`: the vectors of one expert lie together. `rank`: the expert runs fastest."""

_GROUPINGS: Final[tuple[Grouping, ...]] = ("expert", "rank")
_EXPERTS, _RANKS = 128, 16  # of a parameter that are looked at: more would only make what is clear clearer
_ORDERS = 32  # random orders of the columns that a product is compared with
_CLEAR = 6.0  # standard deviations by which the product stands out; of 300 random files none came above 3.3
_APART = 0.5  # of the best packing's figure: what the next one may come to at the most
_RIGHT_ANGLE = 0.05  # of the mean squared cosine of random vectors, 1 / width
_PAIRS = 20  # of vectors, without which right angles could be chance
_EXPLAINED = 0.5  # share of an update that the best packing may leave over


class Packing(NamedTuple):
    """How the rows of A and the columns of B are grouped."""

    a: Grouping
    b: Grouping


PEFT: Final = Packing("expert", "rank")
PACKINGS: Final = tuple(Packing(a, b) for a in _GROUPINGS for b in _GROUPINGS)


@dataclass(frozen=True, slots=True)
class Told:
    """What the numbers say of the packing.

    Attributes:
        packing: the one that they speak for; None where they speak for none clearly.
        how: the figures that decided, in words.
    """

    packing: Packing | None
    how: str

    @property
    def other(self) -> Packing | None:
        """The packing that they speak for, where it is another than PEFT's; None elsewhere."""
        return None if self.packing == PEFT else self.packing


def by_expert(vectors: Tensor, *, experts: int, grouping: Grouping) -> Tensor:
    """Return the vectors of each expert.

    Args:
        vectors: the rows of A, or the columns of B as rows, (experts * r, width).
        experts: the number of experts.
        grouping: how they are packed.

    Returns:
        The vectors, (experts, r, width).
    """
    if grouping == "expert":
        return vectors.reshape(experts, -1, vectors.shape[1])
    return vectors.reshape(-1, experts, vectors.shape[1]).transpose(0, 1)


def product_scores(a: Tensor, b: Tensor, *, experts: int, generator: torch.Generator) -> dict[Packing, float]:
    """Return how far the products B A of all experts stand out, by packing.

    The figure is the squared norm of the products, in standard deviations above the mean over random orders of the same
    columns of B: about 0 for a wrong packing, and for random factors in any.

    Args:
        a: the rows of A, (experts * r, in), finite.
        b: the columns of B as rows, (experts * r, out), finite.
        experts: the number of experts.
        generator: what draws the orders, on the CPU.

    Returns:
        The figure of each packing; 0 where no order of the columns gives another product.
    """
    a, b = _scaled(a), _scaled(b)
    return {packing: _score(a, b, experts=experts, packing=packing, generator=generator) for packing in PACKINGS}


def _score(a: Tensor, b: Tensor, *, experts: int, packing: Packing, generator: torch.Generator) -> float:
    left, right = (
        by_expert(vectors, experts=experts, grouping=grouping)[:_EXPERTS, :_RANKS]
        for vectors, grouping in zip((a, b), packing, strict=True)
    )
    grams = left @ left.mT
    columns = right.flatten(0, 1)
    orders = (torch.randperm(len(columns), generator=generator) for _ in range(_ORDERS))
    others = torch.tensor([_norm(grams, columns[order].view_as(right)) for order in orders], dtype=torch.float64)
    deviation = float(others.std())
    found = _norm(grams, right)
    if not deviation > abs(found) * torch.finfo(torch.float32).eps * _ORDERS:
        return 0.0
    return (found - float(others.mean())) / deviation


def _norm(grams: Tensor, columns: Tensor) -> float:
    """Return the squared norm of B A over all experts, from A A^T, (experts, r, r), and B^T, (experts, r, out)."""
    return float((grams * (columns @ columns.mT)).sum(dtype=torch.float64))


def _scaled(vectors: Tensor) -> Tensor:
    """Return the vectors in float32 with 1 as their largest magnitude, so that no norm overflows or vanishes."""
    vectors = vectors.float()
    largest = vectors.abs().max()
    return vectors / largest if largest > 0 else vectors


class Angles(NamedTuple):
    """The squared cosines between vectors of one expert.

    Attributes:
        squares: their sum, times the width, so that each is 1 on average for random vectors.
        pairs: how many there are, of vectors that are not zero.
    """

    squares: float
    pairs: int


def angles(vectors: Tensor, *, experts: int, grouping: Grouping) -> Angles:
    """Return how near to right angles the vectors of each expert stand to each other.

    Args:
        vectors: the rows of A, or the columns of B as rows, (experts * r, width), finite.
        experts: the number of experts.
        grouping: how they are packed.

    Returns:
        The sum over all pairs that are looked at.
    """
    own = by_expert(_scaled(vectors), experts=experts, grouping=grouping)[:_EXPERTS, :_RANKS]
    lengths = own.norm(dim=2)
    cosines = torch.nn.functional.normalize(own, dim=2)
    squares = (cosines @ cosines.mT).square()
    squares.diagonal(dim1=1, dim2=2).zero_()
    there = (lengths > 0).sum(dim=1)
    return Angles(float(squares.sum(dtype=torch.float64)) * vectors.shape[1], int((there * (there - 1)).sum()))


@dataclass(frozen=True, slots=True)
class FactorFigures:
    """What the factors of one parameter say by themselves.

    Attributes:
        scores: of `product_scores`.
        a: of `angles`, for the rows of A.
        b: the same for the columns of B.
    """

    scores: dict[Packing, float]
    a: dict[Grouping, Angles]
    b: dict[Grouping, Angles]


def factor_figures(a: Tensor, b: Tensor, *, experts: int, generator: torch.Generator) -> FactorFigures:
    """Return the figures of one parameter's factors.

    Args:
        a: the rows of A, (experts * r, in), finite.
        b: the columns of B as rows, (experts * r, out), finite.
        experts: the number of experts.
        generator: what draws the orders, on the CPU.

    Returns:
        The figures, for `told_by_factors`.
    """
    scores = product_scores(a, b, experts=experts, generator=generator)
    of_a, of_b = ({one: angles(each, experts=experts, grouping=one) for one in _GROUPINGS} for each in (a, b))
    return FactorFigures(scores, of_a, of_b)


def told_by_factors(figures: Sequence[FactorFigures]) -> Told:
    """Return the packing that the factors of an adapter speak for.

    Where the rows of A and the columns of B each stand at right angles in one grouping alone, that is it. Otherwise the
    product must stand out by `_CLEAR` standard deviations over all parameters (each figure is standard normal without
    any relation, and so is their sum over the root of their number), and every other packing's by less than half.
    """
    of_a, of_b = (_at_right_angles([getattr(one, half) for one in figures]) for half in "ab")
    if of_a is not None and of_b is not None:
        return Told(Packing(of_a, of_b), "by their right angles")
    if not figures:
        return Told(None, "there is nothing to tell it by")
    scores = {one: sum(each.scores[one] for each in figures) / math.sqrt(len(figures)) for one in PACKINGS}
    first, second = sorted(PACKINGS, key=lambda one: -scores[one])[:2]
    how = f"B A stands {scores[first]:.1f} standard deviations out, and {scores[second]:.1f} in the next packing"
    clear = scores[first] >= _CLEAR and scores[second] <= _APART * scores[first]
    return Told(first if clear else None, how)


def _at_right_angles(found: Sequence[dict[Grouping, Angles]]) -> Grouping | None:
    """Return the only grouping in which the vectors of an expert stand at right angles; None where there is none."""
    right = []
    for grouping in _GROUPINGS:
        squares = sum(each[grouping].squares for each in found)
        pairs = sum(each[grouping].pairs for each in found)
        if pairs >= _PAIRS and squares < _RIGHT_ANGLE * pairs:
            right.append(grouping)
    return right[0] if len(right) == 1 else None


@dataclass(slots=True)
class Agreement:
    """How well the products of one packing agree with an update, summed over experts and parameters.

    Attributes:
        dot: inner product of update and products.
        products: squared norm of the products.
    """

    dot: float = 0.0
    products: float = 0.0

    def add(self, delta: Tensor, *, a: Tensor, b: Tensor) -> None:
        """Add the figures of one expert to the sums.

        Args:
            delta: its update, (out, in), float32.
            a: its rows of A, (r, in), float32.
            b: its columns of B as rows, (r, out), float32.
        """
        self.dot += float(((b @ delta) * a).sum(dtype=torch.float64))
        self.products += float(((a @ a.T) * (b @ b.T)).sum(dtype=torch.float64))

    def left_over(self, update: float) -> float:
        """Return the share of an update that the products leave at their best scale; `update` is its squared norm."""
        if not (update > 0 and self.products > 0 and self.dot > 0):
            return 1.0
        return max(0.0, 1 - self.dot**2 / (update * self.products))


def told_by_update(found: dict[Packing, Agreement], *, update: float) -> Told:
    """Return the packing whose products are the update of a merged fine-tune.

    Args:
        found: the agreement of each packing.
        update: squared norm of the whole update.

    Returns:
        The packing that leaves less than half of the update over, and at most half of what any other leaves.
    """
    left = {packing: agreement.left_over(update) for packing, agreement in found.items()}
    first, second = sorted(left, key=lambda one: left[one])[:2]
    how = f"B A leaves {left[first]:.1%} of the fine-tune's update over, and {left[second]:.1%} in the next packing"
    clear = left[first] < _EXPLAINED and left[first] <= _APART * left[second]
    return Told(first if clear else None, how)
