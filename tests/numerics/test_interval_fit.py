"""Exact recovery on small weights: what it reaches, that it never does harm, and that it ends."""

import math

import pytest
import torch
from torch import Tensor

from publisher.numerics import interval_fit
from publisher.numerics.delta import delta_of
from publisher.numerics.interval_fit import (
    BUDGET,
    RISING,
    IntervalFit,
    OnIteration,
    fit_into_intervals,
    ignore_iterations,
    inside_share,
)
from publisher.numerics.intervals import Intervals, intervals, merged
from publisher.numerics.merge_quality import merge_quality
from publisher.numerics.svd import decompose, factors_of

RANK = 16


def _pair(
    *, rms: float, heavy: bool = False, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, int] = (256, 320)
) -> tuple[Tensor, Tensor, Tensor]:
    """Base, released weight and the true update."""
    generator = torch.Generator().manual_seed(3)
    m, n = shape
    base = 0.02 * torch.randn(m, n, generator=generator)
    if heavy:
        base *= torch.exp(0.5 * torch.randn(m, 1, generator=generator))
        base *= torch.exp(0.5 * torch.randn(1, n, generator=generator))
    strength = torch.linspace(1, 0.1, RANK)
    update = (torch.randn(m, RANK, generator=generator) * strength) @ torch.randn(RANK, n, generator=generator)
    update *= rms / update.square().mean().sqrt()
    base = base.to(dtype)
    return base, merged(base=base, product=update, dtype=dtype), update


def _start(base: Tensor, source: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor]:
    found = decompose(delta_of(base=base, tuned=source), rank=rank, threshold=0.0, name="w")
    return factors_of(found, torch.float32)


def _fit(
    base: Tensor,
    source: Tensor,
    *,
    rank: int = RANK,
    budget: int = BUDGET,
    on_iteration: OnIteration = ignore_iterations,
) -> IntervalFit:
    goal = intervals(base=base, tuned=source, arithmetic="one rounding")
    b, a = _start(base, source, rank)
    return fit_into_intervals(goal, b=b, a=a, budget=budget, on_iteration=on_iteration)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heavy", [False, True], ids=["gaussian", "heavy-tailed"])
@pytest.mark.parametrize("rms", [1e-4, 6e-4, 1e-2])
def test_nearly_every_weight_comes_back_and_the_update_several_times_closer(
    rms: float, heavy: bool, dtype: torch.dtype
) -> None:
    base, source, update = _pair(rms=rms, heavy=heavy, dtype=dtype)
    goal, start = intervals(base=base, tuned=source, arithmetic="one rounding"), _start(base, source)
    found = fit_into_intervals(goal, b=start[0], a=start[1])
    exact_share = merge_quality(base=base, tuned=source, b=found.b, a=found.a).exact_elements / source.numel()
    by_svd = merge_quality(base=base, tuned=source, b=start[0], a=start[1]).exact_elements / source.numel()
    assert by_svd < 0.9
    assert exact_share > 0.999
    assert found.inside[-1] > 0.999
    distance = [float((b @ a - update).norm()) for b, a in (start, (found.b, found.a))]
    assert distance[1] < distance[0] / 2


def test_a_start_that_cannot_be_bettered_is_kept() -> None:
    base, source, _ = _pair(rms=6e-4)
    b, a = _start(base, source)
    none = Intervals(torch.randn(source.shape, generator=torch.Generator().manual_seed(1)), torch.zeros(source.shape))
    found = fit_into_intervals(none, b=b, a=a)
    assert found.inside[0] == max(found.inside)
    torch.testing.assert_close(found.b @ found.a, b @ a, rtol=0, atol=1e-6)


def test_it_ends_at_once_where_all_lie_inside() -> None:
    base, source, update = _pair(rms=6e-4)
    left, s, right = torch.linalg.svd(update.double(), full_matrices=False)
    b, a = (left[:, :RANK] * s[:RANK]).float(), right[:RANK].float()
    goal = intervals(base=base, tuned=source, arithmetic="one rounding")
    found = fit_into_intervals(Intervals(goal.centre, 2 * goal.half), b=b, a=a)
    assert (found.iterations, found.ended) == (0, "inside")


def test_a_rank_too_low_ends_on_a_plateau_soon_after_the_weights_have_risen() -> None:
    base, source, _ = _pair(rms=6e-4)
    found = _fit(base, source, rank=RANK // 2)
    assert found.ended == "settled"
    assert found.iterations < BUDGET
    assert found.iterations >= RISING
    assert max(found.inside) < 0.9


def test_the_budget_bounds_it() -> None:
    base, source, _ = _pair(rms=6e-4)
    found = _fit(base, source, budget=3)
    assert (found.iterations, found.ended) == (3, "budget")
    assert found.inside[-1] > found.inside[0]


def test_each_iteration_is_told() -> None:
    base, source, _ = _pair(rms=6e-4)
    told: list[tuple[int, float]] = []
    found = _fit(
        base,
        source,
        budget=4,
        on_iteration=lambda iteration, share: told.append((iteration, share)),
    )
    assert told == list(enumerate(found.inside))[1:]


def test_factors_come_back_balanced() -> None:
    base, source, _ = _pair(rms=6e-4)
    found = _fit(base, source, budget=5)
    grams = found.b.double().T @ found.b.double(), found.a.double() @ found.a.double().T
    torch.testing.assert_close(grams[0], grams[1], rtol=1e-4, atol=1e-6)
    assert float((grams[0] - grams[0].diagonal().diag()).abs().max()) < 1e-5 * float(grams[0].max())


def test_the_share_inside_is_counted() -> None:
    goal = Intervals(torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [3.0, 0.5]]))
    assert inside_share(goal, b=torch.tensor([[1.0], [1.0]]), a=torch.tensor([[1.0, 2.0]])) == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_no_step_raises_the_violation_of_a_row(seed: int) -> None:
    base, source, _ = _pair(rms=1e-2)
    goal, generator = intervals(base=base, tuned=source, arithmetic="one rounding"), torch.Generator().manual_seed(seed)
    b, a = torch.randn(256, RANK, generator=generator) / 100, torch.randn(RANK, 320, generator=generator) / 100
    weighting = interval_fit._Schedule.of(goal, rank=RANK).at(20)
    left = interval_fit._Side.first(b, columns=320)
    right = interval_fit._Side.first(a.T.contiguous(), columns=256)

    def violation(factor: Tensor) -> Tensor:
        """The root of what lies outside of the intervals, squared, weighted and summed over a row."""
        half = weighting.half_widths(goal.half)
        outside = ((factor @ a - goal.centre).abs() - half).clamp_min(0)
        return (weighting.weights(half) * outside**2).sum(dim=1).sqrt()

    after, _ = interval_fit._improve(goal, left, fixed=right, weighting=weighting)
    assert bool((violation(after.factor) <= violation(b) * (1 + 1e-4)).all())
    assert math.isfinite(float(after.factor.norm()))
