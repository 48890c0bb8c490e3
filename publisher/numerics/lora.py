"""The mathematics of taking a LoRA out of a merged weight: torch in, torch out, no files.

W is the base weight and F the released one, both (m, n) = (out, in); D = F - W in float32 is the update. A merge
rounds once, F = round(W + BA), so D = BA + noise with the noise uniform within half a step of F. That makes two
things predictable without knowing BA: how much of D the best rank-r fit must leave (the rounding floor), and the
largest singular value that noise alone has (the noise edge), above which singular values are signal.

The truncated SVD is randomized (Halko, Martinsson, Tropp 2011, algorithm 4.4), orthonormalised by CholeskyQR2
(Fukaya et al. 2014), whose second pass is left out where the first suffices; where the matrix is small, or the method
does not settle, the exact SVD is taken. Everything is seeded by the tensor's name and has fixed signs: the same input
gives the same factors.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

OVERSAMPLING = 32  # columns beyond the rank: enough to see the gap after it
FIRST_WIDTH = 128  # where the rank is not known beforehand
EXACT_BELOW = 256  # shorter side up to which the exact SVD costs nothing
POWER_ITERATIONS = 6  # before the method counts as not settling
SETTLED = 5e-4  # of the squared residual: a quarter of the 0.1 % that the residual may lie above the optimum
RESOLUTION = 4 * torch.finfo(torch.float32).eps  # of the largest singular value: float32 sees nothing below
WELL_CONDITIONED = 1e3  # columns whose orthonormal basis one pass of CholeskyQR gives to ten digits
KRYLOV_BLOCK = 8
NOISE_DEPTH = 6  # passes forth and back over drawn noise
NEXT_DEPTH = 4  # likewise over what a fit leaves, from a start that power iteration has turned already
EDGE_DEVIATIONS = 2  # that the noise edge stands above the edge drawn
_EXPONENT_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
Rank = int | float | Literal["auto"]  # a whole number; a share of the energy, below 1; what stands above the noise
BLOCK_ELEMENTS = 1 << 21  # worked on at once where a whole matrix would need a copy


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
    delta = torch.empty(source.shape, device=source.device)
    for rows in row_blocks(source):
        torch.sub(source[rows].float(), base[rows].to(source.dtype).float(), out=delta[rows])
    return delta


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


def rounding_noise(source: Tensor, *, name: str, steps: Tensor | None = None) -> Noise:
    """Norm and edge of the errors that one rounding to `source.dtype` makes at these values.

    Uniform errors within half a step have the deviation step / sqrt(12); the norm follows from that. The edge is
    measured, since a closed form from row and column norms is up to twice too high where rows or columns have
    outliers: errors of that size and random sign are drawn and their largest singular value found. They stand for
    the uniform ones without the luck of the draw, which tells where a few rows or elements outweigh the others.
    Small matrices are drawn several times, because theirs fluctuates with the signs as well. `steps` (m, n) are those
    of a quantisation besides, of either side.
    """
    generator = seeded(f"noise of {name}", source.device)
    draws = min(8, max(1, (1 << 18) // source.numel()))
    signed = [_signed_steps(source, generator, steps) for _ in range(draws)]
    deviation = 12**-0.5  # of errors within half a step on either side, in steps
    return Noise(
        norm=deviation * math.sqrt(sum(squared_norm(signed[0][rows].float()) for rows in row_blocks(source))),
        edge=deviation * max(_edge_of(drawn, generator=generator) for drawn in signed),
    )


def _signed_steps(source: Tensor, generator: torch.Generator, steps: Tensor | None) -> Tensor:
    """The step at each value, with a random sign; (m, n), in a short dtype, which holds powers of two exactly."""
    signed = source.new_empty(source.shape, dtype=short_dtype(source.device))
    for rows in row_blocks(source):
        size = _steps(source[rows])
        size = (size if steps is None else size.float().hypot(steps[rows])).to(signed.dtype)
        torch.copysign(size, _random_bytes(size, generator).to(signed.dtype), out=signed[rows])
    return signed


def _steps(source: Tensor) -> Tensor:
    """`step_of` in the dtype itself, which holds its own steps: for bf16 and fp16 at half the memory traffic."""
    if source.dtype not in _EXPONENT_BITS:
        return step_of(source.float(), source.dtype)
    info = torch.finfo(source.dtype)
    power = (source.view(torch.int16) & _EXPONENT_BITS[source.dtype]).view(source.dtype)
    return power.clamp_(min=info.smallest_normal).mul_(info.eps)


def short_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies in it natively, else float32.

    For matrices that are read many times and need be known to three digits only: half the memory, and several times
    the speed. A CPU without such instructions would be far slower for it.
    """
    known: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)  # older versions cannot tell
    native = device.type == "cuda" or known().get("avx512_bf16", False)
    return torch.bfloat16 if native else torch.float32


@contextmanager
def _rough_products() -> Iterator[None]:
    """Factors of float32 products may be rounded to bf16 or TF32 where that is faster; sums stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _random_bytes(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform int8, eight to a draw: drawing one by one would take longer than all products with the matrix."""
    words = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    return words.random_(-(1 << 63), None, generator=generator).view(torch.int8)[: like.numel()].view(like.shape)


def _edge_of(errors: Tensor, *, generator: torch.Generator) -> float:
    """The largest singular value of the errors and some deviations more.

    It moves by u^T E v where the errors move by E (u, v its singular vectors), so its variance is the sum of
    (u_i v_j)^2 times that of each error: large where one row or element makes the edge, small where all do.
    """
    u, sigma, v = _leading(errors, _gaussian(errors.shape[1], KRYLOV_BLOCK, generator), depth=NOISE_DEPTH)
    weights = v.square().to(errors.dtype)
    variance = sum(float(u[rows].square() @ (errors[rows].square() @ weights).float()) for rows in row_blocks(errors))
    return sigma + EDGE_DEVIATIONS * math.sqrt(variance)


def _leading(matrix: Tensor, start: Tensor, *, depth: int) -> tuple[Tensor, float, Tensor]:
    """Largest singular value, with its vectors, of a matrix (m, n) in a short dtype.

    Rayleigh-Ritz over the block Krylov space of `start` (n, w): noise has no gap after its first value, and power
    iteration would take far more passes over the matrix. The value comes out 1 to 2 % low on the largest matrices.
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


def decompose(delta: Tensor, *, rank: Rank, edge: float, name: str) -> Decomposition:
    """Truncated SVD of D, float32 (m, n).

    Args:
        delta: the update.
        rank: columns to keep, at most min(m, n); `auto` keeps the singular values above `edge` and above float32's
            resolution, possibly none; a float, the fewest that hold this share of the squared norm.
        edge: the noise edge.
        name: seeds the random start.

    The randomized method starts with a width beyond the rank and iterates until the residual settles; it widens
    when the captured spectrum does not reach below the noise edge, and gives way to the exact SVD when the width
    would reach half of the shorter side.
    """
    shorter = min(delta.shape)
    width = (rank if isinstance(rank, int) else FIRST_WIDTH) + OVERSAMPLING
    while shorter > max(EXACT_BELOW, 2 * width):
        found = _randomized(delta, rank=rank, edge=edge, generator=seeded(name, delta.device), width=width)
        if found is not None:
            return found
        width *= 2
    return _exact(delta, rank=rank, edge=edge)


def _exact(delta: Tensor, *, rank: Rank, edge: float) -> Decomposition:
    """In float64: LAPACK's float32 errors would pass for singular values above a float32 source's edge."""
    u, s, vh = torch.linalg.svd(delta.double(), full_matrices=False)
    keep = min(_kept(s, rank, edge, total=squared_norm(s)), s.shape[0])
    kept = _with_signs(u[:, :keep].float(), s[:keep].float(), vh[:keep].T.float())
    after = float(s[keep]) if keep < s.shape[0] else None
    _, residual = _left_over(delta, kept)
    return Decomposition(*kept, after, residual, "exact svd")


def _randomized(
    delta: Tensor, *, rank: Rank, edge: float, generator: torch.Generator, width: int
) -> Decomposition | None:
    """None where the width shows no end of the signal or the residual does not settle.

    The first pass only turns the random start towards the leading space, so that its products may be rough; what
    is kept of it is refined at least once in float32.
    """
    total = squared_norm(delta)
    with _rough_products():
        z = delta.T @ orthonormal(delta @ _gaussian(delta.shape[1], width, generator))
    values, _ = _small_spectrum(z)
    before = _missing(values, _kept(values, rank, edge, total=total), total=total)
    for _ in range(POWER_ITERATIONS):
        q = orthonormal(delta @ orthonormal(z))
        z = delta.T @ q
        values, rotation = _small_spectrum(z)
        keep = _kept(values, rank, edge, total=total)
        if keep > width - OVERSAMPLING:
            return None
        residual = _missing(values, keep, total=total)
        if _settled(before, residual, values=values, keep=keep, total=total):
            return _truncated(delta, _rotated(q, z, values=values, rotation=rotation), keep=keep)
        before = residual
    return None


def _missing(values: Tensor, keep: int, *, total: float) -> float:
    """The squared residual of the values kept: good enough to see it settle."""
    return max(total - squared_norm(values[:keep]), 0.0)


def _truncated(delta: Tensor, svd: tuple[Tensor, Tensor, Tensor], *, keep: int) -> Decomposition:
    u, s, v = svd
    kept = _with_signs(u[:, :keep], s[:keep], v[:, :keep])
    rest, residual = _left_over(delta, kept)
    _, after, _ = _leading(rest, v[:, keep : keep + KRYLOV_BLOCK], depth=NEXT_DEPTH)
    return Decomposition(*kept, after, residual, "randomized svd")


def _settled(before: float, residual: float, *, values: Tensor, keep: int, total: float) -> bool:
    """Whether another power iteration would still change the squared residual.

    Each iteration shrinks what is missing by (sigma_width / sigma_keep)^4, so the last change bounds the next ones.
    """
    if keep == 0:
        return True
    contraction = min(float(values[-1] / values[keep - 1].clamp_min(1e-30)) ** 4, 0.999)
    missing = abs(before - residual) * contraction / (1 - contraction)
    return missing <= SETTLED * max(residual, 1e-12 * total)


def _small_spectrum(z: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, descending, and right rotation of z (n, w) from its Gram matrix in float64."""
    wide = z.double()
    squares, vectors = torch.linalg.eigh(wide.T @ wide)
    return squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)


def _rotated(q: Tensor, z: Tensor, *, values: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V of q z^T; columns of V below float32's resolution are shorter than 1."""
    divisors = values.clamp_min(float(values[0]) * torch.finfo(torch.float32).eps).clamp_min(1e-38)
    return q @ rotation.float(), values.float(), ((z.double() @ rotation) / divisors).float()


def _with_signs(u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same SVD with the entry of largest magnitude of each column of V positive."""
    largest = v.gather(0, v.abs().argmax(dim=0, keepdim=True)) if v.numel() else v.new_ones(1, 0)
    sign = torch.where(largest < 0, -1.0, 1.0)
    return u * sign, s, v * sign


def _left_over(delta: Tensor, svd: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, float]:
    """D - u s v^T, (m, n) in a short dtype, and its Frobenius norm.

    Taken from the norms of D and S alone, the norm would drown in float32 where the fit is close.
    """
    u, s, v = svd
    scaled, squares = u * s, 0.0
    rest = delta.new_empty(delta.shape, dtype=short_dtype(delta.device))
    for rows in row_blocks(delta):
        block = torch.addmm(delta[rows], scaled[rows], v.T, alpha=-1)
        squares += squared_norm(block)
        rest[rows] = block
    return rest, math.sqrt(squares)


def _kept(values: Tensor, rank: Rank, edge: float, *, total: float) -> int:
    """How many of these singular values to keep; more than there are where they do not hold the energy asked for."""
    if isinstance(rank, float):
        return 1 + int((values.double().square().cumsum(0) < rank * total).sum())
    if rank == "auto":
        return int((values > max(edge, RESOLUTION * float(values[0]))).sum())
    return min(rank, int(values.shape[0]))


def orthonormal(y: Tensor) -> Tensor:
    """An orthonormal basis of the columns of y (m, w), m >= w, by CholeskyQR in float64.

    Matrix products, far cheaper than Householder QR. The first pass loses as many digits as twice those of the
    columns' condition, which the factor's diagonal shows: a second one makes up for it, and Householder QR takes
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
    """B = U sqrt(S), (m, rank), and A = sqrt(S) V^T, (rank, n), both contiguous and rounded to `dtype`."""
    root = found.s.sqrt()
    return (found.u * root).to(dtype).contiguous(), (found.v * root).T.to(dtype).contiguous()


def expected_error(floor: float, *, shape: tuple[int, int], rank: int) -> float:
    """What a rank-r least-squares fit leaves of noise with this floor: floor * sqrt((1 - r/m)(1 - r/n))."""
    m, n = shape
    return floor * math.sqrt((1 - rank / m) * (1 - rank / n))


def merge_quality(base: Tensor, source: Tensor, *, b: Tensor, a: Tensor, delta: Tensor | None = None) -> MergeQuality:
    """Merge as PEFT does by default, in float32 with one rounding at the end, and compare with the source.

    Args:
        base: (m, n), any float dtype.
        source: (m, n).
        b: (m, r), as shipped.
        a: (r, n), as shipped.
        delta: `update_of` the two, where it is at hand.

    Works on blocks of rows, so that the merged matrix never exists as a whole.
    """
    a32, b32 = a.float(), b.float()
    products = _rough_products if {a.dtype, b.dtype} == {torch.bfloat16} else nullcontext  # rough, bf16 loses nothing
    error = total = 0.0
    exact = 0
    for rows in row_blocks(source):
        weight, release = base[rows].to(source.dtype).float(), source[rows]
        update = release.float() - weight if delta is None else delta[rows]
        with products():
            product = b32[rows] @ a32
        total += squared_norm(update)
        error += squared_norm(update - product)
        exact += int((product.add_(weight).to(source.dtype) == release).count_nonzero())
    return MergeQuality(math.sqrt(error / total) if total else 0.0, exact)


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Rows of the matrix (m, n), in blocks of some million elements."""
    rows = max(1, BLOCK_ELEMENTS // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, matrix.shape[0], rows))


def _gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, device=generator.device)


def squared_norm(x: Tensor) -> float:
    """Sum of squares: float32 along rows, which are short, and float64 over them, which may be many."""
    if x.dim() == 1:
        return float(x.double().square().sum())
    return float(torch.linalg.vector_norm(x, dim=1).double().square().sum())
