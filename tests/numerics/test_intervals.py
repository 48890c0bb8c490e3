"""The rounding intervals: what rounds to a released value lies inside, and what does not lies outside."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from publisher.numerics.intervals import ARITHMETICS, Arithmetic, intervals, merged

DTYPES = [torch.bfloat16, torch.float16]
SPECIAL = {
    "a power of two": 0.25,
    "minus a power of two": -0.5,
    "zero": 0.0,
    "an odd mantissa": 1.0078125,
    "the smallest subnormal of fp16": 2.0**-24,
    "a subnormal of bf16": 2.0**-130,
}


def _pair(dtype: torch.dtype, *, rms: float = 0.01, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = (0.02 * torch.randn(64, 48, generator=generator)).to(dtype)
    return base, rms * torch.randn(64, 48, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@given(seed=st.integers(0, 1000), rms=st.floats(1e-4, 0.1))
def test_the_update_of_a_merge_lies_in_every_interval(
    dtype: torch.dtype, arithmetic: Arithmetic, seed: int, rms: float
) -> None:
    base, update = _pair(dtype, rms=rms, seed=seed)
    goal = intervals(
        base=base, tuned=merged(base=base, product=update, dtype=dtype, arithmetic=arithmetic), arithmetic=arithmetic
    )
    resolution = 2.0**-22 * (update.abs() + base.float().abs())  # the sum is rounded to float32 first
    assert bool(((update - goal.centre).abs() <= goal.half + resolution).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_what_lies_clearly_inside_merges_to_the_release_and_what_lies_outside_does_not(
    dtype: torch.dtype, arithmetic: Arithmetic
) -> None:
    base, update = _pair(dtype)
    source = merged(base=base, product=update, dtype=dtype, arithmetic=arithmetic)
    goal = intervals(base=base, tuned=source, arithmetic=arithmetic)
    wide = goal.half > 2.0**-15 * goal.centre.abs()  # the rest is narrower than float32 can say beside its update
    for place, inside in ((0.99, True), (-0.99, True), (1.01, False), (-1.01, False)):
        back = merged(base=base, product=goal.centre + place * goal.half, dtype=dtype, arithmetic=arithmetic)
        assert bool(((back == source) == inside)[wide].all()), place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
def test_ends_are_half_way_to_the_neighbours_on_either_side(dtype: torch.dtype, value: float) -> None:
    base, source = torch.zeros(1, 1, dtype=dtype), torch.tensor([[value]], dtype=dtype)
    goal = intervals(base=base, tuned=source, arithmetic="one rounding")
    neighbours = [torch.nextafter(source, torch.full_like(source, sign * torch.inf)) for sign in (-1, 1)]
    ends = [float(source.double() + neighbour.double()) / 2 for neighbour in neighbours]
    centre, half = goal.centre.double(), goal.half.double()
    found = [float(centre - half), float(centre + half)]
    assert found == pytest.approx(ends, rel=1e-6, abs=0)


def test_a_release_that_cannot_have_been_rounded_twice_shows_it() -> None:
    base, update = _pair(torch.bfloat16, rms=0.05)
    once = merged(base=base, product=update, dtype=torch.bfloat16)
    impossible = intervals(base=base, tuned=once, arithmetic="update rounded first").half == 0
    assert 0.05 < float(impossible.float().mean()) < 0.9
    assert bool((intervals(base=base, tuned=once, arithmetic="one rounding").half > 0).all())
