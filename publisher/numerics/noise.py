"""The noise that a merge's rounding leaves in a delta, predicted from the tuned weight alone.

W is the base weight and F the tuned one, both (m, n) = (out, in); D = F - W in float32 is the delta. A merge rounds
once, F = round(W + BA), so D = BA + noise, with the noise uniform within half a step of F (the model of rounding as
additive noise: Bennett 1948, https://doi.org/10.1002/j.1538-7305.1948.tb01340.x). That makes two things predictable
without knowing BA: how much of D the best rank-r fit must leave (the rounding floor), and the largest singular value
that noise alone has (the spectral noise threshold; `noise_edge` in extraction.json), above which singular values are
signal. docs/numerics.md has the derivation and what was measured.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from publisher.numerics.delta import row_blocks, squared_norm
from publisher.numerics.dtypes import short_dtype, step_in_own_dtype
from publisher.numerics.randomness import gaussian, random_bytes, seeded
from publisher.numerics.svd import KRYLOV_BLOCK, leading_singular_value

KRYLOV_DEPTH = 6  # passes forth and back over drawn noise
DEVIATIONS = 2  # that the threshold stands above the largest singular value drawn
_DRAWN_ELEMENTS = 1 << 18  # smaller matrices are drawn several times
_DRAWS = 8  # at most


@dataclass(frozen=True, slots=True)
class Noise:
    """What one rounding to the tuned weight's dtype does to the delta, in absolute numbers.

    Attributes:
        norm: expected Frobenius norm of the rounding errors.
        threshold: largest singular value that they have, and a margin: singular values above it are signal.
    """

    norm: float
    threshold: float


def rounding_noise(tuned: Tensor, *, name: str, steps: Tensor | None = None) -> Noise:
    """Predict norm and spectral threshold of the errors that one rounding to `tuned.dtype` makes at these values.

    Uniform errors within half a step have the deviation step / sqrt(12); the norm follows from that. The threshold is
    measured, since a closed form from row and column norms is up to twice too high where rows or columns have
    outliers: errors of that size and random sign are drawn and their largest singular value found. They stand for
    the uniform ones without the luck of the draw, which tells where a few rows or elements outweigh the others.
    Small matrices are drawn several times, because theirs fluctuates with the signs as well.

    Args:
        tuned: the weight of the merged fine-tune, (m, n).
        name: the tensor's name, which seeds the draws.
        steps: distances between neighbouring values of a quantisation of either side, float32 (m, n), where there is
            one: they add to those of the dtype.

    Returns:
        The noise.
    """
    generator = seeded(f"noise of {name}", tuned.device)
    draws = min(_DRAWS, max(1, _DRAWN_ELEMENTS // tuned.numel()))
    signed = [_signed_steps(tuned, generator, steps) for _ in range(draws)]
    deviation = 12**-0.5  # of errors within half a step on either side, in steps
    return Noise(
        norm=deviation * math.sqrt(sum(squared_norm(signed[0][rows].float()) for rows in row_blocks(tuned))),
        threshold=deviation * max(_threshold_of(errors, generator=generator) for errors in signed),
    )


def norm_deviation(tuned: Tensor) -> float:
    """Return the standard deviation of the norm of one rounding's errors, as a share of the norm.

    A square of a uniform error of step s has the variance s^4 / 180, so that their sum, of mean sum(s^2) / 12, has the
    relative deviation sqrt(0.8 sum(s^4)) / sum(s^2), and its root half of that.

    Args:
        tuned: the weight of the merged fine-tune, (m, n).
    """
    squares = fourths = 0.0
    for rows in row_blocks(tuned):
        square = step_in_own_dtype(tuned[rows]).double().square()
        squares += float(square.sum())
        fourths += float(square.square().sum())
    return math.sqrt(0.8 * fourths) / squares / 2


def expected_error(floor: float, *, shape: tuple[int, int], rank: int) -> float:
    """Return what a rank-r least-squares fit leaves of noise: floor * sqrt((1 - r/m)(1 - r/n)).

    The fit takes the part of the noise with it that lies in its r rows and r columns (docs/numerics.md).

    Args:
        floor: norm of the noise, in whatever unit; the result has the same.
        shape: (m, n) of the weight.
        rank: r, at most min(m, n).

    Returns:
        The expected norm of what is left.
    """
    m, n = shape
    return floor * math.sqrt((1 - rank / m) * (1 - rank / n))


def _signed_steps(tuned: Tensor, generator: torch.Generator, steps: Tensor | None) -> Tensor:
    """Return the step at each value with a random sign, (m, n), in a short dtype, which holds powers of two exactly."""
    signed = tuned.new_empty(tuned.shape, dtype=short_dtype(tuned.device))
    for rows in row_blocks(tuned):
        size = step_in_own_dtype(tuned[rows])
        if steps is not None:
            size = size.float().hypot(steps[rows])
        size = size.to(signed.dtype)
        torch.copysign(size, random_bytes(size, generator).to(signed.dtype), out=signed[rows])
    return signed


def _threshold_of(errors: Tensor, *, generator: torch.Generator) -> float:
    """Return the largest singular value of the errors, and some deviations more.

    It moves by u^T E v where the errors move by E (u, v its singular vectors), so its variance is the sum of
    (u_i v_j)^2 times that of each error: large where one row or element makes the value, small where all do.
    """
    start = gaussian(errors.shape[1], KRYLOV_BLOCK, generator)
    u, sigma, v = leading_singular_value(errors, start, depth=KRYLOV_DEPTH)
    weights = v.square().to(errors.dtype)
    variance = sum(float(u[rows].square() @ (errors[rows].square() @ weights).float()) for rows in row_blocks(errors))
    return sigma + DEVIATIONS * math.sqrt(variance)
