"""Validate: the written adapter is re-read and has to do what extraction.json says.

Structure first: the files are those of extraction.json, PEFT loads them on the manifest's model class (without
weights, on the meta device), every tensor of the file reaches a parameter and every parameter has a tensor, and
every scaling is 1. Then numbers: base + BA against the source, module by module, from the files. Then function,
where the model fits in memory: the logits of base + adapter lie close to the source's and away from the base's.

PEFT itself only warns, or says nothing, where an adapter loads in part; here each of these is an error.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open

from publisher.adapters.loading import (
    AdapterLocation,
    configuration,
    load_adapter,
    loading_problems,
    merged_by_peft,
    quiet,
    whole_model,
)
from publisher.adapters.peft_files import KEY_PREFIX, carried_keys
from publisher.adapters.residual import Residual
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair, TensorPair, open_pair, readers_of
from publisher.checkpoints.snapshots import headers_of
from publisher.engines import Begin, Engine, Finish, Report
from publisher.errors import ValidationError, listed
from publisher.extraction.pair_job import PairJob
from publisher.extraction.summary import summary_problems
from publisher.manifest.schema import Variant
from publisher.numerics.merge_quality import merge_quality
from publisher.numerics.randomness import seeded
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import ExactRecovery, Extraction, ModuleExtraction
from publisher.records.filenames import ADAPTER, RESIDUAL
from publisher.records.files import sha256_of
from publisher.records.progress import Progress
from publisher.records.validation import FunctionCheck, Validation

MERGE_TOLERANCE = 1e-4  # of a share: sums in another order move what lies at the very edge of its interval
CLAIM_TOLERANCE = 1e-3  # of a figure: sums in another order differ, another adapter differs far more
FUNCTION_LIMIT = 0.5  # of the way from the source's logits to the base's
_SEQUENCES, _TOKENS = 2, 32
_MEMORY_SHARE = 0.6  # of what is free, for one model in float32 and its activations
_STREAMED = "the weights are streamed, and the model is not on this machine"
_CHECKED = 16  # bytes for each element of a weight: both sides, the merged one, and the difference
_AT_LEAST = 1 << 28
_AGAIN = "publish extract --manifest MANIFEST"


def validate(
    variant: Variant,
    extraction: Extraction,
    *,
    source: Snapshot,
    base: Snapshot,
    staged: Path,
    engine: Engine,
    progress: Progress,
) -> Validation:
    """Check the adapter in `staged` in all three ways; what was seen.

    Raises:
        ValidationError: the first of the three that fails, naming every module concerned.
    """
    with quiet():
        progress(f"validating {variant.label}: structure")
        require_structure(variant, extraction, base=base, staged=staged)
        difference = require_numbers(
            extraction, source=source, base=base, staged=staged, engine=engine, progress=progress
        )
        obstacle = _STREAMED if source.streamed or base.streamed else function_obstacle(headers_of(source))
        progress(f"validating {variant.label}: function")
        function = None if obstacle else require_function(variant, source=source, base=base, staged=staged)
    _require_none(summary_problems(extraction), "the summary in extraction.json does not follow from its modules")
    return Validation(
        path=variant.path,
        modules=len(extraction.modules),
        tensors=2 * len(extraction.modules) + len(carried_keys(extraction.summary.carried)),
        largest_claim_difference=difference,
        function=function,
        function_skipped=obstacle,
        packages=packages(),
    )


def packages() -> dict[str, str]:
    """Versions of the packages that judge."""
    return {name: metadata.version(name) for name in ("peft", "torch", "transformers")}


# --- structure ----------------------------------------------------------------------------------------------


def require_structure(variant: Variant, extraction: Extraction, *, base: Snapshot, staged: Path) -> None:
    """What can be checked without weights; of the base, config.json alone is read."""
    with quiet():
        require_files(extraction, staged)
        require_loadable(variant, extraction, base=base, staged=staged)


def require_files(extraction: Extraction, staged: Path) -> None:
    """The adapter's files are those of extraction.json, and hold just its modules: shapes, dtype, finite, not zero."""
    for name, recorded in extraction.summary.written.items():
        if not (staged / name).is_file():
            raise ValidationError(f"{staged / name} does not exist", next_step=_AGAIN)
        found = sha256_of(staged / name)
        if found != recorded.sha256:
            raise ValidationError(
                f"{staged / name} has SHA-256 {found[:12]}…",
                expected=f"{recorded.sha256[:12]}…, as extraction.json says",
                next_step=_AGAIN,
            )
    require_tensors(extraction, staged)


def require_tensors(extraction: Extraction, staged: Path) -> None:
    """The adapter holds just the modules of extraction.json: shapes, dtype, finite, not zero."""
    expected = {key: shape for module in extraction.modules for key, shape in _tensors_of(module).items()}
    every = expected.keys() | carried_keys(extraction.summary.carried).keys()
    with safe_open(staged / ADAPTER, framework="pt") as file:
        problems = [f"{key} is missing" for key in sorted(every - set(file.keys()))]
        problems += [f"{key} belongs to no module" for key in sorted(set(file.keys()) - every)]
        for key in sorted(expected.keys() & set(file.keys())):
            problems += _tensor_problems(key, file.get_tensor(key), shape=expected[key], settings=extraction)
    _require_none(problems, f"{staged / ADAPTER} does not hold what extraction.json lists")


def _tensors_of(module: ModuleExtraction) -> dict[str, tuple[int, int]]:
    rows, columns = reversed(module.shape) if module.transposed else module.shape
    key = KEY_PREFIX + module.name
    return {f"{key}.lora_A.weight": (module.alpha, columns), f"{key}.lora_B.weight": (rows, module.alpha)}


def _tensor_problems(key: str, tensor: torch.Tensor, *, shape: tuple[int, int], settings: Extraction) -> Iterator[str]:
    if tuple(tensor.shape) != shape:
        yield f"{key} is {tuple(tensor.shape)} instead of {shape}"
    if tensor.dtype != getattr(torch, settings.settings.dtype):
        yield f"{key} is {tensor.dtype} instead of {settings.settings.dtype}"
    if not bool(torch.isfinite(tensor).all()):
        yield f"{key} holds NaN or infinity"
    if not bool(tensor.any()):
        yield f"{key} is all zero"


def require_loadable(variant: Variant, extraction: Extraction, *, base: Snapshot, staged: Path) -> None:
    """PEFT puts every tensor of the file into the manifest's model class, and nothing else, at scaling 1."""
    problems = loading_problems(
        variant.model_class, extraction.modules, config=base.folder, adapter=AdapterLocation(staged)
    )
    _require_none(
        problems,
        f"PEFT does not load {staged} whole on {variant.model_class}",
        next_step=f"correct model_class in the manifest if it is not the class that was saved, or: {_AGAIN}",
    )


# --- numbers ------------------------------------------------------------------------------------------------


def require_numbers(
    extraction: Extraction, *, source: Snapshot, base: Snapshot, staged: Path, engine: Engine, progress: Progress
) -> float:
    """Base + BA against the source for every module, from the files; the largest difference from what is claimed."""
    found: dict[str, _Checked] = {}

    def report(what: str) -> None:
        progress(what, len(found), len(extraction.modules))

    with (
        open_pair(base=base, tuned=source) as both,
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
    _require_none(problems, "base + adapter differs from what extraction.json claims")
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
    a, b = (adapter.get_tensor(key) for key in sorted(_tensors_of(module)))
    if module.transposed:
        a, b = b.T, a.T
    return Claim(module, both.tensors(f"{module.name}.weight"), b, a, residuals(module.name) if residuals else None)


@dataclass(frozen=True, slots=True)
class Checking(PairJob[Claim, _Checked]):
    """Merges a module's factors into the base's weight and holds the result against the source's."""

    def label(self, unit: Claim) -> str:
        """By its name."""
        return f"checking {unit.module.name}"

    def memory(self, unit: Claim) -> int:
        """By its size."""
        return room_for(unit.module.shape)

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[Claim, _Checked]]:
        """The arithmetic is done on that device."""
        yield lambda claim: self._read(claim, device)

    def _read(self, claim: Claim, device: torch.device) -> Finish[_Checked]:
        with readers_of(self.snapshots, [claim.weights]) as readers:
            base, source = (reader.read(claim.weights.name) for reader in readers)

        def finish(report: Report) -> _Checked:
            del report
            return _checked(claim, base.to(device), source=source.to(device))

        return finish


def room_for(shape: tuple[int, ...]) -> int:
    """Bytes of memory that checking a weight of this shape takes, beside the process."""
    return _AT_LEAST + _CHECKED * math.prod(shape)


def _checked(claim: Claim, base: torch.Tensor, *, source: torch.Tensor) -> _Checked:
    module, problems = claim.module, list[str]()
    a, b = claim.a.to(base.device), claim.b.to(base.device)
    if module.recovery:
        problems += _merge_problems(
            module.name, module.recovery, (base, source), factors=(b, a), residual=claim.residual
        )
    found = merge_quality(base=base, tuned=source, b=b, a=a)
    exact = found.exact_elements / math.prod(module.shape)
    differences = abs(found.relative_error - module.relative_error), abs(exact - module.exact_share)
    if not differences[0] <= CLAIM_TOLERANCE * max(module.relative_error, CLAIM_TOLERANCE):  # NaN too
        problems.append(f"{module.name}: error {found.relative_error:.6g}, claimed {module.relative_error:.6g}")
    if differences[1] > CLAIM_TOLERANCE:
        problems.append(f"{module.name}: exact share {exact:.6g}, claimed {module.exact_share:.6g}")
    return _Checked(max(differences), tuple(problems))


@contextmanager
def _residuals(extraction: Extraction, staged: Path) -> Iterator[Callable[[str], Residual] | None]:
    """Gives the residual of a module, where the release has a file of them."""
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


def _merge_problems(
    name: str,
    recovery: ExactRecovery,
    weights: Sequence[torch.Tensor],
    *,
    factors: tuple[torch.Tensor, torch.Tensor],
    residual: Residual | None,
) -> Iterator[str]:
    """What PEFT's own merge restores, as much as is claimed; and everything, once the residual is set."""
    base, source = weights
    safe = recovery.arithmetic == "update rounded first"
    merged = merged_by_peft(base.to(source.dtype), b=factors[0], a=factors[1], safe=safe)
    share = float((merged == source).double().mean())
    if not share >= recovery.share - MERGE_TOLERANCE:
        yield f"{name}: PEFT's merge restores {share:.6%}, claimed {recovery.share:.6%}"
    if residual is not None and not torch.equal(residual.apply(merged), source):
        yield f"{name}: PEFT's merge with {RESIDUAL} is not the source's weight"


# --- function -----------------------------------------------------------------------------------------------


def function_obstacle(headers: Mapping[str, TensorHeader]) -> str | None:
    """What keeps this machine from comparing logits, if anything does."""
    needed = 4 * sum(math.prod(header.shape) for header in headers.values())
    free = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    if needed <= free:
        return None
    return f"the model needs {needed / 1e9:.1f} GB in float32 and {free / 1e9:.1f} GB of memory can be used"


def require_function(variant: Variant, *, source: Snapshot, base: Snapshot, staged: Path) -> FunctionCheck:
    """Logits in float32 on fixed token ids, one model in memory at a time.

    Raises:
        ValidationError: the adapter changes nothing, or leads less than half of the way to the source.
    """
    ids = _token_ids(configuration(base.folder))
    adapted, complaints = load_adapter(whole_model(variant.model_class, base.folder), AdapterLocation(staged))
    _require_none(complaints, f"PEFT complains about {staged}")
    with_adapter = _logits(adapted, ids)
    with adapted.disable_adapter():
        without = _logits(adapted, ids)
    del adapted
    released = _logits(whole_model(variant.model_class, source.folder), ids)
    check = _function_check(with_adapter, without, released=released)
    if not check.ratio < FUNCTION_LIMIT:
        raise ValidationError(
            f"{variant.label}: the logits of base + adapter are {check.distance} from the source's, "
            f"those of the base {check.base_distance}",
            expected=f"less than {FUNCTION_LIMIT:.0%} of the base's distance",
            next_step="compare source, base and rank in the manifest with how the release was trained",
        )
    return check


def _function_check(with_adapter: torch.Tensor, without: torch.Tensor, *, released: torch.Tensor) -> FunctionCheck:
    distance = float(torch.linalg.vector_norm((with_adapter - released).double()))
    base_distance = float(torch.linalg.vector_norm((without - released).double()))
    return FunctionCheck(
        dtype="float32",
        tokens=(_SEQUENCES, _TOKENS),
        distance=distance,
        base_distance=base_distance,
        ratio=distance / base_distance if base_distance else math.inf,
        largest=float((with_adapter - released).abs().max()),
    )


def _token_ids(config: Any) -> torch.Tensor:
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(vocabulary, (_SEQUENCES, _TOKENS), generator=seeded("tokens", torch.device("cpu")))


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids)[0].float()
    return logits


def _require_none(problems: list[str], what: str, *, next_step: str = _AGAIN) -> None:
    if problems:
        raise ValidationError(
            f"{what}:\n{listed(problems)}\n", expected="no difference in either direction", next_step=next_step
        )
