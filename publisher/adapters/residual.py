"""The elements that a merge leaves different from the release: found, and kept in residual.safetensors.

For each module `NAME` the file holds `NAME.index`, places in the flattened weight as it is stored, and `NAME.value`,
what the released weight has there. Setting them after a merge gives the released weight in every bit, on any machine:
elements so close to the edge of their rounding interval that another order of summation could move them across are in
it as well (docs/exact.md has the ten lines that set them).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from publisher.checkpoints.writing import Planned
from publisher.numerics.delta import row_blocks
from publisher.numerics.intervals import Arithmetic, intervals, merged
from publisher.records.extraction import ModuleExtraction


@dataclass(frozen=True, slots=True)
class Residual:
    """What is to be set in one merged weight.

    Attributes:
        index: int64, (k,), places in the flattened weight, ascending.
        value: (k,), in the weight's dtype.
    """

    index: Tensor
    value: Tensor

    def cpu(self) -> "Residual":
        """Return the residual in main memory."""
        return Residual(self.index.cpu(), self.value.cpu())

    def apply(self, merged_weight: Tensor) -> Tensor:
        """Return a copy of the merged weight (m, n) with these elements set."""
        whole = merged_weight.flatten().clone()
        whole[self.index] = self.value.to(whole)
        return whole.view(merged_weight.shape)


def residual_of(*, base: Tensor, tuned: Tensor, b: Tensor, a: Tensor, arithmetic: Arithmetic) -> Residual:
    """Return what a merge of base and factors leaves to be set.

    Sums of r products in float32 differ between machines by a random walk of r roundings, each of a partial sum of at
    most |b_i| |a_j|: elements nearer to an edge than eps sqrt(r) |b_i| |a_j| are kept, whatever they give here.

    Args:
        base: the base's weight (m, n), in the dtype that it was merged in.
        tuned: the tuned weight (m, n), bfloat16 or float16.
        b: factor (m, r).
        a: factor (r, n).
        arithmetic: how the tuned weight was merged.

    Returns:
        The elements of `tuned` that the merge does not give for certain, on the device of `tuned`.
    """
    goal, wide = intervals(base=base, tuned=tuned, arithmetic=arithmetic), a.float()
    reach = torch.finfo(torch.float32).eps * math.sqrt(max(1, a.shape[0]))
    lengths = torch.linalg.vector_norm(wide, dim=0) * reach
    places = []
    for rows in row_blocks(tuned):
        factor = b[rows].float()
        product = factor @ wide
        sure = goal.half[rows] - torch.linalg.vector_norm(factor, dim=1, keepdim=True) * lengths
        inside = (product - goal.centre[rows]).abs_() < sure
        same = merged(base=base[rows], product=product, dtype=tuned.dtype, arithmetic=arithmetic) == tuned[rows]
        places.append((~(inside & same)).flatten().nonzero().squeeze(1) + rows.start * tuned.shape[1])
    index = torch.cat(places)
    return Residual(index, tuned.flatten()[index])


def planned_residuals(
    modules: Iterable[ModuleExtraction], load: Callable[[ModuleExtraction], Residual], *, dtype: torch.dtype
) -> dict[str, Planned]:
    """Return the tensors of residual.safetensors, to be written.

    Args:
        modules: of the adapter; only those with a residual have tensors in the file.
        load: gives the residual of one module, when its turn to be written comes.
        dtype: of the tuned weights.

    Returns:
        By name, `NAME.index` and `NAME.value` of each module; indices are int32 where that can count the elements of
        the weight, else int64.
    """
    return {key: tensor for module in modules for key, tensor in _tensors(module, load, dtype)}


def _tensors(
    module: ModuleExtraction, load: Callable[[ModuleExtraction], Residual], dtype: torch.dtype
) -> Iterator[tuple[str, Planned]]:
    count = module.recovery.residual if module.recovery else None
    if count:
        kind = torch.int32 if math.prod(module.shape) <= torch.iinfo(torch.int32).max else torch.int64
        yield f"{module.name}.index", Planned((count,), kind, partial(_index, module, load, kind))
        yield f"{module.name}.value", Planned((count,), dtype, partial(_value, module, load, dtype))


def _index(module: ModuleExtraction, load: Callable[[ModuleExtraction], Residual], kind: torch.dtype) -> Tensor:
    return load(module).index.to(kind)


def _value(module: ModuleExtraction, load: Callable[[ModuleExtraction], Residual], dtype: torch.dtype) -> Tensor:
    return load(module).value.to(dtype)  # it may have been merged in a shorter one
