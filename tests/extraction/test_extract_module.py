"""One tensor pair in, factors and figures out, against the full SVD and the true update."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from publisher.errors import ExtractionError
from publisher.extraction.module import extract_module
from publisher.manifest.schema import AdapterSettings
from publisher.numerics.dtypes import step_of

NAME = "model.layers.3.mlp.up_proj.weight"
RANK = 12
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _settings(
    rank: int | Literal["auto"] = "auto", dtype: Literal["bfloat16", "float16", "float32"] = "float32"
) -> AdapterSettings:
    return AdapterSettings(method="svd", rank=rank, dtype=dtype, layout="pattern", task_type="FEATURE_EXTRACTION")


def _pair(
    dtype: torch.dtype = torch.bfloat16, *, shape: tuple[int, int] = (96, 160), rms: float = 2e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """Base, source and true update of rank 12."""
    generator = torch.Generator().manual_seed(5)
    base = (0.02 * torch.randn(shape, generator=generator)).to(dtype)
    left, right = (torch.randn(size, generator=generator) for size in ((shape[0], RANK), (RANK, shape[1])))
    update = left @ right * (rms / math.sqrt(RANK))
    return base, (base.float() + update).to(dtype), update


@pytest.mark.parametrize("shape", [(96, 160), (420, 300)], ids=str)
def test_every_figure_agrees_with_the_full_svd_and_the_true_update(shape: tuple[int, int]) -> None:
    base, source, update = _pair(shape=shape)
    figures = extract_module(NAME, base=base, tuned=source, settings=_settings(RANK)).figures
    delta = source.double() - base.double()
    sigma, size = torch.linalg.svdvals(delta), float(delta.norm())
    floor = float((delta - update.double()).norm()) / size
    assert (figures.name, figures.shape, figures.rank) == (NAME[:-7], shape, RANK)
    assert figures.method == ("exact svd" if min(shape) < 256 else "randomized svd")
    assert figures.sigma_1 == pytest.approx(float(sigma[0]), rel=1e-4)
    assert figures.sigma_r == pytest.approx(float(sigma[RANK - 1]), rel=1e-4)
    assert figures.sigma_next == pytest.approx(float(sigma[RANK]), rel=0.05)
    assert figures.sigma_next is not None
    assert figures.sigma_next < figures.noise_edge < figures.sigma_r
    assert figures.fit_error == pytest.approx(float(sigma[RANK:].norm()) / size, rel=1e-3)
    assert figures.relative_error == pytest.approx(figures.fit_error, rel=1e-3)
    assert figures.rounding_floor == pytest.approx(floor, rel=0.02)
    absorbed = math.sqrt((1 - RANK / shape[0]) * (1 - RANK / shape[1]))
    assert figures.expected_error == pytest.approx(figures.rounding_floor * absorbed, rel=1e-4)
    assert figures.ratio == pytest.approx(1, abs=0.05)
    assert figures.update_rms == pytest.approx(size / math.sqrt(delta.numel()), rel=1e-5)
    assert figures.unchanged_share == pytest.approx(int((delta == 0).sum()) / delta.numel(), rel=1e-5)
    assert not figures.rank_at_least


def test_the_exact_share_counts_what_merges_back_bit_for_bit() -> None:
    base, source, _ = _pair()
    module = extract_module(NAME, base=base, tuned=source, settings=_settings(RANK))
    merged = (base.float() + module.b @ module.a).bfloat16()
    assert module.figures.exact_share == pytest.approx(float((merged == source).double().mean()), rel=1e-5)
    assert module.figures.exact_share > 0.7


@pytest.mark.parametrize("source_dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("base_dtype", DTYPES.values(), ids=str)
def test_source_and_base_may_have_different_dtypes(source_dtype: torch.dtype, base_dtype: torch.dtype) -> None:
    base, _, update = _pair()
    base[base.abs() < 1e-3] = 0  # the others are the same number in every dtype
    source = (base.float() + update).to(source_dtype)
    module = extract_module(NAME, base=base.to(base_dtype), tuned=source, settings=_settings())
    assert module.figures.rank == RANK
    assert module.figures.ratio == pytest.approx(
        1, abs=0.2
    )  # float32 arithmetic adds its own errors to a float32 source
    assert torch.allclose(module.b @ module.a, update, atol=1e-3 if source_dtype == torch.bfloat16 else 1e-4)


def test_the_rank_is_found_where_it_is_not_given() -> None:
    base, source, _ = _pair()
    module = extract_module(NAME, base=base, tuned=source, settings=_settings("auto"))
    assert module.figures.rank == RANK
    assert not module.figures.rank_at_least


def test_a_rank_too_small_shows_in_ratio_and_flag() -> None:
    base, source, _ = _pair()
    figures = extract_module(NAME, base=base, tuned=source, settings=_settings(RANK - 4)).figures
    assert figures.rank_at_least
    assert figures.ratio is not None
    assert figures.ratio > 3


def test_an_update_below_the_step_is_swallowed_and_the_figures_say_so() -> None:
    base, source, update = _pair(rms=2e-5)
    figures = extract_module(NAME, base=base, tuned=source, settings=_settings("auto")).figures
    assert figures.unchanged_share == pytest.approx(float((source == base).double().mean()), rel=1e-5)
    assert figures.unchanged_share > 0.5
    assert figures.rounding_floor > float((source.float() - base.float() - update).norm()) * 1.2 / (
        figures.update_rms * math.sqrt(update.numel())
    )
    assert figures.rank == 0 or figures.rank_at_least


def test_noise_alone_has_rank_zero_and_empty_factors() -> None:
    base, _, _ = _pair()
    chance = torch.rand(base.shape, generator=torch.Generator().manual_seed(0))
    source = (base.float() + step_of(base.float(), base.dtype) * (chance < 1 / 16)).bfloat16()  # to a neighbour
    source = torch.where(chance < 1 / 32, 2 * base - source, source)  # above or below
    module = extract_module(NAME, base=base, tuned=source, settings=_settings("auto"))
    assert (module.figures.rank, module.figures.sigma_1, module.figures.sigma_r) == (0, 0, 0)
    assert (module.b.shape, module.a.shape) == ((96, 0), (0, 160))
    assert module.figures.fit_error == 1


def test_a_module_narrower_than_the_rank_is_carried_whole() -> None:
    base, source, _ = _pair(shape=(8, 160))
    module = extract_module(NAME, base=base, tuned=source, settings=_settings(RANK))
    assert module.figures.rank == 8
    assert (module.figures.sigma_next, module.figures.ratio, module.figures.expected_error) == (None, None, 0)
    assert module.figures.fit_error < 1e-6
    assert module.figures.exact_share == 1
    assert not module.figures.rank_at_least


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_factors_have_the_dtype_of_the_manifest(dtype: Literal["bfloat16", "float16", "float32"]) -> None:
    base, source, _ = _pair()
    module = extract_module(NAME, base=base, tuned=source, settings=_settings(RANK, dtype))
    assert (module.b.dtype, module.a.dtype) == (DTYPES[dtype], DTYPES[dtype])
    assert (module.b.shape, module.a.shape) == ((96, RANK), (RANK, 160))
    delta = source.double() - base.double()
    shipped = (delta - module.b.double() @ module.a.double()).norm() / delta.norm()
    assert module.figures.relative_error == pytest.approx(float(shipped), rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["source", "base"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_nan_and_infinity_are_refused_with_side_and_count(side: str, value: float, dtype: torch.dtype) -> None:
    base, source, _ = _pair(dtype)
    damaged = source if side == "source" else base
    damaged[3, 5:8] = value
    with pytest.raises(ExtractionError, match=rf"up_proj\.weight holds NaN or infinity: .*\b3 elements in the {side}"):
        extract_module(NAME, base=base, tuned=source, settings=_settings())


def test_a_base_that_overflows_in_the_source_dtype_is_refused_as_infinite() -> None:
    base, source, _ = _pair(torch.float16)
    wide = base.float()
    wide[0, 0] = 1e6
    with pytest.raises(ExtractionError, match="0 elements in the source and 1 element in the base"):
        extract_module(NAME, base=wide, tuned=source, settings=_settings())


def test_the_same_pair_gives_the_same_factors_and_leaves_its_inputs_alone() -> None:
    base, source, _ = _pair(torch.float32)
    copies = base.clone(), source.clone()
    one, other = (extract_module(NAME, base=base, tuned=source, settings=_settings()) for _ in range(2))
    assert one.figures == other.figures
    assert torch.equal(one.b, other.b)
    assert torch.equal(one.a, other.a)
    assert torch.equal(base, copies[0])
    assert torch.equal(source, copies[1])
