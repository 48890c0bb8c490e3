"""The mathematics, against torch's own SVD, the true rounding errors and PEFT's own merge."""

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from publisher.numerics import delta as delta_module
from publisher.numerics import svd
from publisher.numerics.delta import delta_of
from publisher.numerics.dtypes import step_in_own_dtype, step_of
from publisher.numerics.merge_quality import merge_quality
from publisher.numerics.noise import expected_error, rounding_noise
from publisher.numerics.svd import Decomposition, decompose, factors_of, orthonormal

NARROW = (torch.bfloat16, torch.float16)
EVERY = (*NARROW, torch.float32)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=_random(seed))


def _weight(shape: tuple[int, int], *, kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """A weight with deviation 0.02: gaussian, with loud rows and columns, with heavy tails, or with two huge rows."""
    weight: Tensor = 0.02 * _gaussian(*shape, seed=seed)
    if kind == "loud":
        weight *= torch.exp(_gaussian(shape[0], 1, seed=seed + 1)) * torch.exp(_gaussian(1, shape[1], seed=seed + 2))
    if kind == "heavy":
        weight /= _gaussian(5, *shape, seed=seed + 1).square().mean(0).sqrt()  # Student's t
    if kind == "outlier rows":
        weight[:2] *= 30
    return weight.to(dtype)


def _low_rank(shape: tuple[int, int], *, rank: int, rms: float, seed: int) -> Tensor:
    left, right = _gaussian(shape[0], rank, seed=seed), _gaussian(rank, shape[1], seed=seed + 1)
    return left @ right * (rms / math.sqrt(rank))


def _merged(base: Tensor, update: Tensor) -> Tensor:
    return (base.float() + update).to(base.dtype)


def _pair(
    shape: tuple[int, int], *, rank: int, rms: float, kind: str = "gaussian", dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Base, source and the true update."""
    base = _weight(shape, kind=kind, dtype=dtype, seed=seed)
    update = _low_rank(shape, rank=rank, rms=rms, seed=seed + 5)
    return base, _merged(base, update), update


def _spectrum(shape: tuple[int, int], values: Tensor) -> Tensor:
    """A matrix with these singular values."""
    sides = (_gaussian(length, len(values), seed=length).double() for length in shape)
    left, right = (torch.linalg.qr(side).Q for side in sides)
    matrix: Tensor = (left * values.double()) @ right.T
    return matrix.float()


def _optimum(delta: Tensor, rank: int) -> float:
    return float(torch.linalg.svdvals(delta.double())[rank:].norm())


def _fit(found: Decomposition) -> Tensor:
    return (found.u * found.s) @ found.v.T


# --- update and steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_the_update_is_the_float32_difference_to_the_base_in_the_dtype_that_it_was_merged_in(
    dtype: torch.dtype,
) -> None:
    source, base = _gaussian(70, 30, seed=0).to(dtype), _gaussian(70, 30, seed=1)
    assert torch.equal(delta_of(base=base, tuned=source), source.float() - base)
    assert torch.equal(delta_of(base=base.to(dtype), tuned=source), source.float() - base.to(dtype).float())


@pytest.mark.parametrize("dtype", EVERY, ids=str)
@given(data=st.data())
def test_a_step_is_the_distance_to_the_next_number_of_greater_magnitude(dtype: torch.dtype, data: Any) -> None:
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    largest = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(integers))
    bits = data.draw(st.lists(st.integers(0, largest - 1), min_size=1, max_size=20))
    values = torch.tensor(bits, dtype=integers)
    here, beyond = (pattern.view(dtype).double() for pattern in (values, values + 1))  # neighbours are bits + 1
    for signed in (here, -here):
        assert torch.equal(step_of(signed.float(), dtype).double(), beyond - here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_at_powers_of_two_subnormals_and_zero_agree_with_nextafter(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = torch.tensor([0.0, info.smallest_normal, info.smallest_normal * 0.75, 1.0, 2.0, 0.25, 1.5], dtype=dtype)
    following = torch.nextafter(special, torch.full_like(special, math.inf))
    assert torch.equal(step_of(special.float(), dtype).double(), following.double() - special.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_taken_in_the_dtype_itself_are_those_taken_in_float32(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    finite = every[every.isfinite()]
    assert torch.equal(step_in_own_dtype(finite).float(), step_of(finite.float(), dtype))


# --- rounding floor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "loud"])
def test_the_rounding_floor_is_predicted_within_two_percent(kind: str, dtype: torch.dtype) -> None:
    base, source, update = _pair((384, 320), rank=16, rms=1e-2, kind=kind, dtype=dtype, seed=3)
    real = torch.linalg.norm(source.double() - base.double() - update.double())
    assert rounding_noise(source, name="x").norm == pytest.approx(float(real), rel=0.02)


@pytest.mark.parametrize("rank", [1, 16, 64, 200])
def test_the_residual_of_a_fit_of_the_true_rank_is_the_expected_error(rank: int) -> None:
    base, source, _ = _pair((320, 400), rank=rank, rms=2e-3, dtype=torch.bfloat16, seed=rank)
    delta = delta_of(base=base, tuned=source)
    found = decompose(delta, rank=rank, threshold=0.0, name="x")
    expected = expected_error(rounding_noise(source, name="x").norm, shape=(320, 400), rank=rank)
    assert 0.9 < found.misfit / expected < 1.1


def test_at_full_width_nothing_is_left() -> None:
    base, source, _ = _pair((24, 300), rank=24, rms=2e-3, dtype=torch.bfloat16, seed=1)
    delta = delta_of(base=base, tuned=source)
    found = decompose(delta, rank=64, threshold=0.0, name="x")
    assert (found.rank, found.sigma_next, found.method) == (24, None, "exact svd")
    assert found.misfit < 1e-6 * float(delta.norm())
    assert expected_error(1.0, shape=(24, 300), rank=24) == 0


# --- spectral noise threshold and rank ----------------------------------------------------------------------------

SHAPES = ((8, 64), (64, 8), (64, 64), (48, 512), (200, 50), (256, 256), (512, 512))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "loud", "heavy", "outlier rows"])
def test_no_rounding_error_has_a_singular_value_above_the_threshold(shape: tuple[int, int], kind: str) -> None:
    for seed in range(0, 100 if max(shape) < 256 else 20, 10):
        dtype = NARROW[seed // 10 % 2]
        base, source, update = _pair(shape, rank=4, rms=2e-3, kind=kind, dtype=dtype, seed=seed)
        errors = source.double() - base.double() - update.double()
        assert rounding_noise(source, name=f"{seed}").threshold > float(torch.linalg.matrix_norm(errors, ord=2))


@pytest.mark.parametrize(("shape", "most"), [((8, 64), 1.8), ((64, 64), 1.3), ((48, 512), 1.2), ((512, 512), 1.08)])
def test_the_threshold_stands_closely_above_the_errors_of_even_weights(shape: tuple[int, int], most: float) -> None:
    base, source, update = _pair(shape, rank=4, rms=1e-2, dtype=torch.bfloat16, seed=2)
    real = torch.linalg.matrix_norm(source.double() - base.double() - update.double(), ord=2)
    assert 1 < rounding_noise(source, name="x").threshold / float(real) < most


@pytest.mark.parametrize("shape", [(8, 64), (64, 64), (48, 512), (200, 50), (96, 192), (300, 260)], ids=str)
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_auto_finds_every_planted_rank_that_stands_out_of_the_noise(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(20):
        rank = 1 + min(shape) // 16 + seed * 7 % (min(shape) // 4)
        rms = (1e-3, 3e-3, 1e-2)[seed % 3]
        base, source, update = _pair(shape, rank=rank, rms=rms, dtype=dtype, seed=100 * seed)
        threshold = rounding_noise(source, name="x").threshold
        assert float(torch.linalg.svdvals(update)[rank - 1]) > 1.5 * threshold
        assert decompose(delta_of(base=base, tuned=source), rank="auto", threshold=threshold, name="x").rank == rank


def test_auto_never_misses_an_update_of_rank_one_whose_rounding_has_structure_of_its_own() -> None:
    base, source, update = _pair((256, 256), rank=1, rms=3e-4, dtype=torch.bfloat16, seed=1)
    errors = source.double() - base.double() - update.double()
    threshold = rounding_noise(source, name="x").threshold
    assert float(torch.linalg.matrix_norm(errors, ord=2)) > threshold  # what b_i a_j < step / 2 loses is no white noise
    assert decompose(delta_of(base=base, tuned=source), rank="auto", threshold=threshold, name="x").rank >= 1


@pytest.mark.parametrize("shape", [(90, 130), (130, 90)], ids=str)
@pytest.mark.parametrize("rank", [0, 3, 7, 8, 9, 16, 17])
def test_auto_widens_until_it_sees_the_end_of_the_signal(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], rank: int
) -> None:
    monkeypatch.setattr(svd, "FIRST_WIDTH", 4)
    monkeypatch.setattr(svd, "OVERSAMPLING", 6)
    monkeypatch.setattr(svd, "EXACT_BELOW", 16)
    values = torch.cat([torch.linspace(9, 3, rank), torch.linspace(0.9, 0.1, 70)])
    found = decompose(_spectrum(shape, values), rank="auto", threshold=1.0, name="x")
    assert (found.rank, found.method) == (rank, "randomized svd")
    assert found.sigma_next == pytest.approx(0.9, rel=0.02)
    assert torch.allclose(found.s, values[:rank], rtol=1e-4)


@pytest.mark.parametrize("shape", [(300, 320), (60, 80)], ids=str)
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_share_of_the_energy_keeps_the_fewest_columns_that_hold_it(shape: tuple[int, int], share: float) -> None:
    delta = _spectrum(shape, 0.8 ** torch.arange(50))
    found = decompose(delta, rank=share, threshold=0.0, name="x")
    squares = torch.linalg.svdvals(delta.double()).square().cumsum(0) / delta.double().square().sum()
    assert found.rank == 1 + int((squares < share).sum())
    assert 1 - (found.misfit / float(delta.norm())) ** 2 >= share - 1e-6


def test_auto_takes_the_exact_svd_where_the_update_has_no_low_rank() -> None:
    delta = _gaussian(400, 330, seed=0)
    found = decompose(delta, rank="auto", threshold=1.0, name="x")
    assert found.method == "exact svd"
    assert found.rank == int((torch.linalg.svdvals(delta.double()) > 1.0).sum())


def test_auto_counts_no_arithmetic_error_as_signal_even_without_any_rounding_noise() -> None:
    for shape in ((60, 500), (400, 350)):
        delta = _low_rank(shape, rank=20, rms=1.0, seed=4)
        assert decompose(delta, rank="auto", threshold=0.0, name="x").rank == 20


# --- truncated svd ------------------------------------------------------------------------------------------


def _hard_matrices() -> dict[str, tuple[Tensor, int]]:
    """Matrices with the rank asked for; the exact SVD would be taken of none of them."""
    base, source, _ = _pair((400, 520), rank=40, rms=6e-4, dtype=torch.bfloat16, seed=0)
    planted, falling = delta_of(base=base, tuned=source), torch.arange(1.0, 321)
    quiet = planted.clone()
    quiet[50:300] = 0
    base, source, _ = _pair((520, 400), rank=40, rms=1e-2, dtype=torch.bfloat16, seed=0)
    loud = delta_of(base=base, tuned=source)
    return {
        "a gap": (planted, 40),
        "a gap, tall": (planted.T.contiguous(), 40),
        "a gap, wide, as a transposed view": (planted.T, 40),
        "a rank too small": (planted, 10),
        "a rank too large": (planted, 60),
        "a gap, above little noise": (loud, 40),
        "zero rows": (quiet, 40),
        "no gap": (_gaussian(400, 420, seed=1), 48),
        "1/k": (_spectrum((330, 600), 1 / falling), 64),
        "1/sqrt(k)": (_spectrum((600, 330), falling**-0.5), 64),
        "0.95^k": (_spectrum((330, 340), 0.95**falling), 64),
    }


@pytest.mark.parametrize("name", _hard_matrices())
def test_the_residual_is_within_a_thousandth_of_the_full_svd(name: str) -> None:
    delta, rank = _hard_matrices()[name]
    found = decompose(delta, rank=rank, threshold=0.0, name="x")
    assert (found.rank, found.method) == (rank, "randomized svd")
    best = _optimum(delta, rank)
    real = torch.linalg.norm(delta.double() - (found.u.double() * found.s.double()) @ found.v.double().T)
    assert best * 0.9999 < float(real) < best * 1.001
    assert found.misfit == pytest.approx(float(real), rel=1e-4)


@pytest.mark.parametrize("name", _hard_matrices())
def test_singular_values_and_vectors_are_those_of_the_full_svd(name: str) -> None:
    delta, rank = _hard_matrices()[name]
    found = decompose(delta, rank=rank, threshold=0.0, name="x")
    exact = torch.linalg.svdvals(delta.double())
    assert found.sigma_next == pytest.approx(float(exact[rank]), rel=0.05)
    assert torch.allclose(found.s.double(), exact[:rank], atol=5e-3 * float(exact[0]))
    assert bool((found.s.diff() <= 0).all())
    for side in (found.u, found.v):
        assert torch.allclose(side.T @ side, torch.eye(rank), atol=1e-5)


@pytest.mark.parametrize("shape", [(40, 70), (400, 330), (330, 400)], ids=str)
@pytest.mark.parametrize("rank", [16, 30, 50])
def test_an_update_of_exactly_low_rank_is_recovered_at_that_rank_and_above(shape: tuple[int, int], rank: int) -> None:
    delta = _low_rank(shape, rank=16, rms=1e-3, seed=1)
    delta[3:9] = 0
    found = decompose(delta, rank=rank, threshold=0.0, name="x")
    assert found.rank == min(rank, *shape)
    assert found.misfit < 1e-6 * float(delta.norm())
    b, a = factors_of(found, torch.float32)
    assert torch.allclose(b @ a, delta, atol=1e-5 * float(delta.abs().max()))


@pytest.mark.parametrize("shape", [(20, 30), (300, 320)], ids=str)
@pytest.mark.parametrize("rank", ["auto", 5])
def test_an_update_of_zeros_has_no_signal_and_finite_factors(
    shape: tuple[int, int], rank: int | Literal["auto"]
) -> None:
    found = decompose(torch.zeros(shape), rank=rank, threshold=0.1, name="x")
    assert (found.rank, found.misfit) == (0 if rank == "auto" else 5, 0.0)
    assert all(torch.equal(factor, torch.zeros_like(factor)) for factor in factors_of(found, torch.float32))


@given(rows=st.integers(2, 40), columns=st.integers(2, 40), seed=st.integers(0, 2**32))
def test_the_residual_falls_as_the_rank_rises(rows: int, columns: int, seed: int) -> None:
    delta = _gaussian(rows, columns, seed=seed)
    ranks = range(1, min(rows, columns) + 1)
    misfits = [decompose(delta, rank=rank, threshold=0.0, name="x").misfit for rank in ranks]
    assert misfits == sorted(misfits, reverse=True)
    assert misfits[-1] < 1e-5 * float(delta.norm())


@given(rows=st.integers(8, 60), columns=st.integers(8, 60), rank=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_an_update_that_was_never_rounded_leaves_no_residual(rows: int, columns: int, rank: int, seed: int) -> None:
    delta = _low_rank((rows, columns), rank=rank, rms=1e-3, seed=seed)
    assert decompose(delta, rank=rank, threshold=0.0, name="x").misfit < 1e-5 * float(delta.norm())


# --- determinism --------------------------------------------------------------------------------------------


def _bytes(found: Decomposition) -> list[bytes]:
    return [part.contiguous().numpy().tobytes() for part in (found.u, found.s, found.v)]


@pytest.mark.parametrize("shape", [(40, 90), (400, 330)], ids=str)
def test_the_same_input_gives_the_same_bytes_whatever_the_global_generator_has_done(shape: tuple[int, int]) -> None:
    base, source, _ = _pair(shape, rank=8, rms=2e-3, dtype=torch.bfloat16, seed=0)
    delta = delta_of(base=base, tuned=source)
    before = rounding_noise(source, name="x"), decompose(delta, rank=8, threshold=0.0, name="x")
    torch.manual_seed(99)
    state = torch.get_rng_state()
    after = rounding_noise(source, name="x"), decompose(delta, rank=8, threshold=0.0, name="x")
    assert torch.equal(torch.get_rng_state(), state)
    assert after[0] == before[0]
    assert _bytes(after[1]) == _bytes(before[1])
    assert replace(after[1], u=before[1].u, s=before[1].s, v=before[1].v) == before[1]


def test_another_name_draws_other_noise() -> None:
    source = _gaussian(64, 64, seed=0).bfloat16()
    assert rounding_noise(source, name="x").threshold != rounding_noise(source, name="y").threshold


@pytest.mark.parametrize("shape", [(40, 90), (400, 330)], ids=str)
def test_the_largest_entry_of_every_right_vector_is_positive(shape: tuple[int, int]) -> None:
    found = decompose(_gaussian(*shape, seed=0), rank=12, threshold=0.0, name="x")
    assert bool((found.v.gather(0, found.v.abs().argmax(dim=0, keepdim=True)) > 0).all())
    flipped = decompose(-_gaussian(*shape, seed=0), rank=12, threshold=0.0, name="x")
    assert torch.allclose(flipped.v, found.v, atol=1e-4)
    assert torch.allclose(flipped.u, -found.u, atol=1e-4)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize("shape", [(40, 90), (400, 330)], ids=str)
def test_no_input_is_modified(shape: tuple[int, int], dtype: torch.dtype) -> None:
    base, source, _ = _pair(shape, rank=8, rms=2e-3, dtype=dtype, seed=0)
    delta = delta_of(base=base, tuned=source)
    found = decompose(delta, rank=8, threshold=0.0, name="x")
    b, a = factors_of(found, torch.float32)
    inputs = [base, source, delta, found.u, found.s, found.v, b, a]
    copies = [tensor.clone() for tensor in inputs]
    delta_of(base=base, tuned=source)
    step_of(source.float(), dtype)
    rounding_noise(source, name="x")
    decompose(delta, rank="auto", threshold=0.0, name="x")
    factors_of(found, torch.float32)
    merge_quality(base=base, tuned=source, b=b, a=a)
    orthonormal(b)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


# --- factors and merging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_the_factors_multiply_to_the_fit_up_to_their_own_rounding(dtype: torch.dtype) -> None:
    found = decompose(_low_rank((60, 90), rank=12, rms=1e-3, seed=0), rank=8, threshold=0.0, name="x")
    b, a = factors_of(found, dtype)
    assert (b.shape, a.shape, b.dtype, a.dtype) == ((60, 8), (8, 90), dtype, dtype)
    assert b.is_contiguous()
    assert a.is_contiguous()
    fit = _fit(found)
    assert torch.linalg.norm(b.float() @ a.float() - fit) < torch.finfo(dtype).eps * torch.linalg.norm(fit)


def _merged_by_peft(base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """The weight that PEFT's default merge makes of a linear layer and these factors."""
    rank, columns = a.shape
    linear = nn.Linear(columns, base.shape[0], bias=False, dtype=base.dtype)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["0"])
    model: Any = get_peft_model(nn.Sequential(linear), config)
    with torch.no_grad():
        linear.weight.copy_(base)
        layer = model.base_model.model[0]
        layer.lora_A.default.weight.copy_(a)
        layer.lora_B.default.weight.copy_(b)
    merged: Tensor = model.merge_and_unload()[0].weight.detach()
    return merged


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("factor_dtype", EVERY, ids=str)
def test_the_exact_share_is_what_peft_merges_bit_for_bit(dtype: torch.dtype, factor_dtype: torch.dtype) -> None:
    base, source, _ = _pair((96, 130), rank=8, rms=1e-3, dtype=dtype, seed=0)
    found = decompose(delta_of(base=base, tuned=source), rank=8, threshold=0.0, name="x")
    b, a = factors_of(found, factor_dtype)
    merged = _merged_by_peft(base, b, a)
    quality = merge_quality(base=base, tuned=source, b=b, a=a)
    assert quality.exact_elements == int((merged == source).sum())
    assert 0.5 < quality.exact_elements / source.numel() < 1


@pytest.mark.parametrize("block", [1, 130, 1000, 1 << 21])
def test_merge_quality_does_not_depend_on_the_blocks_it_works_in(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(delta_module, "BLOCK_ELEMENTS", block)
    base, source, _ = _pair((96, 130), rank=8, rms=1e-3, dtype=torch.bfloat16, seed=0)
    delta = delta_of(base=base, tuned=source)
    b, a = factors_of(decompose(delta, rank=8, threshold=0.0, name="x"), torch.bfloat16)
    quality = merge_quality(base=base, tuned=source, b=b, a=a)
    assert merge_quality(base=base, tuned=source, b=b, a=a, delta=delta) == quality
    direct = torch.linalg.norm(delta.double() - b.double() @ a.double()) / torch.linalg.norm(delta.double())
    assert quality.relative_error == pytest.approx(float(direct), rel=1e-5)
    assert quality.exact_elements == int((_merged(base, b.float() @ a.float()) == source).sum())


# --- orthonormal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e5, 1e7, 1e9, 1e12])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_a_basis_is_orthonormal_however_close_the_columns_depend_on_each_other(condition: float, scale: float) -> None:
    columns = _spectrum((200, 24), torch.logspace(0, -math.log10(condition), 24))
    q = orthonormal(columns * scale)
    assert torch.allclose(q.T @ q, torch.eye(24), atol=1e-5)
    assert torch.linalg.norm(columns - q @ (q.T @ columns)) < 1e-5 * torch.linalg.norm(columns)


@pytest.mark.parametrize("repeat", [0.0, 1.0])
def test_zero_and_repeated_columns_are_completed_to_a_basis(repeat: float) -> None:
    columns = _gaussian(50, 8, seed=0)
    columns[:, 4:] = repeat * columns[:, :4]
    q = orthonormal(columns)
    assert torch.allclose(q.T @ q, torch.eye(8), atol=1e-5)
    assert torch.allclose(q @ (q.T @ columns), columns, atol=1e-5)
