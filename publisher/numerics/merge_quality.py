"""How close base + BA comes to the tuned weight, merged as the release was."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from publisher.numerics.delta import row_blocks, squared_norm
from publisher.numerics.dtypes import rough_products
from publisher.numerics.intervals import Arithmetic, merged


@dataclass(frozen=True, slots=True)
class MergeQuality:
    """How base + BA compares with the tuned weight.

    Attributes:
        relative_error: |D - BA| / |D|, Frobenius.
        exact_elements: elements for which base + BA, merged by the release's arithmetic, is the tuned value bit for
            bit.
    """

    relative_error: float
    exact_elements: int


def merge_quality(
    *,
    base: Tensor,
    tuned: Tensor,
    b: Tensor,
    a: Tensor,
    delta: Tensor | None = None,
    arithmetic: Arithmetic = "one rounding",
) -> MergeQuality:
    """Merge, by default in float32 with one rounding at the end as PEFT does, and compare with the tuned weight.

    It works on blocks of rows, so that the merged matrix never exists as a whole.

    Args:
        base: the base weight, (m, n), in the dtype that it is merged in.
        tuned: the weight of the merged fine-tune, (m, n).
        b: the left factor as shipped, (m, r).
        a: the right factor as shipped, (r, n).
        delta: `delta_of` the two weights, float32 (m, n), where it is at hand.
        arithmetic: PEFT's default where the weight is: one rounding in a linear module, and the update rounded first
            in a parameter that it wraps.

    Returns:
        The relative error and the number of elements restored.
    """
    a32, b32 = a.float(), b.float()
    products = rough_products if {a.dtype, b.dtype} == {torch.bfloat16} else nullcontext  # rough, bf16 loses nothing
    error = total = 0.0
    exact = 0
    for rows in row_blocks(tuned):
        weight, release = base[rows], tuned[rows]
        update = release.float() - weight.float() if delta is None else delta[rows]
        with products():
            product = b32[rows] @ a32
        total += squared_norm(update)
        error += squared_norm(update - product)
        again = merged(base=weight, product=product, dtype=tuned.dtype, arithmetic=arithmetic)
        exact += int((again == release).count_nonzero())
    return MergeQuality(math.sqrt(error / total) if total else 0.0, exact)
