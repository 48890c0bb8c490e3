"""FP8 checkpoints with block scales: W = weight * weight_scale_inv, one scale for each block of the matrix.

Dequantised in float32 and rounded to bfloat16, as transformers does for a model in that dtype. Blocks at the lower
and right edge may be smaller. A weight without scales is left to others, as raw codes are no weights.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from publisher.numerics.dtypes import step_of

LARGEST = 448.0  # of float8_e4m3fn
MARGIN = 1.12  # half a step, and the rounding to bfloat16: up to 1.875 / 16 of it, at the largest mantissa


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The weight in bfloat16, of the shape of `weight` (.., m, n); `scale` (.., m / rows, n / columns), rounded up."""
    return (weight.float() * _spread(scale, weight, block)).bfloat16()


def quantise(values: Tensor, block: tuple[int, int], *, scales: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes in float8_e4m3fn of the shape of `values` (m, n), and scales (m / rows, n / columns), rounded up.

    A block's scale is its largest magnitude over 448, in the dtype `scales`; values round to the nearest code, ties to
    even.
    """
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.reshape(-(-rows // block[0]), block[0], -(-columns // block[1]), block[1])
    scale = (blocks.abs().amax(dim=(1, 3)) / LARGEST).to(scales)
    spread = _spread(scale.masked_fill(scale == 0, 1.0), values, block)  # a block of zeros stays zero
    return (values.float() / spread).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def steps_of(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Distance between neighbouring values of the stored weight at each element, float32, in the weight's units."""
    return step_of(weight.float(), weight.dtype).mul_(_spread(scale, weight, block).abs())


def combined(steps: Iterable[Tensor | None]) -> Tensor | None:
    """One step in the place of several that are independent; None where there is none."""
    told = [step for step in steps if step is not None]
    return torch.stack(told).square_().sum(dim=0).sqrt_() if len(told) > 1 else next(iter(told), None)


def within(source: Tensor, base: Tensor, steps: Tensor) -> bool:
    """Whether one is nothing but the other quantised: all elements lie within half a step."""
    return bool(((source.float() - base.float()).abs() <= steps * (MARGIN / 2)).all())


def _spread(scale: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = weight.shape[-2:]
    tall = scale.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return tall.repeat_interleave(block[1], dim=-1)[..., :columns]
