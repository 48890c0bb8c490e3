"""Changed parameters of experts become factors and figures of each expert; one such parameter is a unit of work.

A parameter holds a matrix for each expert. Each is read, taken apart and forgotten before the next, so that memory
depends on one matrix and on the factors alone. PEFT rounds a parameter's update to the weight's dtype before it is
added, so there are two roundings: noise, floor and shares go by those.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from publisher.adapters.parameters import ExpertFactors
from publisher.checkpoints import fp8, fp8_reader
from publisher.checkpoints.dtypes import ADAPTER_DTYPES
from publisher.checkpoints.pairs import CheckpointPair, Sides, TensorPair, readers_of
from publisher.engines import Begin, Engine, Report
from publisher.engines.io_threads import WriteBehind
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.judged_merge import judge_merge
from publisher.extraction.module import ExtractedMatrix, extract_matrix, rank_of, room_for
from publisher.extraction.module_cache import ModuleCache
from publisher.extraction.pair_job import PairJob, bytes_to_look_at
from publisher.manifest.schema import AdapterSettings
from publisher.numerics.merge_arithmetic import loses_digits
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import ExpertFigures, ExpertTensorFigures, MatrixFigures
from publisher.records.progress import Progress

_LIKELY_RANK = 64  # of an expert, where the rank is to be found: for the memory of the factors


def extract_experts(
    names: Sequence[str],
    settings: AdapterSettings,
    both: CheckpointPair,
    *,
    cache: ModuleCache,
    engine: Engine,
    progress: Progress,
) -> tuple[ExpertTensorFigures, ...]:
    """Extract every parameter of experts, or take what an earlier run with the same inputs has kept of it.

    Args:
        names: of the changed parameters.
        settings: the manifest's `adapter`.
        both: base and tuned, open for reading.
        cache: where finished parameters are kept.
        engine: where the arithmetic is done.
        progress: called for each parameter and expert.

    Returns:
        The figures of the parameters, in the order of `names`.

    Raises:
        ExtractionError: NaN or infinity in a weight, values so large that the figures overflow, or a parameter in
            which nothing stands out of rounding noise.
        EngineError: the cluster fails.
    """
    found = {name: cache.expert_figures(name) for name in names}

    def report(what: str) -> None:
        progress(what, sum(map(bool, found.values())), len(found))

    missing = [name for name in names if found[name] is None]
    job = ExtractingExperts(both.snapshots, settings)
    with WriteBehind() as writing, engine.run(job, map(both.tensors, missing), report=report) as results:
        for pair, tensor in results:
            writing.submit(cache.put, tensor)
            found[pair.name] = tensor.figures
    figures = tuple(one for one in found.values() if one is not None)
    _require_signal(figures)
    return figures


def _require_signal(figures: Sequence[ExpertTensorFigures]) -> None:
    """Require that something stands out of rounding noise in every parameter, if not in every expert."""
    silent = [tensor.name for tensor in figures if not tensor.rank]
    if silent:
        raise ExtractionError(
            f"nothing stands out of rounding noise in any expert of {counted(len(silent), 'parameter')}:\n"
            f"{listed(silent)}\n",
            expected="singular values above the spectral noise threshold",
            next_step="give a fixed adapter.rank, or name these parameters under adapter.ignore",
        )


@dataclass(frozen=True, slots=True)
class ExtractingExperts(PairJob[TensorPair, ExpertFactors]):
    """Reads a parameter on both sides, expert by expert, and takes the factors of each out."""

    settings: AdapterSettings

    def label(self, unit: TensorPair) -> str:
        """Return the progress label of a parameter."""
        return f"extracting {unit.name}"

    def memory(self, unit: TensorPair) -> int:
        """Return the bytes that extracting one expert takes, with the factors of all."""
        matrix = unit.tuned.shape[-2:]
        rank = self.settings.rank if isinstance(self.settings.rank, int) else _LIKELY_RANK
        factors: int = math.prod(unit.tuned.shape[:-2]) * min(rank, *matrix) * sum(matrix)
        width: int = ADAPTER_DTYPES[self.settings.dtype].itemsize
        return room_for(matrix, self.settings) + 2 * factors * width + bytes_to_look_at(unit)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[TensorPair, ExpertFactors]]:
        """Return what extracts parameters, with the arithmetic on that device."""
        yield lambda pair: partial(self._extract, pair, device)

    def _extract(self, pair: TensorPair, device: torch.device, report: Report) -> ExpertFactors:
        found: dict[int, ExtractedMatrix] = {}
        for number, matrix in enumerate(expert_pairs(self.snapshots, pair)):
            if matrix.is_unchanged:
                continue
            report(f"extracting {pair.name}: expert {number} of {math.prod(pair.tuned.shape[:-2])}")
            found[number] = extract_expert(f"{pair.name}[{number}]", matrix.on(device), self.settings)
        return _stacked(pair.name, pair.tuned.shape, found, dtype=ADAPTER_DTYPES[self.settings.dtype])


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """The matrix of one expert on both sides.

    Attributes:
        base: (m, n), any float dtype.
        tuned: (m, n).
        steps: distances between neighbouring values of a quantisation of either side, float32 (m, n), where there is
            one.
    """

    base: Tensor
    tuned: Tensor
    steps: Tensor | None

    @property
    def is_unchanged(self) -> bool:
        """Whether both are equal once the base was cast to the tuned dtype."""
        return torch.equal(self.base.to(self.tuned.dtype), self.tuned)

    def on(self, device: torch.device) -> "ExpertPair":
        """Return the pair on this device."""
        steps = None if self.steps is None else self.steps.to(device)
        return ExpertPair(self.base.to(device), self.tuned.to(device), steps)


def expert_pairs(snapshots: Sides[Snapshot], pair: TensorPair) -> Iterator[ExpertPair]:
    """Yield the matrices of a parameter one by one; each is good until the next one is asked for.

    Args:
        snapshots: base and tuned.
        pair: the parameter in both of them.

    Yields:
        The matrix of each expert, on the CPU.
    """
    matrix = pair.tuned.shape[-2:]
    with readers_of(snapshots, [pair]) as readers:
        steps = fp8.combined(fp8_reader.steps(pair.name, reader) for reader in readers)
        blocks = zip(*(reader.blocks(pair.name, math.prod(matrix)) for reader in readers), strict=True)
        for number, (base, tuned) in enumerate(blocks):
            of_this = None if steps is None else steps.reshape(-1, *matrix)[number]
            yield ExpertPair(base.reshape(matrix), tuned.reshape(matrix), of_this)


def extract_expert(name: str, pair: ExpertPair, settings: AdapterSettings) -> ExtractedMatrix:
    """Take the factors out of the matrix of one expert, with their figures; a pure function of its arguments.

    The update was rounded to the weight's dtype, which adds step^2 / 12 of its own steps to the noise of each element
    (docs/numerics.md); unless a base in a longer dtype was merged in that, which the delta shows.

    Args:
        name: of the parameter and the expert, which seeds the arithmetic.
        pair: the matrix (m, n) on both sides.
        settings: the adapter's method, rank and dtype.

    Returns:
        The factors B (m, r) and A (r, n) in the adapter's dtype.

    Raises:
        ExtractionError: NaN or infinity in either matrix, or values so large that the figures overflow.
    """
    judge = partial(judge_merge, name, base=pair.base, tuned=pair.tuned, rank=rank_of(settings), steps=pair.steps)
    judged = judge() if loses_digits(pair.base, pair.tuned.dtype) else None
    if judged is None or judged.weight.base.dtype == pair.tuned.dtype:  # merged in the release's dtype, as by PEFT
        judged = judge(known="update rounded first")
        return extract_matrix(replace(judged.weight, is_known=True), settings, svd=judged.svd)
    found = extract_matrix(judged.weight, settings, svd=judged.svd)
    figures = MatrixFigures(**dict(found.figures) | {"arithmetic": judged.arithmetic})
    return replace(found, figures=figures)


def _stacked(
    name: str, shape: tuple[int, ...], found: dict[int, ExtractedMatrix], *, dtype: torch.dtype
) -> ExpertFactors:
    """Return the factors of all experts at the largest rank that any needs; what is added is zero."""
    rows, columns = shape[-2:]
    number, rank = math.prod(shape[:-2]), max((one.svd.rank for one in found.values()), default=0)
    b, a = torch.zeros(number, rows, rank, dtype=dtype), torch.zeros(number, rank, columns, dtype=dtype)
    for expert, one in found.items():
        b[expert, :, : one.svd.rank] = one.b.cpu()
        a[expert, : one.svd.rank] = one.a.cpu()
    experts = tuple(ExpertFigures(**dict(one.figures), expert=expert) for expert, one in found.items())
    return ExpertFactors(b, a, ExpertTensorFigures(name=name, shape=shape, experts=experts))
