"""Whether the published factors do what extraction.json claims: base + BA against the merged fine-tune, by module.

Everything is read from the files again. Each module's relative error and share of exact weights must be those that are
recorded; with the method `exact`, PEFT's own merge must restore as much as is claimed, and everything once the residual
is set. What the adapter holds whole must be the fine-tune's, bit for bit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from publisher.adapters.loading import merged_by_peft
from publisher.adapters.parameters import unpacked
from publisher.adapters.peft_files import as_stored, carried_keys, token_row_keys
from publisher.adapters.residual import Residual
from publisher.adapters.structure_checks import require_no_problems
from publisher.checkpoints.pairs import CheckpointPair, Naming, TensorPair, open_pair, readers_of
from publisher.engines import Begin, Engine, Finish, Report
from publisher.extraction.experts import ExpertPair, expert_pairs
from publisher.extraction.pair_job import PairJob, bytes_to_look_at
from publisher.numerics.merge_arithmetic import as_merged
from publisher.numerics.merge_quality import MergeQuality, merge_quality
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import (
    ExactRecovery,
    ExpertFigures,
    ExpertTensor,
    Extraction,
    MatrixFigures,
    ModuleExtraction,
)
from publisher.records.filenames import ADAPTER, RESIDUAL
from publisher.records.progress import Progress

MERGE_TOLERANCE = 1e-4  # of a share: sums in another order move what lies at the very edge of its interval
CLAIM_TOLERANCE = 1e-3  # of a figure: sums in another order differ, another adapter differs far more
_CHECKED = 16  # bytes for each element of a weight: both sides, the merged one, and the difference
_AT_LEAST = 1 << 28


def require_claims(
    extraction: Extraction,
    *,
    base: Snapshot,
    tuned: Snapshot,
    names: Naming,
    staged: Path,
    engine: Engine,
    progress: Progress,
) -> float:
    """Hold base + BA against the merged fine-tune for every module, from the files.

    Args:
        extraction: what is claimed.
        base: the base.
        tuned: the merged fine-tune.
        names: gives headers by the names of the model class.
        staged: the folder of the adapter.
        engine: where the arithmetic is done.
        progress: told of each module.

    Returns:
        The largest difference of a figure from what is claimed of it.

    Raises:
        ValidationError: naming every module or tensor that is not as claimed.
    """
    found: dict[str, _Checked] = {}
    places = [*(module.name for module in extraction.modules), *(tensor.name for tensor in extraction.experts)]

    def report(what: str) -> None:
        progress(what, len(found), len(places))

    with (
        open_pair(base=base, tuned=tuned, names=names) as both,
        safe_open(staged / ADAPTER, framework="pt") as adapter,
        _residuals(extraction, staged) as residuals,
    ):
        claims = (_claim(module, both, adapter=adapter, residuals=residuals) for module in extraction.modules)
        with engine.run(Checking(both.snapshots), claims, report=report) as results:
            for claim, checked in results:
                found[claim.module.name] = checked
        expert_claims = (_expert_claim(tensor, both, adapter=adapter) for tensor in extraction.experts)
        with engine.run(CheckingExperts(both.snapshots), expert_claims, report=report) as of_experts:
            for expert_claim, checked in of_experts:
                found[expert_claim.tensor.name] = checked
        problems = [problem for name in places for problem in found[name].problems]
        for key, name in carried_keys(extraction.summary.carried).items():
            if not torch.equal(adapter.get_tensor(key), both.readers.tuned.read(name)):
                problems.append(f"{key} is not the source's {name}")
        for key, table in token_row_keys(extraction.summary.token_rows).items():
            if not torch.equal(
                adapter.get_tensor(key), both.readers.tuned.read(f"{table.module}.weight")[list(table.rows)]
            ):
                problems.append(f"{key} does not hold the source's rows of {table.module}")
    require_no_problems(problems, "base + adapter differs from what extraction.json claims")
    return max((checked.difference for checked in found.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class Claim:
    """What the evidence says of a module, and what lies in the adapter for it; `b` is (m, r), `a` (r, n)."""

    module: ModuleExtraction
    weights: TensorPair
    b: torch.Tensor
    a: torch.Tensor
    residual: Residual | None


@dataclass(frozen=True, slots=True)
class _Checked:
    """How far a module is from its claim, and what is wrong with that."""

    difference: float
    problems: tuple[str, ...]


def _claim(
    module: ModuleExtraction, both: CheckpointPair, *, adapter: Any, residuals: Callable[[str], Residual] | None
) -> Claim:
    a, b = (adapter.get_tensor(key) for key in module.keys)
    b, a = as_stored(module, a=a, b=b)
    return Claim(module, both.tensors(f"{module.name}.weight"), b, a, residuals(module.name) if residuals else None)


@dataclass(frozen=True, slots=True)
class Checking(PairJob[Claim, _Checked]):
    """Merges a module's factors into the base's weight, and holds the result against the fine-tune's."""

    def label(self, unit: Claim) -> str:
        """Return what is told when the module's turn comes."""
        return f"checking {unit.module.name}"

    def memory(self, unit: Claim) -> int:
        """Return the bytes of memory that checking this module takes, beside the process."""
        return _AT_LEAST + _CHECKED * math.prod(unit.module.shape)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[Claim, _Checked]]:
        """Give the function that reads a module's weights; the arithmetic that follows is done on this device."""
        yield lambda claim: self._read(claim, device)

    def _read(self, claim: Claim, device: torch.device) -> Finish[_Checked]:
        with readers_of(self.snapshots, [claim.weights]) as readers:
            base, tuned = (reader.read(claim.weights.name).flatten(1) for reader in readers)

        def finish(report: Report) -> _Checked:
            del report
            return _checked(claim, base=base.to(device), tuned=tuned.to(device))

        return finish


@dataclass(frozen=True, slots=True)
class ExpertClaim:
    """What the evidence says of a parameter of experts, and what the adapter has for it: factors of each expert.

    Attributes:
        tensor: the evidence.
        weights: the parameter in both checkpoints.
        b: (experts, m, r).
        a: (experts, r, n).
    """

    tensor: ExpertTensor
    weights: TensorPair
    b: torch.Tensor
    a: torch.Tensor


def _expert_claim(tensor: ExpertTensor, both: CheckpointPair, *, adapter: Any) -> ExpertClaim:
    a, b = (adapter.get_tensor(key) for key in tensor.keys)
    b, a = unpacked(tensor, a=a, b=b)
    return ExpertClaim(tensor, both.tensors(tensor.name), b, a)


@dataclass(frozen=True, slots=True)
class CheckingExperts(PairJob[ExpertClaim, _Checked]):
    """Merges the factors of each expert into its matrix, and holds the result against the fine-tune's."""

    def label(self, unit: ExpertClaim) -> str:
        """Return what is told when the parameter's turn comes."""
        return f"checking {unit.tensor.name}"

    def memory(self, unit: ExpertClaim) -> int:
        """Return the bytes of memory that checking one expert takes, beside the process."""
        return _AT_LEAST + _CHECKED * math.prod(unit.tensor.matrix) + bytes_to_look_at(unit.weights)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[ExpertClaim, _Checked]]:
        """Give the function that checks a parameter, expert by expert, with the arithmetic on this device."""
        yield lambda claim: partial(self._checked, claim, device)

    def _checked(self, claim: ExpertClaim, device: torch.device, report: Report) -> _Checked:
        del report
        claimed = {found.expert: found for found in claim.tensor.experts}
        found = [
            _checked_expert(claim, expert, pair=pair.on(device), figures=claimed.get(expert))
            for expert, pair in enumerate(expert_pairs(self.snapshots, claim.weights))
        ]
        return _Checked(
            max((one.difference for one in found), default=0.0), tuple(line for one in found for line in one.problems)
        )


def _checked_expert(claim: ExpertClaim, expert: int, *, pair: ExpertPair, figures: ExpertFigures | None) -> _Checked:
    """Hold one expert against its evidence; one without any must be equal on both sides and have no factors."""
    name = f"{claim.tensor.name}[{expert}]"
    b, a = claim.b[expert].to(pair.base.device), claim.a[expert].to(pair.base.device)
    if figures is None:
        problems = [f"{name} differs, and the evidence has nothing of it"] if not pair.is_unchanged else []
        problems += [f"{name} has factors, and the evidence has nothing of it"] if bool((b @ a).any()) else []
        return _Checked(0.0, tuple(problems))
    problems = []
    base, tuned = as_merged(base=pair.base, tuned=pair.tuned, arithmetic=figures.arithmetic)
    if figures.recovery:
        merged = merged_by_peft(base, b=b, a=a, safe=True).to(tuned.dtype)
        share = float((merged == pair.tuned).double().mean())
        if not share >= figures.recovery.share - MERGE_TOLERANCE:
            problems.append(f"{name}: PEFT's merge restores {share:.6%}, claimed {figures.recovery.share:.6%}")
    roundings = figures.arithmetic.roundings if figures.arithmetic else "update rounded first"
    found = merge_quality(base=base, tuned=tuned, b=b, a=a, arithmetic=roundings)
    return _held_against(figures, found, name=name, elements=pair.tuned.numel(), problems=problems)


def _held_against(
    claimed: MatrixFigures, found: MergeQuality, *, name: str, elements: int, problems: Sequence[str]
) -> _Checked:
    """Hold the error and the exact share of a matrix against what is claimed, after other problems of it."""
    exact, lines = found.exact_elements / elements, list(problems)
    differences = abs(found.relative_error - claimed.relative_error), abs(exact - claimed.exact_share)
    if not differences[0] <= CLAIM_TOLERANCE * max(claimed.relative_error, CLAIM_TOLERANCE):  # NaN too
        lines.append(f"{name}: error {found.relative_error:.6g}, claimed {claimed.relative_error:.6g}")
    if differences[1] > CLAIM_TOLERANCE:
        lines.append(f"{name}: exact share {exact:.6g}, claimed {claimed.exact_share:.6g}")
    return _Checked(max(differences), tuple(lines))


def _checked(claim: Claim, *, base: torch.Tensor, tuned: torch.Tensor) -> _Checked:
    module, problems = claim.module, list[str]()
    a, b = claim.a.to(base.device), claim.b.to(base.device)
    base, tuned = as_merged(base=base, tuned=tuned, arithmetic=module.arithmetic)
    if module.recovery:
        safe = module.recovery.arithmetic == "update rounded first"
        merged = merged_by_peft(base, b=b, a=a, safe=safe).to(tuned.dtype)
        problems += _merge_problems(claim, module.recovery, merged=merged, tuned=tuned)
    roundings = module.arithmetic.roundings if module.arithmetic else "one rounding"
    found = merge_quality(base=base, tuned=tuned, b=b, a=a, arithmetic=roundings)
    return _held_against(module, found, name=module.name, elements=math.prod(module.shape), problems=problems)


def _merge_problems(
    claim: Claim, recovery: ExactRecovery, *, merged: torch.Tensor, tuned: torch.Tensor
) -> Iterator[str]:
    """Yield where PEFT's own merge restores less than is claimed, or not everything once the residual is set."""
    name, residual = claim.module.name, claim.residual
    share = float((merged == tuned).double().mean())
    if not share >= recovery.share - MERGE_TOLERANCE:
        yield f"{name}: PEFT's merge restores {share:.6%}, claimed {recovery.share:.6%}"
    if residual is not None and not torch.equal(residual.apply(merged), tuned):
        yield f"{name}: PEFT's merge with {RESIDUAL} is not the source's weight"


@contextmanager
def _residuals(extraction: Extraction, staged: Path) -> Iterator[Callable[[str], Residual] | None]:
    """Give the function that reads a module's residual; None where the release has no file of them."""
    if RESIDUAL not in extraction.summary.written:
        yield None
        return
    with safe_open(staged / RESIDUAL, framework="pt") as file:
        names = set(file.keys())

        def residual(name: str) -> Residual:
            if f"{name}.index" not in names:
                return Residual(torch.empty(0, dtype=torch.int64), torch.empty(0))
            return Residual(file.get_tensor(f"{name}.index").long(), file.get_tensor(f"{name}.value"))

        yield residual
