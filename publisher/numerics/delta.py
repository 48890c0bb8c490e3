"""The delta of a weight, tuned minus base, and sums over large matrices, block by block."""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 21  # worked on at once where a whole matrix would need a copy


def delta_of(*, base: Tensor, tuned: Tensor) -> Tensor:
    """Return D = F - W: the tuned weight minus the base.

    Args:
        base: the base weight W, (m, n), in the dtype that it was merged in (`merge_arithmetic`).
        tuned: the weight F of the merged fine-tune, (m, n).

    Returns:
        The delta, (m, n), float32.
    """
    delta = torch.empty(tuned.shape, device=tuned.device)
    for rows in row_blocks(tuned):
        torch.sub(tuned[rows].float(), base[rows].float(), out=delta[rows])
    return delta


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Return the rows of the matrix (m, n) as slices, each of some million elements."""
    rows = max(1, BLOCK_ELEMENTS // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, matrix.shape[0], rows))


def squared_norm(x: Tensor) -> float:
    """Sum the squares of a vector or matrix.

    The sum is in float32 along rows, which are short, and in float64 over them, which may be many.
    """
    if x.dim() == 1:
        return float(x.double().square().sum())
    return float(torch.linalg.vector_norm(x, dim=1).double().square().sum())
