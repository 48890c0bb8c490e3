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
    """Return the weight in bfloat16.

    Args:
        weight: codes in float8_e4m3fn, (.., m, n).
        scale: one for each block, (.., m / rows, n / columns), both rounded up.
        block: rows and columns of a block.

    Returns:
        weight * scale, (.., m, n), computed in float32 and rounded once.
    """
    return (weight.float() * _expanded(scale, weight, block)).bfloat16()


def quantise(values: Tensor, block: tuple[int, int], *, scales: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the values in FP8 and the scales of their blocks.

    A block's scale is its largest magnitude over 448; values round to the nearest code, ties to even.

    Args:
        values: a weight (m, n) in any floating dtype.
        block: rows and columns of a block.
        scales: the dtype of the scales.

    Returns:
        Codes in float8_e4m3fn, (m, n), and scales, (m / rows, n / columns), both rounded up.
    """
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.reshape(-(-rows // block[0]), block[0], -(-columns // block[1]), block[1])
    scale = (blocks.abs().amax(dim=(1, 3)) / LARGEST).to(scales)
    expanded = _expanded(scale.masked_fill(scale == 0, 1.0), values, block)  # a block of zeros stays zero
    return (values.float() / expanded).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def steps_of(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the distance between neighbouring values of the stored weight at each element.

    Args:
        weight: codes in float8_e4m3fn, (.., m, n).
        scale: one for each block, (.., m / rows, n / columns), both rounded up.
        block: rows and columns of a block.

    Returns:
        float32, (.., m, n), in the units of the dequantised weight.
    """
    return step_of(weight.float(), weight.dtype).mul_(_expanded(scale, weight, block).abs())


def combined(steps: Iterable[Tensor | None]) -> Tensor | None:
    """Return the root of the sum of squares of steps that are independent; None where there is no step."""
    found = [step for step in steps if step is not None]
    if len(found) > 1:
        return torch.stack(found).square_().sum(dim=0).sqrt_()
    return found[0] if found else None


def within(base: Tensor, tuned: Tensor, *, steps: Tensor) -> bool:
    """Return whether one is nothing but the other quantised: all elements lie within half a step.

    Args:
        base: the base's weight, dequantised.
        tuned: the tuned one's weight, dequantised.
        steps: of the one that is stored in FP8, as from `steps_of`.

    Returns:
        False as soon as one element is farther away.
    """
    return bool(((tuned.float() - base.float()).abs() <= steps * (MARGIN / 2)).all())


def _expanded(scale: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the scale of each element, in float32 and of the shape of `weight`."""
    rows, columns = weight.shape[-2:]
    tall = scale.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return tall.repeat_interleave(block[1], dim=-1)[..., :columns]
