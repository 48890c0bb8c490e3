"""The mathematics of taking a LoRA out of a merged weight: torch in, torch out, no files.

W is the base weight and F the released one, both (m, n) = (out, in); D = F - W in float32 is the update. A merge
rounds once, F = round(W + BA), so D = BA + noise with the noise uniform within half a step of F. That makes two
things predictable without knowing BA: how much of D the best rank-r fit must leave (the rounding floor), and the
largest singular value that noise alone has (the noise edge), above which singular values are signal.

The truncated SVD is randomized (Halko, Martinsson, Tropp 2011, algorithm 4.4), orthonormalised by CholeskyQR2
(Fukaya et al. 2014); where the matrix is small, or the method does not settle, the exact SVD is taken. Everything
is seeded by the tensor's name and has fixed signs: the same input gives the same factors.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

OVERSAMPLING = 32  # columns beyond the rank: enough to see the gap after it
FIRST_WIDTH = 128  # where the rank is not known beforehand
EXACT_BELOW = 256  # shorter side up to which the exact SVD costs nothing
POWER_ITERATIONS = 6  # before the method counts as not settling
SETTLED = 5e-4  # of the squared residual: half of the 0.1 % that the residual may differ from the optimum
NOISE_BLOCK = 8
NOISE_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Noise:
    """What one rounding to the source's dtype does to the update, in absolute numbers.

    Attributes:
        norm: expected Frobenius norm of the rounding errors.
        edge: largest singular value they have.
    """

    norm: float
    edge: float


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A truncated SVD of D.

    Attributes:
        u: (m, rank), float32.
        s: (rank,), float32, descending.
        v: (n, rank), float32; the entry of largest magnitude of each column is positive.
        sigma_next: first singular value left out; None at full width.
        residual: Frobenius norm of D - u s v^T.
        method: which SVD it was.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    sigma_next: float | None
    residual: float
    method: Literal["randomized svd", "exact svd"]

    @property
    def rank(self) -> int:
        """Columns kept."""
        return int(self.s.shape[0])


@dataclass(frozen=True, slots=True)
class MergeQuality:
    """How base + BA compares with the source.

    Attributes:
        relative_error: |D - BA| / |D|, Frobenius.
        exact_elements: elements for which base + BA, summed in float32 and rounded once, is the source bit for bit.
    """

    relative_error: float
    exact_elements: int


def update_of(base: Tensor, source: Tensor) -> Tensor:
    """D = F - W in float32, the base first cast to the source's dtype; shape (m, n)."""
    return source.float() - base.to(source.dtype).float()


def step_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` at each float32 value: eps * 2^floor(log2|x|).

    The power of two is the value with its mantissa and sign bits cleared; below the normal range the step is that
    of the smallest normal number.
    """
    info = torch.finfo(dtype)
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power.clamp_(min=info.smallest_normal).mul_(info.eps)


def seeded(name: str, device: torch.device) -> torch.Generator:
    """A generator whose stream depends on the tensor's name alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    return torch.Generator(device).manual_seed(seed)


def rounding_noise(source: Tensor, *, name: str) -> Noise:
    """Norm and edge of the errors that one rounding to `source.dtype` makes at these values.

    The norm is sqrt(sum step^2 / 12). The edge is measured: errors are drawn with the same steps and their largest
    singular value found in a block Krylov space; a closed form from row and column norms is up to twice too high
    where rows or columns have outliers. Small matrices are drawn several times, since theirs fluctuates.
    """
    step = step_of(source.float(), source.dtype)
    norm = math.sqrt(_squared_norm(step) / 12)
    generator = seeded(f"noise of {name}", source.device)
    draws = min(8, max(1, (1 << 18) // source.numel()))
    edge = max(_largest_singular_value(_drawn(step, generator), generator=generator) for _ in range(draws))
    margin = 1 + min(source.shape) ** (-2 / 3)  # Tracy-Widom: the scale on which a largest singular value fluctuates
    return Noise(norm=norm, edge=edge * margin)


def _drawn(step: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(step.shape, generator=generator, device=step.device)
    return noise.sub_(0.5).mul_(step)


def _largest_singular_value(
    matrix: Tensor, *, generator: torch.Generator, without: tuple[Tensor, Tensor] | None = None
) -> float:
    """Largest singular value of matrix - left right^T, with `without` = (left, right), never formed.

    Rayleigh-Ritz over a block Krylov space: noise has no gap after its first value, and power iteration would
    take far more passes over the matrix. The value comes out about 1 % low on the largest matrices.
    """
    width = min(NOISE_BLOCK, *matrix.shape)
    left, right = without or (matrix.new_zeros(matrix.shape[0], 0), matrix.new_zeros(matrix.shape[1], 0))
    block = orthonormal(_gaussian(matrix.shape[1], width, generator))
    images = []
    for _ in range(min(NOISE_DEPTH, min(matrix.shape) // width)):
        images.append(matrix @ block - left @ (right.T @ block))
        image = orthonormal(images[-1])
        block = orthonormal(matrix.T @ image - right @ (left.T @ image))
    space = orthonormal(torch.cat(images, dim=1))
    return float(torch.linalg.matrix_norm(matrix.T @ space - right @ (left.T @ space), ord=2))


def decompose(delta: Tensor, *, rank: int | Literal["auto"], edge: float, name: str) -> Decomposition:
    """Truncated SVD of D, float32 (m, n).

    Args:
        delta: the update.
        rank: columns to keep, at most min(m, n); `auto` keeps the singular values above `edge`, possibly none.
        edge: the noise edge.
        name: seeds the random start.

    The randomized method starts with a width beyond the rank and iterates until the residual settles; it widens
    when the captured spectrum does not reach below the noise edge, and gives way to the exact SVD when the width
    would reach half of the shorter side.
    """
    shorter = min(delta.shape)
    width = (FIRST_WIDTH if rank == "auto" else rank) + OVERSAMPLING
    while shorter > max(EXACT_BELOW, 2 * width):
        found = _randomized(delta, rank=rank, edge=edge, generator=seeded(name, delta.device), width=width)
        if found is not None:
            return found
        width *= 2
    return _exact(delta, rank=rank, edge=edge)


def _exact(delta: Tensor, *, rank: int | Literal["auto"], edge: float) -> Decomposition:
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    keep = _kept(s, rank, edge)
    residual = math.sqrt(_squared_norm(s[keep:]))
    return _signed(u[:, :keep], s[:keep], vh[:keep].T, sigma_next=_at(s, keep), residual=residual, method="exact svd")


def _randomized(
    delta: Tensor, *, rank: int | Literal["auto"], edge: float, generator: torch.Generator, width: int
) -> Decomposition | None:
    """None where the width shows no end of the signal or the residual does not settle."""
    total = _squared_norm(delta)
    q = orthonormal(delta @ _gaussian(delta.shape[1], width, generator))
    before = math.inf
    for _ in range(POWER_ITERATIONS):
        z = delta.T @ q
        values, rotation = _small_spectrum(z)
        keep = _kept(values, rank, edge)
        if keep > width - OVERSAMPLING:
            return None
        residual = max(total - _squared_norm(values[:keep]), 0.0)
        if _settled(before, residual, values=values, keep=keep, total=total):
            u, s, v = _rotated(q, z, values=values, rotation=rotation[:, :keep])
            after = _largest_singular_value(delta, generator=generator, without=(u * s, v))
            return _signed(u, s, v, sigma_next=after, residual=math.sqrt(residual), method="randomized svd")
        before = residual
        q = orthonormal(delta @ orthonormal(z))
    return None


def _settled(before: float, residual: float, *, values: Tensor, keep: int, total: float) -> bool:
    """Whether another power iteration would still change the squared residual.

    Each iteration shrinks what is missing by (sigma_width / sigma_keep)^4, so the last change bounds the next ones.
    """
    if not math.isfinite(before):
        return False
    if keep == 0:
        return True
    contraction = min(float(values[-1] / values[keep - 1].clamp_min(1e-30)) ** 4, 0.999)
    missing = abs(before - residual) * contraction / (1 - contraction)
    return missing <= SETTLED * max(residual, 1e-12 * total)


def _small_spectrum(z: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, descending, and right rotation of z (n, w) from its Gram matrix in float64."""
    squares, vectors = torch.linalg.eigh(_gram(z))
    return squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)


def _rotated(q: Tensor, z: Tensor, *, values: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kept = rotation.float()
    s = values[: kept.shape[1]].float()
    return q @ kept, s, (z @ kept) / s.clamp_min(torch.finfo(torch.float32).smallest_normal)


def _signed(
    u: Tensor,
    s: Tensor,
    v: Tensor,
    *,
    sigma_next: float | None,
    residual: float,
    method: Literal["randomized svd", "exact svd"],
) -> Decomposition:
    largest = v.abs().argmax(dim=0, keepdim=True)
    sign = torch.where(v.gather(0, largest) < 0, -1.0, 1.0) if v.numel() else torch.ones(1, 0)
    return Decomposition(u * sign, s, v * sign, sigma_next, residual, method)


def _kept(values: Tensor, rank: int | Literal["auto"], edge: float) -> int:
    return int((values > edge).sum()) if rank == "auto" else min(rank, int(values.shape[0]))


def _at(values: Tensor, index: int) -> float | None:
    return float(values[index]) if index < values.shape[0] else None


def orthonormal(y: Tensor) -> Tensor:
    """An orthonormal basis of the columns of y (m, w), m >= w, by CholeskyQR2 with Gram matrices in float64.

    Two passes of matrix products, far cheaper than Householder QR, which takes over where the columns depend on
    each other too closely for a Cholesky factor.
    """
    q = y
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(_gram(q))
        if failed:
            householder: Tensor = torch.linalg.qr(y).Q
            return householder
        q = torch.linalg.solve_triangular(factor.float(), q.T, upper=False).T
    return q


def factors_of(found: Decomposition, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """B = U sqrt(S), (m, rank), and A = sqrt(S) V^T, (rank, n), both contiguous and rounded to `dtype`."""
    root = found.s.sqrt()
    return (found.u * root).to(dtype).contiguous(), (found.v * root).T.to(dtype).contiguous()


def expected_error(floor: float, *, shape: tuple[int, int], rank: int) -> float:
    """What a rank-r least-squares fit leaves of noise with this floor: floor * sqrt((1 - r/m)(1 - r/n))."""
    m, n = shape
    return floor * math.sqrt((1 - rank / m) * (1 - rank / n))


def merge_quality(base: Tensor, source: Tensor, *, b: Tensor, a: Tensor) -> MergeQuality:
    """Merge as PEFT does by default, in float32 with one rounding at the end, and compare with the source.

    Args:
        base: (m, n), any float dtype.
        source: (m, n).
        b: (m, r), as shipped.
        a: (r, n), as shipped.

    Works on blocks of rows, so that the merged matrix never exists as a whole.
    """
    a32, b32 = a.float(), b.float()
    error = total = 0.0
    exact = 0
    rows = max(1, (1 << 21) // source.shape[1])
    for start in range(0, source.shape[0], rows):
        block = slice(start, start + rows)
        weight, release = base[block].to(source.dtype).float(), source[block]
        delta = release.float() - weight
        product = b32[block] @ a32
        total += _squared_norm(delta)
        error += _squared_norm(delta.sub_(product))
        exact += int((product.add_(weight).to(source.dtype) == release).sum())
    return MergeQuality(math.sqrt(error / total) if total else 0.0, exact)


def _gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, device=generator.device)


def _gram(y: Tensor) -> Tensor:
    wide = y.double()
    return wide.T @ wide


def _squared_norm(x: Tensor) -> float:
    """Sum of squares: float32 along rows, which are short, and float64 over them, which may be many."""
    if x.dim() == 1:
        return float(x.double().square().sum())
    return float(torch.linalg.vector_norm(x, dim=1).double().square().sum())
