"""Whether the fine-tune was trained from this base: seen in the weights themselves, and in what the fits leave.

A fine-tune keeps its base: their weights point the same way, and what was added has a structure that few columns
hold. Where neither is so, the difference is another training, and an adapter of it would be noise. This refuses a
fine-tune that has nothing of the base in it, before the arithmetic; modules without a signal and a delta of full rank,
where the rank was to be found, which it calls a merged DoRA where it is one; and fits that hold no more than they would
of noise. A full fine-tune, whose few largest values stand out, is none of these once the manifest says how much of it
to keep.
"""

import math
import statistics
from collections.abc import Sequence

from publisher.checkpoints.pairs import Sides
from publisher.checkpoints.reading import Reader
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.matrices import Matrix
from publisher.numerics.row_scaling import is_row_scaled
from publisher.records.extraction import ModuleFigures

UNRELATED = 0.1  # cosine between base and tuned below which nothing of the one is in the other
NOISE_MARGIN = 1.1  # times the share of white noise that a fit of the rank holds
_SAMPLES = 5
_SCALED = 3  # modules of which a DoRA is told
_BLOCK = 1 << 20  # elements of each that are looked at: of a streamed one, no more is read

_NEXT = "correct base in the manifest to the model that the source was trained from"


def require_related(changed: Sequence[str], readers: Sides[Reader]) -> None:
    """Require that the tuned weights are the base's with something added, by a few of those that changed.

    Args:
        changed: names of the linear weights that differ, at least one.
        readers: of both checkpoints.

    Raises:
        ExtractionError: most of them have nothing in common.
    """
    step = max(1, len(changed) // _SAMPLES)
    cosines = [_cosine(name, readers) for name in changed[::step][:_SAMPLES]]
    known = [cosine for cosine in cosines if math.isfinite(cosine)]
    if known and statistics.median(known) < UNRELATED:
        raise ExtractionError(
            f"the source's weights have nothing of the base's in them (cosine {statistics.median(known):.2g} "
            f"over {counted(len(known), 'weight')}): it was trained from another base",
            expected="weights that a fine-tune has changed, not replaced",
            next_step=_NEXT,
        )


def _cosine(name: str, readers: Sides[Reader]) -> float:
    """Return the cosine between the beginnings of both; not finite where one is zero or holds NaN.

    Others judge those cases.
    """
    base, tuned = (next(iter(reader.blocks(name, _BLOCK))).float() for reader in readers)
    lengths = float(base.norm()) * float(tuned.norm())
    return float(base @ tuned) / lengths if lengths > 0 else math.nan


def require_signal(modules: Sequence[ModuleFigures]) -> None:
    """Require that something stands out of rounding noise in every module.

    Raises:
        ExtractionError: naming the modules in which nothing does.
    """
    silent = [module.name for module in modules if module.rank == 0]
    if silent:
        raise ExtractionError(
            f"nothing stands out of rounding noise in {counted(len(silent), 'module')}:\n{listed(silent)}\n",
            expected="singular values above the spectral noise threshold",
            next_step="give a fixed adapter.rank, or name their weights under adapter.ignore",
        )


def require_low_rank(fits: Sequence[Matrix], readers: Sides[Reader], *, found: bool) -> None:
    """Require that most fits hold something that is not noise.

    Args:
        fits: all matrices of the adapter.
        readers: of both checkpoints, asked for a few weights where most have no low rank.
        found: the ranks were found (`auto`, or a share of energy), not given.

    Raises:
        ExtractionError: most ranks found are no low ones, or most fits hold no more than they would of noise.
    """
    full = [fit for fit in fits if fit.figures.rank >= min(fit.shape) / 2]
    if found and 2 * len(full) > len(fits):
        if _is_dora(full, readers):
            raise ExtractionError(
                f"the update has no low rank in {len(full)} of {_counted(fits)}, but has one where each row of the "
                "weight may be scaled: a merged DoRA, whose magnitudes no LoRA can hold",
                expected="a merged LoRA",
                next_step="publish the DoRA adapter itself, which PEFT loads (use_dora); or, for a LoRA that comes "
                "near it, say how much of the update to keep: adapter.rank: {energy: 0.8}, or a number",
            )
        raise ExtractionError(
            f"the update has no low rank in {len(full)} of {_counted(fits)}: "
            "a full fine-tune, or a source trained from another base",
            expected="fewer than half as many columns as the weights have, beyond which an adapter saves nothing",
            next_step=f"{_NEXT}; or, for a full fine-tune, say how much of it to keep: adapter.rank: {{energy: 0.8}}, "
            "or a number",
        )
    noisy = sum(map(_is_like_noise, fits))
    if 2 * noisy > len(fits):
        raise ExtractionError(
            f"the fits hold no more of the update than they would of noise in {noisy} of "
            f"{_counted(fits)}: it has no structure, as between a source and another base",
            expected="an update whose largest singular values stand out",
            next_step=_NEXT,
        )


def _counted(fits: Sequence[Matrix]) -> str:
    whole = all(isinstance(fit.figures, ModuleFigures) for fit in fits)
    return counted(len(fits), "module") if whole else f"{len(fits):,} matrices"


def _is_dora(fits: Sequence[Matrix], readers: Sides[Reader]) -> bool:
    """Return whether most of a few modules are the base's with a low rank and rows, or columns, that were scaled."""
    names = [fit.figures.name for fit in fits if isinstance(fit.figures, ModuleFigures)]
    sample = names[:: max(1, len(names) // _SCALED)][:_SCALED]
    scaled = 0
    for name in sample:
        base, tuned = (reader.read(f"{name}.weight") for reader in readers)
        scaled += is_row_scaled(name, base=base, tuned=tuned)
    return 2 * scaled > len(sample)


def _is_like_noise(fit: Matrix) -> bool:
    """Return whether the fit holds no more than one of white noise would.

    Of white noise of norm 1, no singular value is above (sqrt(m) + sqrt(n)) / sqrt(mn), but for a margin (the edge of
    the Marchenko-Pastur law, https://doi.org/10.1070/SM1967v001n04ABEH001994).
    """
    rows, columns = fit.shape
    of_noise = fit.figures.rank * (math.sqrt(rows) + math.sqrt(columns)) ** 2 / (rows * columns)
    return of_noise < 1 / NOISE_MARGIN and 1 - fit.figures.fit_error**2 < NOISE_MARGIN * of_noise
