"""Weights quantised to 4 bits and back: the published values, by the published rule."""

import pytest
import torch
from torch import Tensor

from publisher.checkpoints import nf4
from publisher.records.checkpoint import Quantisation

# dQuantizeNF4 in csrc/kernels.cu of bitsandbytes: where a value goes over to the next
MIDDLES = [
    -0.8480964004993439,
    -0.6106329262256622,
    -0.4599952697753906,
    -0.33967943489551544,
    -0.23460740596055984,
    -0.13791173323988914,
    -0.045525018125772476,
    0.03979014977812767,
    0.1202552504837513,
    0.2035212516784668,
    0.2920137718319893,
    0.3893125355243683,
    0.5016634166240692,
    0.6427869200706482,
    0.8614784181118011,
]


def way(*, kind: str = "nf4", double: bool = False, dtype: str = "float32") -> Quantisation:
    return Quantisation.model_validate({"kind": kind, "double": double, "dtype": dtype})


def test_the_values_of_nf4_are_quantiles_of_a_normal_distribution_and_change_where_bitsandbytes_changes() -> None:
    """As the paper makes them: 8 quantiles below zero and 9 above, from 0.9677083 on, over the largest."""
    offset = 0.9677083
    above = torch.special.ndtri(torch.linspace(offset, 0.5, 9)[:-1])
    below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8)[:-1])
    values = torch.cat([above, below, torch.zeros(1)]).sort().values
    assert torch.allclose(values / values.max(), torch.tensor(nf4.NF4), atol=1e-6)
    code = torch.tensor(nf4.NF4)
    assert torch.allclose((code[:-1] + code[1:]) / 2, torch.tensor(MIDDLES), atol=1e-6)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_every_element_becomes_the_nearest_value_times_the_largest_magnitude_of_its_64(kind: str) -> None:
    weight = 0.02 * torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    found = nf4.dequantised(weight, way(kind=kind)).reshape(-1, 64)
    code = torch.tensor(nf4.NF4 if kind == "nf4" else [*nf4.FP4, *(-value for value in nf4.FP4)])
    for block, ours in zip(weight.reshape(-1, 64), found, strict=True):
        largest = block.abs().max()
        nearest = code[(block[:, None] / largest - code).abs().argmin(dim=1)]
        assert torch.equal(ours, nearest * largest)


def _double(magnitudes: Tensor) -> Tensor:
    """Double quantisation as functional.py does it, written out for one group of 256 or fewer."""
    offset = magnitudes.mean()
    rest = magnitudes - offset
    code, scale = torch.tensor(nf4.dynamic_map()), rest.abs().max()
    return code[(rest[:, None] / scale - code).abs().argmin(dim=1)] * scale + offset


def test_double_quantisation_moves_the_magnitudes_by_the_dynamic_map() -> None:
    weight = 0.02 * torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    once, twice = (nf4.dequantised(weight, way(double=double)).reshape(-1, 64) for double in (False, True))
    magnitudes = weight.reshape(-1, 64).abs().amax(dim=1)
    expected = once / magnitudes[:, None] * _double(magnitudes)[:, None]
    assert torch.allclose(twice, expected, rtol=1e-6)
    assert not torch.equal(twice, once)


def test_the_dynamic_map_has_the_values_that_bitsandbytes_prints() -> None:
    values = nf4.dynamic_map()
    assert len(values) == 256
    assert values[0] == pytest.approx(-0.992968738079071)
    assert values[-2:] == pytest.approx((0.992968738079071, 1.0))
    assert min(value for value in values if value > 0) == pytest.approx(5.5e-7)


@pytest.mark.parametrize("elements", [64, 100, 3 * 64 + 1, 257 * 64])
@pytest.mark.parametrize("double", [True, False])
def test_a_last_block_may_be_shorter_and_zeros_stay_zero(elements: int, double: bool) -> None:
    weight = torch.randn(elements, generator=torch.Generator().manual_seed(2))
    weight[:64] = 0
    found = nf4.dequantised(weight, way(double=double))
    assert found.shape == weight.shape
    assert bool(torch.isfinite(found).all())
    assert bool((found[:64] == 0).all())
    assert float((found - weight).norm()) < 0.2 * float(weight.norm()) + 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weight_is_cast_before_and_the_product_rounded_once(dtype: str) -> None:
    weight = 0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    short = weight.to(getattr(torch, dtype))
    expected = nf4.dequantised(short.float(), way()).to(short.dtype)
    assert torch.equal(nf4.dequantised(weight, way(dtype=dtype)), expected)
