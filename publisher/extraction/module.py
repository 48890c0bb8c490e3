"""One changed linear weight becomes its factors and figures: the unit of work of an extraction.

A pure function of two weights, a name and the settings, so that it gives the same wherever and in whatever order it
runs. It refuses NaN and infinity.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import ValidationError
from torch import Tensor

from publisher.adapters.peft_files import Factors
from publisher.adapters.residual import residual_of
from publisher.checkpoints import fp8, fp8_reader
from publisher.checkpoints.pairs import TensorPair, readers_of
from publisher.engines import Begin, Finish, Tell
from publisher.errors import ExtractionError, counted
from publisher.extraction.pair_job import PairJob
from publisher.manifest.fields import Energy
from publisher.manifest.schema import AdapterSettings
from publisher.numerics import lora
from publisher.numerics.exact_recovery import Told, recovered
from publisher.records.extraction import ModuleExtraction, spectrum_places

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# bytes for each element of a weight beside it, as benchmarks/scale.py and docs/scale.md measure them: both sides, the
# update and what is computed of it; more where the rank is found in a full decomposition, or elements are looked up
_TO_RANK, _EXACTLY, _TO_ANY_RANK = 16, 40, 56
_AT_LEAST = 1 << 28
_FULL_GAP = 1.25  # a smallest kept value closer to the noise edge than this may have hidden others


@dataclass(frozen=True, slots=True)
class Extracting(PairJob[TensorPair, Factors]):
    """Reads both weights of a module and takes its factors out."""

    settings: AdapterSettings

    def label(self, unit: TensorPair) -> str:
        """By its name."""
        return f"extracting {unit.name}"

    def memory(self, unit: TensorPair) -> int:
        """By its size."""
        return room_for(unit.tuned.shape, self.settings)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[TensorPair, Factors]]:
        """The arithmetic is done on that device."""
        yield lambda pair: self._read(pair, device)

    def _read(self, pair: TensorPair, device: torch.device) -> Finish[Factors]:
        """With the steps of their stored values, of both sides together, where these are in FP8."""
        with readers_of(self.snapshots, [pair]) as readers:
            base, source = (reader.read(pair.name) for reader in readers)
            steps = fp8.combined(fp8_reader.steps(pair.name, reader) for reader in readers)

        def finish(tell: Tell) -> Factors:
            return extract_module(
                pair.name,
                source.to(device),
                base=base.to(device),
                settings=self.settings,
                steps=None if steps is None else steps.to(device),
                told=_told(tell, self.label(pair)),
            )

        return finish


def room_for(shape: tuple[int, ...], settings: AdapterSettings) -> int:
    """Bytes of memory that extracting a weight of this shape takes, beside the process."""
    each = _TO_RANK if isinstance(settings.rank, int) else _TO_ANY_RANK
    each = max(each, _EXACTLY) if settings.method == "exact" else each
    return _AT_LEAST + each * math.prod(shape)


def _told(tell: Tell, what: str) -> Told:
    """Passes on the iterations of the exact method on one module."""
    return lambda iteration, share: tell(f"{what}: {share:.3%} exact after {iteration} iterations")


def extract_module(
    name: str,
    source: Tensor,
    *,
    base: Tensor,
    settings: AdapterSettings,
    steps: Tensor | None = None,
    told: Told = lambda _iteration, _share: None,
) -> Factors:
    """Factors and figures of one changed linear weight; a pure function of its arguments.

    Args:
        name: the tensor's name, which seeds the arithmetic.
        source: released weight (m, n).
        base: base weight (m, n).
        settings: rank and dtype.
        steps: of the quantisation of either side, float32 (m, n), where there is one.
        told: of each iteration of the exact method and the share that lies inside.

    Raises:
        ExtractionError: NaN or infinity in either weight, or values so large that the figures overflow.
    """
    delta = lora.update_of(base, source)
    size = math.sqrt(lora.squared_norm(delta))
    if not math.isfinite(size):
        _require_finite(name, source, base=base)
    noise = lora.rounding_noise(source, name=name, steps=steps)
    fit = partial(lora.decompose, delta, edge=noise.edge, name=name)
    found = fit(rank=settings.rank.energy if isinstance(settings.rank, Energy) else settings.rank)
    unchanged = sum(int((delta[rows] == 0).count_nonzero()) for rows in lora.row_blocks(delta))
    recovery = residual = None
    if settings.method == "exact":
        again = (lambda rank: fit(rank=rank)) if settings.rank == "auto" else None
        exact = recovered(base, source, found=found, again=again, noise=noise, dtype=DTYPES[settings.dtype], told=told)
        found, b, a, recovery = exact.found, exact.b, exact.a, exact.figures
        if settings.residual:
            residual = residual_of(base, source, b=b, a=a, arithmetic=recovery.arithmetic).cpu()
            recovery = recovery.model_copy(update={"residual": residual.index.numel()})
    else:
        b, a = lora.factors_of(found, DTYPES[settings.dtype])
    quality = lora.merge_quality(base, source, b=b, a=a, delta=delta)
    try:
        figures = _figures(name, source, found=found, noise=noise, quality=quality, size=size, unchanged=unchanged)
    except ValidationError:  # of a record, whose figures are finite
        raise _overflow(name, size / math.sqrt(source.numel())) from None
    figures = figures.model_copy(update={"recovery": recovery})
    return Factors(b.cpu(), a.cpu(), figures, residual)


def _figures(
    name: str,
    source: Tensor,
    *,
    found: lora.Decomposition,
    noise: lora.Noise,
    quality: lora.MergeQuality,
    size: float,
    unchanged: int,
) -> ModuleExtraction:
    rows, columns = source.shape
    floor, fit = noise.norm / size, found.residual / size
    expected = lora.expected_error(floor, shape=(rows, columns), rank=found.rank)
    sigma_r = float(found.s[-1]) if found.rank else 0.0
    hidden = found.sigma_next is not None and (found.sigma_next > noise.edge or sigma_r < _FULL_GAP * noise.edge)
    return ModuleExtraction(
        name=name.removesuffix(".weight"),
        shape=(rows, columns),
        rank=found.rank,
        alpha=found.rank,
        method=found.method,
        fit_error=fit,
        relative_error=quality.relative_error,
        rounding_floor=floor,
        expected_error=expected,
        ratio=fit / expected if expected else None,
        sigma_1=float(found.s[0]) if found.rank else 0.0,
        sigma_r=sigma_r,
        sigma_next=found.sigma_next,
        noise_edge=noise.edge,
        update_rms=size / math.sqrt(source.numel()),
        exact_share=quality.exact_elements / source.numel(),
        unchanged_share=unchanged / source.numel(),
        rank_at_least=hidden,
        spectrum=tuple(found.s[[place - 1 for place in spectrum_places(found.rank)]].tolist()),
    )


def _overflow(name: str, update_rms: float) -> ExtractionError:
    return ExtractionError(
        f"{name} holds values so large that the arithmetic overflows; "
        f"its update has a root mean square of {update_rms:.3g}",
        expected="weights of a model that was trained",
        next_step="check that checkpoint; it is damaged or its training diverged",
    )


def _require_finite(name: str, source: Tensor, *, base: Tensor) -> None:
    sides = {"source": source, "base": base.to(source.dtype)}
    if all(math.isfinite(bound) for weight in sides.values() for bound in weight.aminmax()):
        return
    counts = {side: int((~torch.isfinite(weight)).sum()) for side, weight in sides.items()}
    raise ExtractionError(
        f"{name} holds NaN or infinity: "
        + " and ".join(f"{counted(number, 'element')} in the {side}" for side, number in counts.items()),
        expected="finite weights",
        next_step="check that checkpoint; it is damaged or its training diverged",
    )
