"""Experts in MXFP4: the values of transformers, bit for bit."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from publisher.checkpoints import mxfp4


def packed(experts: int, rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(256, (experts, rows, groups), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 6, 3), (4, 128, 2)])
def test_the_values_are_those_of_transformers_bit_for_bit(shape: tuple[int, int, int]) -> None:
    blocks, scales = packed(*shape)
    ours, theirs = mxfp4.dequantise(blocks, scales), convert_moe_packed_tensors(blocks, scales)
    assert ours.shape == (shape[0], shape[2] * 32, shape[1])
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))


def test_every_code_at_every_scale_is_its_value_times_a_power_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for scale in (0, 1, 118, 127, 140, 254, 255):
        found = mxfp4.dequantise(codes, torch.full((1, 1, 16), scale, dtype=torch.uint8)).flatten()
        for code in (0, 1, 0x23, 0x9F, 0xFF):
            low, high = mxfp4.VALUES[code & 15], mxfp4.VALUES[code >> 4]
            expected = torch.tensor([low, high], dtype=torch.float64) * 2.0 ** (scale - 127)
            assert torch.equal(found[2 * code : 2 * code + 2], expected.bfloat16())
