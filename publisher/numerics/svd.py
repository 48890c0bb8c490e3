"""The truncated SVD of a delta, and the LoRA factors that it gives.

The best rank-r approximation of a matrix in the Frobenius norm is its truncated SVD (Eckart and Young 1936,
https://doi.org/10.1007/BF02288367). It is found by a randomized method (Halko, Martinsson and Tropp 2011, algorithm
4.4, https://doi.org/10.1137/090771806), orthonormalised by CholeskyQR2 (Fukaya et al. 2014,
https://doi.org/10.1109/ScalA.2014.11), whose second pass is left out where the first suffices. Where the matrix is
small, or the method does not settle, the exact SVD is taken. Everything is seeded by the tensor's name and has fixed
signs: the same input gives the same factors.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from publisher.numerics.delta import row_blocks, squared_norm
from publisher.numerics.dtypes import rough_products, short_dtype
from publisher.numerics.randomness import gaussian, seeded

OVERSAMPLING = 32  # columns beyond the rank: enough to see the gap after it
FIRST_WIDTH = 128  # where the rank is not known beforehand
EXACT_BELOW = 256  # shorter side up to which the exact SVD costs nothing
POWER_ITERATIONS = 6  # before the method counts as not settling
SETTLED = 5e-4  # of the squared misfit: a quarter of the 0.1 % that the misfit may lie above the optimum
RESOLUTION = 4 * torch.finfo(torch.float32).eps  # of the largest singular value: float32 sees nothing below
WELL_CONDITIONED = 1e3  # columns whose orthonormal basis one pass of CholeskyQR gives to ten digits
KRYLOV_BLOCK = 8
NEXT_DEPTH = 4  # passes forth and back over what a fit leaves, from a start that power iteration has turned already
Rank = int | float | Literal["auto"]  # a whole number; a share of the energy, below 1; what stands above the noise
Method = Literal["randomized svd", "exact svd"]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A truncated SVD of a delta D.

    Attributes:
        u: (m, rank), float32.
        s: (rank,), float32, descending.
        v: (n, rank), float32; the entry of largest magnitude of each column is positive.
        sigma_next: first singular value left out; None at full width.
        misfit: Frobenius norm of D - u s v^T.
        method: which SVD it was.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    sigma_next: float | None
    misfit: float
    method: Method

    @property
    def rank(self) -> int:
        """The number of columns kept."""
        return int(self.s.shape[0])


@dataclass(frozen=True, slots=True)
class _Goal:
    """What to keep of a delta's singular values.

    Attributes:
        rank: as for `decompose`.
        threshold: the spectral noise threshold.
        total: squared Frobenius norm of the delta.
    """

    rank: Rank
    threshold: float
    total: float

    def kept(self, values: Tensor) -> int:
        """Count the values to keep; more than there are where they do not hold the energy asked for."""
        if isinstance(self.rank, float):
            return 1 + int((values.double().square().cumsum(0) < self.rank * self.total).sum())
        if self.rank == "auto":
            return int((values > max(self.threshold, RESOLUTION * float(values[0]))).sum())
        return min(self.rank, int(values.shape[0]))

    def missing(self, values: Tensor, keep: int) -> float:
        """Estimate the squared misfit of the values kept, well enough to see it settle."""
        return max(self.total - squared_norm(values[:keep]), 0.0)


def decompose(delta: Tensor, *, rank: Rank, threshold: float, name: str) -> Decomposition:
    """Compute the truncated SVD of a delta.

    The randomized method starts with a width beyond the rank and iterates until the misfit settles. It widens
    when the captured spectrum does not reach below the threshold, and gives way to the exact SVD when the width
    would reach half of the shorter side.

    Args:
        delta: the delta D, float32 (m, n).
        rank: columns to keep, at most min(m, n); `auto` keeps the singular values above `threshold` and above
            float32's resolution, possibly none; a float, the fewest that hold this share of the squared norm.
        threshold: the spectral noise threshold, in the unit of the singular values.
        name: the tensor's name, which seeds the random start.

    Returns:
        The decomposition.
    """
    shorter = min(delta.shape)
    width = (rank if isinstance(rank, int) else FIRST_WIDTH) + OVERSAMPLING
    goal = _Goal(rank, threshold, squared_norm(delta))
    while shorter > max(EXACT_BELOW, 2 * width):
        found = _randomized(delta, goal, width=width, generator=seeded(name, delta.device))
        if found is not None:
            return found
        width *= 2
    return _exact(delta, goal)


def _exact(delta: Tensor, goal: _Goal) -> Decomposition:
    """Decompose in float64: LAPACK's float32 errors would pass for singular values above a float32 weight's noise."""
    u, s, vh = torch.linalg.svd(delta.double(), full_matrices=False)
    keep = min(replace(goal, total=squared_norm(s)).kept(s), s.shape[0])
    svd = _with_signs(u[:, :keep].float(), s[:keep].float(), vh[:keep].T.float())
    sigma_next = float(s[keep]) if keep < s.shape[0] else None
    _, misfit = _left_over(delta, svd)
    return Decomposition(*svd, sigma_next, misfit, "exact svd")


def _randomized(delta: Tensor, goal: _Goal, *, width: int, generator: torch.Generator) -> Decomposition | None:
    """Decompose by power iteration on a random start of this width.

    Return None where the width shows no end of the signal or the misfit does not settle. The first pass only turns
    the random start towards the leading space, so that its products may be rough; what is kept of it is refined at
    least once in float32.
    """
    with rough_products():
        z = delta.T @ orthonormal(delta @ gaussian(delta.shape[1], width, generator))
    values, _ = _small_spectrum(z)
    before = goal.missing(values, goal.kept(values))
    for _ in range(POWER_ITERATIONS):
        q = orthonormal(delta @ orthonormal(z))
        z = delta.T @ q
        values, rotation = _small_spectrum(z)
        keep = goal.kept(values)
        if keep > width - OVERSAMPLING:
            return None
        missing = goal.missing(values, keep)
        if _is_settled(before, missing, values=values, keep=keep, total=goal.total):
            return _truncated(delta, _rotated(q, z, values=values, rotation=rotation), keep=keep)
        before = missing
    return None


def _truncated(delta: Tensor, svd: tuple[Tensor, Tensor, Tensor], *, keep: int) -> Decomposition:
    u, s, v = svd
    kept = _with_signs(u[:, :keep], s[:keep], v[:, :keep])
    rest, misfit = _left_over(delta, kept)
    _, sigma_next, _ = leading_singular_value(rest, v[:, keep : keep + KRYLOV_BLOCK], depth=NEXT_DEPTH)
    return Decomposition(*kept, sigma_next, misfit, "randomized svd")


def _is_settled(before: float, missing: float, *, values: Tensor, keep: int, total: float) -> bool:
    """Return whether another power iteration would hardly change the squared misfit any more.

    Each iteration shrinks what is missing by (sigma_width / sigma_keep)^4, so the last change bounds the next ones.
    """
    if keep == 0:
        return True
    contraction = min(float(values[-1] / values[keep - 1].clamp_min(1e-30)) ** 4, 0.999)
    ahead = abs(before - missing) * contraction / (1 - contraction)
    return ahead <= SETTLED * max(missing, 1e-12 * total)


def _small_spectrum(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return singular values, descending, and right rotation of z (n, w) from its Gram matrix in float64."""
    wide = z.double()
    squares, vectors = torch.linalg.eigh(wide.T @ wide)
    return squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)


def _rotated(q: Tensor, z: Tensor, *, values: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S and V of q z^T; columns of V below float32's resolution are shorter than 1."""
    divisors = values.clamp_min(float(values[0]) * torch.finfo(torch.float32).eps).clamp_min(1e-38)
    return q @ rotation.float(), values.float(), ((z.double() @ rotation) / divisors).float()


def _with_signs(u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same SVD with the entry of largest magnitude of each column of V positive."""
    largest = v.gather(0, v.abs().argmax(dim=0, keepdim=True)) if v.numel() else v.new_ones(1, 0)
    sign = torch.where(largest < 0, -1.0, 1.0)
    return u * sign, s, v * sign


def _left_over(delta: Tensor, svd: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, float]:
    """Return D - u s v^T, (m, n) in a short dtype, and its Frobenius norm.

    Taken from the norms of D and S alone, the norm would drown in float32 where the fit is close.
    """
    u, s, v = svd
    scaled = u * s
    squares = 0.0
    rest = delta.new_empty(delta.shape, dtype=short_dtype(delta.device))
    for rows in row_blocks(delta):
        block = torch.addmm(delta[rows], scaled[rows], v.T, alpha=-1)
        squares += squared_norm(block)
        rest[rows] = block
    return rest, math.sqrt(squares)


def leading_singular_value(matrix: Tensor, start: Tensor, *, depth: int) -> tuple[Tensor, float, Tensor]:
    """Find the largest singular value of a matrix, with its vectors.

    This is Rayleigh-Ritz over the block Krylov space of the start (Musco and Musco 2015,
    https://arxiv.org/abs/1504.05477): noise has no gap after its first value, and power iteration would take far more
    passes over the matrix. The value comes out 1 to 2 % low on the largest matrices.

    Args:
        matrix: (m, n), in a short dtype.
        start: (n, w), float32: the space begins with its columns.
        depth: passes forth and back over the matrix, at most.

    Returns:
        The left vector (m,), the value, and the right vector (n,).
    """
    block = orthonormal(start[:, : min(matrix.shape)])
    images: list[Tensor] = []
    for _ in range(min(depth, min(matrix.shape) // block.shape[1])):
        image = orthonormal((matrix @ block.to(matrix.dtype)).float())
        images.append(image)
        block = orthonormal((image.T.to(matrix.dtype).contiguous() @ matrix).T.float())
    space = orthonormal(torch.cat(images, dim=1))
    u, s, vh = torch.linalg.svd((space.T.to(matrix.dtype) @ matrix).float(), full_matrices=False)
    return space @ u[:, 0], float(s[0]), vh[0]


def orthonormal(y: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of y (m, w), m >= w, by CholeskyQR in float64.

    This takes matrix products, far cheaper than Householder QR. The first pass loses as many digits as twice those of
    the columns' condition, which the factor's diagonal shows: a second one makes up for it, and Householder QR takes
    over where the columns depend on each other too closely for a Cholesky factor.
    """
    q = y.double()
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(q.T @ q)
        if failed:
            householder: Tensor = torch.linalg.qr(y).Q
            return householder
        q = torch.linalg.solve_triangular(factor, q.T, upper=False).T
        smallest, largest = factor.diagonal().aminmax()
        if largest < WELL_CONDITIONED * smallest:
            break
    return q.to(y.dtype)


def factors_of(found: Decomposition, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return B = U sqrt(S), (m, rank), and A = sqrt(S) V^T, (rank, n), both contiguous and rounded to `dtype`."""
    root = found.s.sqrt()
    return (found.u * root).to(dtype).contiguous(), (found.v * root).T.to(dtype).contiguous()
