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
        """The same in main memory."""
        return Residual(self.index.cpu(), self.value.cpu())

    def apply(self, merged_weight: Tensor) -> Tensor:
        """The weight (m, n) with these elements set; a copy."""
        whole = merged_weight.flatten().clone()
        whole[self.index] = self.value.to(whole)
        return whole.view(merged_weight.shape)


def residual_of(base: Tensor, source: Tensor, *, b: Tensor, a: Tensor, arithmetic: Arithmetic) -> Residual:
    """What base (m, n) and factors (m, r), (r, n), merged in this way, leave to be set.

    Sums of r products in float32 differ between machines by a random walk of r roundings, each of a partial sum of at
    most |b_i| |a_j|: elements nearer to an edge than eps sqrt(r) |b_i| |a_j| are kept, whatever they give here.
    """
    goal, wide = intervals(base=base, tuned=source, arithmetic=arithmetic), a.float()
    reach = torch.finfo(torch.float32).eps * math.sqrt(max(1, a.shape[0]))
    lengths = torch.linalg.vector_norm(wide, dim=0) * reach
    places = []
    for rows in row_blocks(source):
        factor = b[rows].float()
        product = factor @ wide
        sure = goal.half[rows] - torch.linalg.vector_norm(factor, dim=1, keepdim=True) * lengths
        inside = (product - goal.centre[rows]).abs_() < sure
        same = merged(base=base[rows], product=product, dtype=source.dtype, arithmetic=arithmetic) == source[rows]
        places.append((~(inside & same)).flatten().nonzero().squeeze(1) + rows.start * source.shape[1])
    index = torch.cat(places)
    return Residual(index, source.flatten()[index])


def planned(
    modules: Iterable[ModuleExtraction], load: Callable[[ModuleExtraction], Residual], *, dtype: torch.dtype
) -> dict[str, Planned]:
    """The tensors of residual.safetensors; indices are int32 where the weight has no more elements than that counts."""
    return {key: tensor for module in modules for key, tensor in _tensors(module, load, dtype)}


def _tensors(
    module: ModuleExtraction, load: Callable[[ModuleExtraction], Residual], dtype: torch.dtype
) -> Iterator[tuple[str, Planned]]:
    count = module.recovery.residual if module.recovery else None
    if count:
        kind = torch.int32 if math.prod(module.shape) <= torch.iinfo(torch.int32).max else torch.int64
        yield f"{module.name}.index", Planned((count,), kind, partial(_index, module, load, kind))
        yield f"{module.name}.value", Planned((count,), dtype, partial(_value, module, load))


def _index(module: ModuleExtraction, load: Callable[[ModuleExtraction], Residual], kind: torch.dtype) -> Tensor:
    return load(module).index.to(kind)


def _value(module: ModuleExtraction, load: Callable[[ModuleExtraction], Residual]) -> Tensor:
    return load(module).value
