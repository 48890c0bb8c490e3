"""MXFP4 as gpt-oss stores its experts: blocks of 32 four-bit floats with one power of two as their scale.

The values are those of transformers' `convert_moe_packed_tensors`, bit for bit. The format is that of the Open Compute
Project (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf): elements E2M1, scales
E8M0.
"""

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What each of the sixteen codes stands for."""
_BIAS = 127  # of the exponent that is a scale
_LOW = 0x0F  # the four bits of the first of two codes in a byte


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of the experts in bfloat16, one expert at a time so that little memory is taken.

    Args:
        blocks: two codes in each byte, the first in the lower four bits; uint8, (experts, out, in / 32, 16).
        scales: exponents of two plus 127; uint8, (experts, out, in / 32).

    Returns:
        (experts, in, out), as the class holds them.
    """
    experts, rows, groups, _ = blocks.shape
    found = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16)
    for expert in range(experts):
        found[expert] = _matrix(blocks[expert], scales[expert]).T
    return found


def _matrix(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return one expert's weight, (out, in), in float64, in which every code at every scale is exact."""
    values = torch.tensor(VALUES, dtype=torch.float64)
    codes = torch.stack((blocks & _LOW, blocks >> 4), dim=-1).flatten(-2)
    powers = torch.pow(2.0, scales.double() - _BIAS)
    return (values[codes.int()] * powers.unsqueeze(-1)).flatten(-2)
