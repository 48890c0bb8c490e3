"""Whether the published factors do what extraction.json claims: base + BA against the merged fine-tune, by module.

Everything is read from the files again. Each module's relative error and share of exact weights must be those that are
recorded; with the method `exact`, PEFT's own merge must restore as much as is claimed, and everything once the residual
is set. What the adapter holds whole must be the fine-tune's, bit for bit.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from publisher.adapters.loading import merged_by_peft
from publisher.adapters.peft_files import carried_keys
from publisher.adapters.residual import Residual
from publisher.adapters.structure_checks import factor_shapes, require_no_problems
from publisher.checkpoints.pairs import CheckpointPair, TensorPair, open_pair, readers_of
from publisher.engines import Begin, Engine, Finish, Report
from publisher.extraction.pair_job import PairJob
from publisher.numerics.merge_arithmetic import as_merged
from publisher.numerics.merge_quality import merge_quality
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import ExactRecovery, Extraction, ModuleExtraction
from publisher.records.filenames import ADAPTER, RESIDUAL
from publisher.records.progress import Progress

MERGE_TOLERANCE = 1e-4  # of a share: sums in another order move what lies at the very edge of its interval
CLAIM_TOLERANCE = 1e-3  # of a figure: sums in another order differ, another adapter differs far more
_CHECKED = 16  # bytes for each element of a weight: both sides, the merged one, and the difference
_AT_LEAST = 1 << 28


def require_claims(
    extraction: Extraction, *, base: Snapshot, tuned: Snapshot, staged: Path, engine: Engine, progress: Progress
) -> float:
    """Hold base + BA against the merged fine-tune for every module, from the files.

    Args:
        extraction: what is claimed.
        base: the base.
        tuned: the merged fine-tune.
        staged: the folder of the adapter.
        engine: where the arithmetic is done.
        progress: told of each module.

    Returns:
        The largest difference of a figure from what is claimed of it.

    Raises:
        ValidationError: naming every module or tensor that is not as claimed.
    """
    found: dict[str, _Checked] = {}

    def report(what: str) -> None:
        progress(what, len(found), len(extraction.modules))

    with (
        open_pair(base=base, tuned=tuned) as both,
        safe_open(staged / ADAPTER, framework="pt") as adapter,
        _residuals(extraction, staged) as residuals,
    ):
        claims = (_claim(module, both, adapter=adapter, residuals=residuals) for module in extraction.modules)
        with engine.run(Checking(both.snapshots), claims, report=report) as results:
            for claim, checked in results:
                found[claim.module.name] = checked
        problems = [problem for module in extraction.modules for problem in found[module.name].problems]
        for key, name in carried_keys(extraction.summary.carried).items():
            if not torch.equal(adapter.get_tensor(key), both.readers.tuned.read(name)):
                problems.append(f"{key} is not the source's {name}")
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
    a, b = (adapter.get_tensor(key) for key in sorted(factor_shapes(module)))
    if module.transposed:
        a, b = b.T, a.T
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
            base, tuned = (reader.read(claim.weights.name) for reader in readers)

        def finish(report: Report) -> _Checked:
            del report
            return _checked(claim, base=base.to(device), tuned=tuned.to(device))

        return finish


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
    exact = found.exact_elements / math.prod(module.shape)
    differences = abs(found.relative_error - module.relative_error), abs(exact - module.exact_share)
    if not differences[0] <= CLAIM_TOLERANCE * max(module.relative_error, CLAIM_TOLERANCE):  # NaN too
        problems.append(f"{module.name}: error {found.relative_error:.6g}, claimed {module.relative_error:.6g}")
    if differences[1] > CLAIM_TOLERANCE:
        problems.append(f"{module.name}: exact share {exact:.6g}, claimed {module.exact_share:.6g}")
    return _Checked(max(differences), tuple(problems))


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
