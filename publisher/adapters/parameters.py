"""Parameters that PEFT adapts by `target_parameters`: how the factors of their experts lie in the adapter's file.

With E experts and rank r, PEFT keeps A as (E*r, in) with the rows of one expert together, and B as (out, r*E) with the
expert running fastest (`ParamWrapper` in https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/layer.py).
B in the order of A would load without a word, and each expert would get columns of all the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from publisher.checkpoints.writing import Planned
from publisher.records.extraction import ExpertTensor, ExpertTensorFigures


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """The factors of all experts of one finished parameter, zero for those that did not change.

    Attributes:
        b: (experts, m, r) in the adapter's dtype, where (m, n) is each matrix as stored.
        a: (experts, r, n) in the adapter's dtype.
        figures: what extraction.json says of the parameter.
    """

    b: Tensor
    a: Tensor
    figures: ExpertTensorFigures


def expert_shapes(tensor: ExpertTensor) -> dict[str, tuple[int, int]]:
    """Return the shapes of a parameter's two factors, by key in the adapter's file."""
    rows, columns = tensor.sides
    width = tensor.number * tensor.alpha
    return dict(zip(tensor.keys, ((width, columns), (rows, width)), strict=True))


def planned_experts(
    tensor: ExpertTensor, load: Callable[[], ExpertFactors], *, dtype: torch.dtype
) -> dict[str, Planned]:
    """Return the two tensors of the adapter's file for a parameter, to be written.

    Args:
        tensor: the parameter, whose `alpha` its factors are padded to.
        load: gives its factors when their turn to be written comes.
        dtype: of the factors.

    Returns:
        The tensors by their keys.
    """
    makers = (partial(_packed_a, tensor, load), partial(_packed_b, tensor, load))
    shapes = expert_shapes(tensor)
    return {key: Planned(shapes[key], dtype, make) for key, make in zip(tensor.keys, makers, strict=True)}


def _packed_a(tensor: ExpertTensor, load: Callable[[], ExpertFactors]) -> Tensor:
    found = load()
    rows = found.b.transpose(1, 2) if tensor.transposed else found.a  # (experts, r, in)
    return torch.nn.functional.pad(rows, (0, 0, 0, tensor.alpha - rows.shape[1])).flatten(0, 1)


def _packed_b(tensor: ExpertTensor, load: Callable[[], ExpertFactors]) -> Tensor:
    found = load()
    columns = found.a.transpose(1, 2) if tensor.transposed else found.b  # (experts, out, r)
    return torch.nn.functional.pad(columns, (0, tensor.alpha - columns.shape[2])).permute(1, 2, 0).flatten(1)


def unpacked(tensor: ExpertTensor, *, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of each expert from those of the adapter's file, as views.

    Args:
        tensor: the parameter.
        a: as the file has it, (experts * alpha, in).
        b: as the file has it, (out, alpha * experts).

    Returns:
        B (experts, m, alpha) and A (experts, alpha, n), where (m, n) is each matrix as stored.
    """
    rows = a.reshape(tensor.number, tensor.alpha, -1)
    columns = b.reshape(-1, tensor.alpha, tensor.number).permute(2, 0, 1)
    return (rows.transpose(1, 2), columns.transpose(1, 2)) if tensor.transposed else (columns, rows)
