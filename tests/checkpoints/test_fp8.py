"""FP8 weights with block scales, as transformers dequantises them, and the steps between their values."""

from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from publisher.checkpoints import fp8

BLOCK = (128, 128)


def quantised(rows: int, columns: int, *, scales: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    weight = (50 * torch.randn(rows, columns, generator=generator)).to(torch.float8_e4m3fn)
    grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    return weight, (1e-4 + 1e-3 * torch.rand(grid, generator=generator)).to(scales)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_the_values_are_those_of_transformers_bit_for_bit(scales: torch.dtype) -> None:
    weight, scale = quantised(256, 384, scales=scales)
    judge: Any = Fp8Dequantize(None)
    theirs = judge._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
    assert torch.equal(fp8.dequantise(weight, scale, BLOCK), theirs)


def test_blocks_at_the_edges_are_smaller() -> None:
    weight, scale = quantised(200, 300)
    values = fp8.dequantise(weight, scale, BLOCK)
    for row, column in ((0, 0), (127, 127), (128, 255), (199, 256), (199, 299)):
        expected = weight[row, column].float() * scale[row // 128, column // 128]
        assert values[row, column] == expected.bfloat16()


def test_the_steps_are_the_distances_of_neighbouring_codes() -> None:
    codes = torch.arange(0, 126, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, -1)
    steps = fp8.steps_of(codes, torch.tensor([[2.0]]), BLOCK)
    assert torch.equal(
        steps[0], 2 * torch.diff(torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    )


def test_a_quantisation_is_told_from_a_change() -> None:
    weight, scale = quantised(128, 128)
    steps, values = fp8.steps_of(weight, scale, BLOCK), fp8.dequantise(weight, scale, BLOCK)
    assert fp8.within(values, (values.float() + 0.49 * steps).bfloat16(), steps=steps)
    changed = values.clone()
    changed[3, 5] += 2 * steps[3, 5]
    assert not fp8.within(values, changed, steps=steps)


def test_steps_of_both_sides_add_up_as_independent_errors() -> None:
    three, four = torch.full((2, 2), 3.0), torch.full((2, 2), 4.0)
    both = fp8.combined([three.clone(), four.clone()])
    assert both is not None
    assert torch.allclose(both, torch.full((2, 2), 5.0))
    assert fp8.combined([None, four]) is four
    assert fp8.combined([None, None]) is None
