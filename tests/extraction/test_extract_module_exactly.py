"""The exact method on one module: what it restores, which merge and which rank it finds, what it says of misfits."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from publisher.adapters.peft_files import Factors
from publisher.extraction.module import extract_module
from publisher.manifest.schema import AdapterSettings
from publisher.numerics.intervals import Arithmetic, merged
from publisher.records.extraction import PLATEAU, ExactRecovery

NAME = "model.layers.3.mlp.up_proj.weight"
SHAPE, RANK = (256, 320), 16


def _settings(
    rank: int | Literal["auto"] = RANK,
    *,
    dtype: Literal["bfloat16", "float16", "float32"] = "float32",
    residual: bool = False,
) -> AdapterSettings:
    return AdapterSettings(
        method="exact",
        rank=rank,
        dtype=dtype,
        layout="pattern",
        task_type="FEATURE_EXTRACTION",
        residual=residual,
    )


def _base(dtype: torch.dtype = torch.bfloat16, *, seed: int = 5) -> Tensor:
    return (0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _update(rms: float, *, weakest: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    left, right = (torch.randn(size, generator=generator) for size in ((SHAPE[0], RANK), (RANK, SHAPE[1])))
    update: Tensor = (left * torch.linspace(1, weakest, RANK)) @ right
    return update * rms / update.square().mean().sqrt()


def _extracted(source: Tensor, base: Tensor, settings: AdapterSettings) -> tuple[Factors, ExactRecovery]:
    module = extract_module(NAME, base=base, tuned=source, settings=settings)
    assert module.figures.recovery is not None
    return module, module.figures.recovery


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_factors_merge_to_the_release(dtype: torch.dtype) -> None:
    base = _base(dtype)
    source = merged(base=base, product=_update(1e-3), dtype=dtype)
    module, recovery = _extracted(source, base, _settings())
    same = float((merged(base=base, product=module.b @ module.a, dtype=dtype) == source).double().mean())
    assert same > 0.999
    assert module.figures.exact_share == pytest.approx(same, abs=1e-5)
    assert recovery.share == recovery.float32_share == pytest.approx(same, abs=1e-5)
    assert recovery.svd_share < 0.9
    assert recovery.arithmetic == "one rounding"
    assert recovery.rank_shown == RANK


def test_factors_in_bfloat16_restore_less_and_both_shares_are_told() -> None:
    base = _base()
    source = merged(base=base, product=_update(1e-3), dtype=torch.bfloat16)
    module, recovery = _extracted(source, base, _settings(dtype="bfloat16"))
    assert module.b.dtype == module.a.dtype == torch.bfloat16
    assert recovery.float32_share > 0.999
    assert recovery.svd_share < recovery.share < recovery.float32_share
    assert module.figures.exact_share == recovery.share


@pytest.mark.parametrize("rms", [2e-3, 6e-3, 3e-2])
def test_a_merge_that_rounded_the_update_first_is_recognised_and_undone(rms: float) -> None:
    base, first = _base(), "update rounded first"
    source = merged(base=base, product=_update(rms), dtype=torch.bfloat16, arithmetic="update rounded first")
    module, recovery = _extracted(source, base, _settings())
    assert recovery.arithmetic == first
    assert recovery.told_apart
    assert recovery.share > 0.999
    if module.figures.arithmetic is None:  # its own rounding does not show beside that of the sum
        assert module.figures.exact_share < recovery.share
    else:
        assert module.figures.exact_share == recovery.share


@pytest.mark.parametrize("rms", [6e-4, 6e-3, 3e-2])
def test_a_merge_that_rounded_once_is_not_taken_for_another(rms: float) -> None:
    base = _base()
    recovery = _extracted(merged(base=base, product=_update(rms), dtype=torch.bfloat16), base, _settings())[1]
    assert recovery.arithmetic == "one rounding"


def test_half_the_rank_shows_as_a_plateau_far_below() -> None:
    base = _base()
    module, recovery = _extracted(
        merged(base=base, product=_update(1e-3), dtype=torch.bfloat16), base, _settings(RANK // 2)
    )
    assert recovery.ended == "settled"
    assert recovery.float32_share < 0.9
    assert module.figures.rank_at_least


def test_one_rank_too_few_is_below_what_the_right_one_reaches() -> None:
    base = _base()
    source = merged(base=base, product=_update(1e-3), dtype=torch.bfloat16)
    shares = [_extracted(source, base, _settings(rank))[1].float32_share for rank in (RANK - 1, RANK)]
    assert shares[0] < PLATEAU < shares[1]


def test_double_the_rank_is_seen_in_the_singular_values() -> None:
    base = _base()
    module, recovery = _extracted(
        merged(base=base, product=_update(1e-3), dtype=torch.bfloat16), base, _settings(2 * RANK)
    )
    assert (module.figures.rank, recovery.rank_shown) == (2 * RANK, RANK)
    assert recovery.share > 0.999


def test_a_rank_that_hides_in_the_noise_is_found_by_the_share_it_reaches() -> None:
    base = _base()
    source = merged(base=base, product=_update(1.2e-4, weakest=0.05), dtype=torch.bfloat16)
    module, recovery = _extracted(source, base, _settings("auto"))
    assert recovery.rank_shown < RANK
    assert module.figures.rank == RANK
    assert recovery.float32_share > PLATEAU


def _another_base(base: Tensor) -> Tensor:
    return (base.float() + 2e-3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))).to(base.dtype)


def _full(base: Tensor) -> Tensor:
    return merged(
        base=base, product=1e-3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(8)), dtype=base.dtype
    )


@pytest.mark.parametrize(
    ("what", "rank"), [("another base", RANK), ("a full fine-tune", RANK), ("a full fine-tune", 64)]
)
def test_what_no_low_rank_explains_stays_far_from_exact_at_any_rank(what: str, rank: int) -> None:
    base = _base()
    source = (
        _full(base)
        if what == "a full fine-tune"
        else merged(base=_another_base(base), product=_update(1e-3), dtype=base.dtype)
    )
    module, recovery = _extracted(source, base, _settings(rank))
    assert recovery.float32_share < 0.7
    assert module.figures.ratio is not None
    assert module.figures.ratio > 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arithmetic", ["one rounding", "update rounded first"])
def test_with_the_residual_a_merge_is_the_release_in_every_bit(
    arithmetic: Arithmetic, dtype: Literal["float32", "bfloat16"]
) -> None:
    base = _base()
    source = merged(base=base, product=_update(1e-2), dtype=torch.bfloat16, arithmetic=arithmetic)
    module, recovery = _extracted(source, base, _settings(dtype=dtype, residual=True))
    assert module.residual is not None
    back = merged(base=base, product=module.b.float() @ module.a.float(), dtype=torch.bfloat16, arithmetic=arithmetic)
    missing = float((back != source).double().mean())
    assert torch.equal(module.residual.apply(back), source)
    assert recovery.residual == module.residual.index.numel()
    assert missing <= recovery.residual / source.numel() < missing + 0.01


def test_sums_in_another_order_need_no_other_residual() -> None:
    base = _base()
    source = merged(base=base, product=_update(1e-2), dtype=torch.bfloat16)
    module, _ = _extracted(source, base, _settings(residual=True))
    assert module.residual is not None
    for seed in range(5):
        order = torch.randperm(RANK, generator=torch.Generator().manual_seed(seed))
        product = torch.zeros(SHAPE)
        for k in order:
            product += module.b[:, k : k + 1] * module.a[k : k + 1]
        assert torch.equal(module.residual.apply(merged(base=base, product=product, dtype=torch.bfloat16)), source)


def test_the_same_input_gives_the_same_bytes() -> None:
    base = _base()
    source = merged(base=base, product=_update(1e-3), dtype=torch.bfloat16)
    first, second = (extract_module(NAME, base=base, tuned=source, settings=_settings(residual=True)) for _ in range(2))
    assert torch.equal(first.b, second.b)
    assert torch.equal(first.a, second.a)
    assert first.figures == second.figures


def test_an_update_of_full_width_comes_back() -> None:
    base = _base()[:8]
    source = merged(
        base=base, product=torch.randn(8, SHAPE[1], generator=torch.Generator().manual_seed(1)) / 100, dtype=base.dtype
    )
    module, recovery = _extracted(source, base, _settings(8))
    assert recovery.share > 0.999
    assert math.isclose(module.figures.exact_share, recovery.share)
