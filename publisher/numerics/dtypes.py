"""What a floating-point dtype can hold, and which one a device multiplies fastest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_EXPONENT_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def step_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of `dtype` at each float32 value: eps * 2^floor(log2|x|).

    The power of two is the value with its mantissa and sign bits cleared. Below the normal range the step is that of
    the smallest normal number (IEEE 754, https://doi.org/10.1109/IEEESTD.2019.8766229).
    """
    info = torch.finfo(dtype)
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power.clamp_(min=info.smallest_normal).mul_(info.eps)


def step_in_own_dtype(values: Tensor) -> Tensor:
    """Return `step_of` in the values' own dtype, which holds its own steps.

    For bfloat16 and float16 this takes half the memory traffic.
    """
    if values.dtype not in _EXPONENT_BITS:
        return step_of(values.float(), values.dtype)
    info = torch.finfo(values.dtype)
    power = (values.view(torch.int16) & _EXPONENT_BITS[values.dtype]).view(values.dtype)
    return power.clamp_(min=info.smallest_normal).mul_(info.eps)


def short_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device multiplies in it natively, else float32.

    It is for matrices that are read many times and need be known to three digits only: half the memory, and several
    times the speed. A CPU without such instructions would be far slower for it.
    """
    known: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)  # older versions cannot tell
    native = device.type == "cuda" or known().get("avx512_bf16", False)
    return torch.bfloat16 if native else torch.float32


@contextmanager
def rough_products() -> Iterator[None]:
    """Round factors of float32 products to bfloat16 or TF32 where that is faster; sums stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
