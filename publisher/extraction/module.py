"""Changed linear weights become factors and figures; one of them is the unit of work of an extraction.

`extract_module` is a pure function of two weights, a name and the settings, so that it gives the same wherever and in
whatever order it runs. It refuses NaN and infinity.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import ValidationError
from torch import Tensor

from publisher.adapters.peft_files import Factors
from publisher.adapters.residual import Residual, residual_of
from publisher.checkpoints import fp8, fp8_reader
from publisher.checkpoints.dtypes import ADAPTER_DTYPES
from publisher.checkpoints.pairs import CheckpointPair, TensorPair, readers_of
from publisher.engines import Begin, Engine, Finish, Report
from publisher.engines.io_threads import WriteBehind
from publisher.errors import ExtractionError
from publisher.extraction.judged_merge import judge_merge
from publisher.extraction.module_cache import ModuleCache
from publisher.extraction.pair_job import PairJob
from publisher.manifest.fields import Energy
from publisher.manifest.schema import AdapterSettings
from publisher.numerics.delta import row_blocks, squared_norm
from publisher.numerics.exact_recovery import MergedWeight, recover_exactly
from publisher.numerics.interval_fit import OnIteration, ignore_iterations
from publisher.numerics.intervals import Arithmetic
from publisher.numerics.merge_quality import merge_quality
from publisher.numerics.noise import expected_error
from publisher.numerics.svd import Decomposition, Rank, decompose, factors_of
from publisher.records.extraction import ExactRecovery, MatrixFigures, ModuleFigures, spectrum_places
from publisher.records.progress import Progress

# bytes for each element of a weight beside it, as they were measured (docs/cluster.md): both sides, the
# update and what is computed of it; more where the rank is found in a full decomposition, or elements are looked up
_TO_RANK, _EXACTLY, _TO_ANY_RANK = 16, 40, 56
_AT_LEAST = 1 << 28
_FULL_GAP = 1.25  # a smallest kept value closer to the noise threshold than this may have hidden others


def extract_modules(
    names: Sequence[str],
    settings: AdapterSettings,
    both: CheckpointPair,
    *,
    cache: ModuleCache,
    engine: Engine,
    progress: Progress,
) -> tuple[ModuleFigures, ...]:
    """Extract every module, or take what an earlier run with the same inputs has kept of it.

    New ones are kept as soon as they are done: while the next modules are computed, the one before is written.

    Args:
        names: of the changed linear weights.
        settings: the manifest's `adapter`.
        both: base and tuned, open for reading.
        cache: where finished modules are kept.
        engine: where the arithmetic is done.
        progress: called for each module.

    Returns:
        The figures of the modules, in the order of `names`.

    Raises:
        ExtractionError: NaN or infinity in a weight, or values so large that the figures overflow.
        EngineError: the cluster fails.
    """
    found = {name: cache.figures(name.removesuffix(".weight")) for name in names}

    def report(what: str) -> None:
        progress(what, sum(map(bool, found.values())), len(found))

    missing = [name for name in names if found[name] is None]
    for name in missing:
        if cache.has_files_of(name.removesuffix(".weight")):
            progress(f"making {name} again: what was kept of it is not whole")
    job = Extracting(both.snapshots, settings)
    with WriteBehind() as writing, engine.run(job, map(both.tensors, missing), report=report) as results:
        for pair, module in results:
            writing.submit(cache.put, module)
            found[pair.name] = module.figures
    return tuple(figures for figures in found.values() if figures is not None)


@dataclass(frozen=True, slots=True)
class Extracting(PairJob[TensorPair, Factors]):
    """Reads both weights of a module and takes its factors out; `known` as for `extract_module`."""

    settings: AdapterSettings
    known: Arithmetic | None = None

    def label(self, unit: TensorPair) -> str:
        """Return the progress label of a weight."""
        return f"extracting {unit.name}"

    def memory(self, unit: TensorPair) -> int:
        """Return the bytes that extracting a weight takes."""
        return room_for(unit.tuned.shape, self.settings)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[TensorPair, Factors]]:
        """Return what extracts weights, with the arithmetic on that device."""
        yield partial(self._read, device=device)

    def _read(self, pair: TensorPair, *, device: torch.device) -> Finish[Factors]:
        """Read both weights, and the steps of their stored values where these are in FP8."""
        with readers_of(self.snapshots, [pair]) as readers:
            base, tuned = (reader.read(pair.name).flatten(1) for reader in readers)
            steps = fp8.combined(fp8_reader.steps(pair.name, reader) for reader in readers)
        return partial(_extract_on, device, _Weights(pair.name, base, tuned, steps), self)


@dataclass(frozen=True, slots=True)
class _Weights:
    """A weight on both sides, and the steps of a quantisation, in main memory."""

    name: str
    base: Tensor
    tuned: Tensor
    steps: Tensor | None


def _extract_on(device: torch.device, weights: _Weights, job: Extracting, report: Report) -> Factors:  # noqa: PLR0917 - bound in front
    label = f"extracting {weights.name}"
    return extract_module(
        weights.name,
        base=weights.base.to(device),
        tuned=weights.tuned.to(device),
        settings=job.settings,
        known=job.known,
        steps=None if weights.steps is None else weights.steps.to(device),
        on_iteration=lambda iteration, share: report(f"{label}: {share:.3%} exact after {iteration} iterations"),
    )


def room_for(shape: tuple[int, ...], settings: AdapterSettings) -> int:
    """Return the bytes of memory that extracting a weight of this shape takes, beside the process."""
    each = _TO_RANK if isinstance(settings.rank, int) else _TO_ANY_RANK
    each = max(each, _EXACTLY) if settings.method == "exact" else each
    return _AT_LEAST + each * math.prod(shape)


@dataclass(frozen=True, slots=True)
class ExtractedMatrix:
    """The factors of one matrix in the adapter's dtype, and what is said of them.

    Attributes:
        svd: that the factors come from.
        b: B (m, r).
        a: A (r, n).
        figures: what the evidence says.
        residual: what a merge leaves to be set, where the settings ask for it.
    """

    svd: Decomposition
    b: Tensor
    a: Tensor
    figures: MatrixFigures
    residual: Residual | None = None


def extract_module(
    name: str,
    *,
    base: Tensor,
    tuned: Tensor,
    settings: AdapterSettings,
    steps: Tensor | None = None,
    known: Arithmetic | None = None,
    on_iteration: OnIteration = ignore_iterations,
) -> Factors:
    """Take the factors out of one changed linear weight, with their figures; a pure function of its arguments.

    Args:
        name: the tensor's name, which seeds the arithmetic.
        base: the base weight, (m, n), any float dtype.
        tuned: the weight of the merged fine-tune, (m, n).
        settings: the adapter's method, rank and dtype, and whether a residual is asked for.
        steps: distances between neighbouring values of a quantisation of either side, float32 (m, n), where there is
            one.
        known: the roundings of the merge, where they are known; else they are found, and the dtypes of the merge.
        on_iteration: called after each iteration of the exact method with the share that lies inside.

    Returns:
        The factors B (m, r) and A (r, n) in the adapter's dtype, in main memory.

    Raises:
        ExtractionError: NaN or infinity in either weight, or values so large that the figures overflow.
    """
    judged = judge_merge(name, base=base, tuned=tuned, rank=rank_of(settings), steps=steps, known=known)
    found = extract_matrix(judged.weight, settings, svd=judged.svd, on_iteration=on_iteration)
    figures = ModuleFigures(
        **dict(found.figures) | {"arithmetic": judged.arithmetic},
        name=name.removesuffix(".weight"),
        shape=(tuned.shape[0], tuned.shape[1]),
        spectrum=tuple(found.svd.s[[place - 1 for place in spectrum_places(found.svd.rank)]].tolist()),
    )
    return Factors(found.b.cpu(), found.a.cpu(), figures, found.residual)


def rank_of(settings: AdapterSettings) -> Rank:
    """Return the rank that the settings ask for, as `decompose` takes it."""
    return settings.rank.energy if isinstance(settings.rank, Energy) else settings.rank


def extract_matrix(
    weight: MergedWeight,
    settings: AdapterSettings,
    *,
    svd: Decomposition | None = None,
    on_iteration: OnIteration = ignore_iterations,
) -> ExtractedMatrix:
    """Take the factors out of one changed matrix, with their figures; a pure function of its arguments.

    Args:
        weight: the matrix (m, n) in base and fine-tune, its delta, and the noise that is expected in that.
        settings: the adapter's method, rank and dtype, and whether a residual is asked for.
        svd: of the delta at the rank that the settings ask for, where it is at hand.
        on_iteration: called after each iteration of the exact method with the share that lies inside.

    Returns:
        The factors B (m, r) and A (r, n) in the adapter's dtype.

    Raises:
        ExtractionError: values so large that the figures overflow.
    """
    norm = math.sqrt(squared_norm(weight.delta))
    svd = svd or decompose(weight.delta, rank=rank_of(settings), threshold=weight.noise.threshold, name=weight.name)
    try:
        if settings.method == "exact" and svd.rank:
            return _recovered(weight, svd, settings=settings, norm=norm, on_iteration=on_iteration)
        b, a = factors_of(svd, ADAPTER_DTYPES[settings.dtype])
        return ExtractedMatrix(svd, b, a, _figures(weight, svd, b=b, a=a, norm=norm))
    except ValidationError:  # of a record, whose figures are finite
        raise _overflow(weight.name, norm / math.sqrt(weight.tuned.numel())) from None


def _recovered(
    weight: MergedWeight,
    svd: Decomposition,
    *,
    settings: AdapterSettings,
    norm: float,
    on_iteration: OnIteration,
) -> ExtractedMatrix:
    """Return the factors of the exact method, and the elements that they leave, where the settings ask for those."""
    exact = recover_exactly(
        weight,
        svd,
        raise_rank=settings.rank == "auto",
        dtype=ADAPTER_DTYPES[settings.dtype],
        on_iteration=on_iteration,
    )
    residual = None
    if settings.residual:
        residual = residual_of(
            base=weight.base, tuned=weight.tuned, b=exact.b, a=exact.a, arithmetic=exact.arithmetic
        ).cpu()
    recovery = ExactRecovery(
        arithmetic=exact.arithmetic,
        told_apart=exact.told_apart,
        other_share=exact.other_share,
        rank_shown=int((exact.svd.s > weight.noise.threshold).sum()),
        svd_share=exact.svd_share,
        float32_share=exact.float32_share,
        share=exact.share,
        iterations=exact.iterations,
        ended=exact.ended,
        residual=None if residual is None else residual.index.numel(),
    )
    figures = _figures(weight, exact.svd, b=exact.b, a=exact.a, norm=norm, recovery=recovery)
    return ExtractedMatrix(exact.svd, exact.b, exact.a, figures, residual)


def _figures(
    weight: MergedWeight,
    svd: Decomposition,
    *,
    b: Tensor,
    a: Tensor,
    norm: float,
    recovery: ExactRecovery | None = None,
) -> MatrixFigures:
    """Return the figures of a matrix; `norm` is the Frobenius norm of its delta."""
    rows, columns = weight.tuned.shape
    elements = weight.tuned.numel()
    noise = weight.noise
    floor, fit = noise.norm / norm, svd.misfit / norm
    expected = expected_error(floor, shape=(rows, columns), rank=svd.rank)
    sigma_r = float(svd.s[-1]) if svd.rank else 0.0
    is_doubtful = svd.sigma_next is not None and (
        svd.sigma_next > noise.threshold or sigma_r < _FULL_GAP * noise.threshold
    )
    quality = merge_quality(
        base=weight.base, tuned=weight.tuned, b=b, a=a, delta=weight.delta, arithmetic=weight.roundings
    )
    return MatrixFigures(
        rank=svd.rank,
        method=svd.method,
        fit_error=fit,
        relative_error=quality.relative_error,
        rounding_floor=floor,
        expected_error=expected,
        ratio=fit / expected if expected else None,
        sigma_1=float(svd.s[0]) if svd.rank else 0.0,
        sigma_r=sigma_r,
        sigma_next=svd.sigma_next,
        noise_edge=noise.threshold,
        update_rms=norm / math.sqrt(elements),
        exact_share=quality.exact_elements / elements,
        unchanged_share=_unchanged(weight) / elements,
        rank_at_least=is_doubtful,
        recovery=recovery,
    )


def _unchanged(weight: MergedWeight) -> int:
    """Count the elements that the base has too, once it is cast to the dtype of the tuned weight."""
    blocks = row_blocks(weight.tuned)
    return sum(int((weight.tuned[rows] == weight.base[rows].to(weight.tuned.dtype)).count_nonzero()) for rows in blocks)


def _overflow(name: str, update_rms: float) -> ExtractionError:
    return ExtractionError(
        f"{name} holds values so large that the arithmetic overflows; "
        f"its update has a root mean square of {update_rms:.3g}",
        expected="weights of a model that was trained",
        next_step="check that checkpoint; it is damaged or its training diverged",
    )
