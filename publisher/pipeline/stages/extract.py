"""Extract: two checkpoints become one adapter and extraction.json, the evidence of how well it carries the delta.

First the checkpoints are compared: what is equal, what differs, and what differs that a LoRA cannot carry. Only when
all of that is as it should be does the arithmetic begin, one tensor pair at a time; each finished module is kept on
disk, so that an interrupted run goes on where it stopped. The adapter is written from there, and every record is built
once, when all of its facts are known.

It refuses checkpoints whose tensors do not match, a base equal to the fine-tune, changes outside linear weights that
the manifest neither leaves out nor carries whole, and whatever contradicts the manifest's `expect`.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from publisher.adapters.exports import require_exportable, write_exports
from publisher.adapters.loading import parameter_keys, quiet
from publisher.adapters.parameters import planned_experts
from publisher.adapters.peft_files import adapter_config, carried_keys, token_row_keys, write_adapter
from publisher.adapters.residual import planned_residuals
from publisher.adapters.task_type_check import require_task_type
from publisher.checkpoints.dtypes import ADAPTER_DTYPES, torch_dtype
from publisher.checkpoints.files import read_config
from publisher.checkpoints.pairs import CheckpointPair, Sides, open_pair
from publisher.checkpoints.writing import Planned, write_tensors
from publisher.engines import Engine, Machine
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.base_check import require_low_rank, require_related, require_signal
from publisher.extraction.comparison import Comparison, compare
from publisher.extraction.experts import extract_experts
from publisher.extraction.matrices import as_matrix, matrices, widest_rank
from publisher.extraction.model_structure import structure_of
from publisher.extraction.module import extract_modules
from publisher.extraction.module_cache import ModuleCache, open_module_cache
from publisher.extraction.preflight import ranges
from publisher.extraction.summary import summarise
from publisher.manifest.schema import AdapterSettings, Expectation, Variant
from publisher.records import provenance
from publisher.records.checkpoint import FileDigest, Snapshot
from publisher.records.extraction import (
    ExpertTensor,
    ExpertTensorFigures,
    Extraction,
    ModuleExtraction,
    ModuleFigures,
    ModuleKind,
    SavedModule,
    Settings,
    TokenRows,
    Tools,
)
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, EXTRACTION, RESIDUAL
from publisher.records.files import canonical_json, digest_of, no_room, write_text
from publisher.records.progress import Progress


def extract(
    variant: Variant,
    *,
    base: Snapshot,
    tuned: Snapshot,
    staged: Path,
    work: Path,
    engine: Engine,
    progress: Progress,
) -> Extraction:
    """Write adapter_model.safetensors, adapter_config.json and extraction.json into `staged`.

    Args:
        variant: the manifest's entry.
        base: the checkpoint that the fine-tune was trained from.
        tuned: the checkpoint of the merged fine-tune.
        staged: the variant's folder in the staged tree.
        work: where finished modules are kept, for a run that was interrupted or that changes no arithmetic.
        engine: where tensors are compared and the arithmetic is done.
        progress: called for each tensor.

    Returns:
        What was written to extraction.json.

    Raises:
        ExtractionError: naming every tensor or expectation that stands in the way.
        ValidationError: transformers has no such class, it is not for this configuration, or PEFT cannot call it for
            the manifest's task type.
        EngineError: the cluster fails.
    """
    settings = variant.adapter
    tools = provenance.tools(engine.machine.device, packages=engine.machine.packages, code=__name__)
    structure = structure_of(variant.model_class, base.folder, head_of=tuned.folder)
    with quiet():
        require_task_type(variant, base.folder)
    with open_pair(base=base, tuned=tuned, names=structure.names.applied) as stored:
        seen = compare(stored, settings, structure=structure, engine=engine, progress=progress)
        both = stored.on_quantised(seen.quantised)
        _require_expected(seen, variant.expect, label=variant.label)
        _require_intervals(seen, settings, both, label=variant.label)
        _require_linears_alone(seen, settings, label=variant.label)
        _require_exports(seen, settings, both, model_class=variant.model_class)
        require_related(seen.adapted, both.readers)
        cache = open_module_cache(work, _arithmetic_key(settings, both.snapshots, machine=engine.machine, tools=tools))
        _require_room(seen, settings, both, cache=cache)
        figures = extract_modules(seen.changed, settings, both, cache=cache, engine=engine, progress=progress)
        require_signal(figures)
        experts = extract_experts(seen.experts, settings, both, cache=cache, engine=engine, progress=progress)
        require_low_rank(matrices(figures, experts), both.readers, found=not isinstance(settings.rank, int))
        progress("writing the adapter")
        uniform = widest_rank(figures, experts) if settings.layout == "uniform" else None
        adapter = _Adapter(
            settings,
            _placed(figures, seen, uniform=uniform),
            _placed_experts(experts, seen, uniform=uniform, model_class=variant.model_class, config=base.folder),
            saved=seen.saved,
            token_rows=seen.token_rows,
            both=both,
            cache=cache,
        )
        adapter.write(staged)
    exports = write_exports(
        settings.exports,
        adapter.modules,
        model_class=variant.model_class,
        folder=staged,
        config=read_config(base.folder),
    )
    extraction = _evidence(variant, adapter, seen, staged=staged, tools=tools, exports=exports)
    extraction.write(staged / EXTRACTION)
    return extraction


def _evidence(
    variant: Variant,
    adapter: "_Adapter",
    seen: Comparison,
    *,
    staged: Path,
    tools: Tools,
    exports: tuple[FileDigest, ...],
) -> Extraction:
    """Return the record of the adapter, whose files are all in `staged`."""
    residual = staged / RESIDUAL
    return Extraction(
        path=variant.path,
        label=variant.label,
        source=adapter.both.snapshots.tuned.checkpoint,
        base=adapter.both.snapshots.base.checkpoint,
        settings=Settings(**adapter.settings.model_dump(), model_class=variant.model_class),
        tools=tools,
        summary=summarise(
            adapter.modules,
            seen,
            adapter=FileDigest.of(staged / ADAPTER),
            config=FileDigest.of(staged / ADAPTER_CONFIG),
            residual=FileDigest.of(residual) if residual.is_file() else None,
            exports=exports,
            experts=adapter.experts,
        ),
        modules=adapter.modules,
        experts=adapter.experts,
    )


# --- what is refused before the arithmetic ------------------------------------------------------------------


def _require_expected(seen: Comparison, expect: Expectation, *, label: str) -> None:
    found = {"linears": (len(seen.linears), expect.linears), "layers": (ranges(seen.layers), expect.layers)}
    wrong = {field: pair for field, pair in found.items() if pair[1] is not None and str(pair[0]) != str(pair[1])}
    if wrong:
        raise ExtractionError(
            f"{label}: the checkpoints differ in "
            + " and ".join(f"{field} {is_ or 'none'}" for field, (is_, _) in wrong.items()),
            expected=" and ".join(f"{field} {should}" for field, (_, should) in wrong.items()),
            next_step="correct expect, source or base of this variant in the manifest",
        )


def _require_intervals(seen: Comparison, settings: AdapterSettings, both: CheckpointPair, *, label: str) -> None:
    """Require for the exact method that the tuned weights show how they were rounded, as bf16 and fp16 do."""
    if settings.method != "exact":
        return
    headers = both.headers.tuned
    wrong = [name for name in seen.adapted if torch_dtype(headers[name]) not in (torch.bfloat16, torch.float16)]
    wrong = list(seen.adapted) if "source" in seen.fp8 else wrong
    if wrong:
        stored = "FP8" if "source" in seen.fp8 else headers[wrong[0]].dtype
        raise ExtractionError(
            f"{label}: {counted(len(wrong), 'weight')} of the source in {stored}:\n{listed(wrong)}\n",
            expected="bf16 or fp16 weights for adapter.method exact, which goes by the interval that rounded to each",
            next_step="set adapter.method: svd in the manifest",
        )


def _require_linears_alone(seen: Comparison, settings: AdapterSettings, *, label: str) -> None:
    """Require that nothing is asked for that experts, or tables and convolutions with factors, cannot have."""
    others = sorted({*seen.tables, *seen.kernels})
    exports = [f"adapter.exports: {name}" for name in settings.exports]
    asked, names, what = exports, others, counted(len(others), "weight") + " of tables and convolutions"
    if seen.experts:
        asked = ["adapter.residual"] * settings.residual + exports
        names, what = [*seen.experts], counted(len(seen.experts), "parameter") + " of experts"
    if names and asked:
        raise ExtractionError(
            f"{label}: {' and '.join(asked)} with {what}:\n{listed(names)}\n",
            expected="changes in linear modules alone for what is asked for",
            next_step="remove it from the manifest, or name these tensors under adapter.ignore",
        )


def _require_exports(seen: Comparison, settings: AdapterSettings, both: CheckpointPair, *, model_class: str) -> None:
    """Require that the formats asked for can hold these modules; the ranks are known only later."""
    shapes = {name.removesuffix(".weight"): both.headers.tuned[name].shape for name in seen.linears}
    if settings.exports:
        config = read_config(both.snapshots.base.folder)
        require_exportable(settings.exports, model_class, shapes=shapes, config=config)


def _require_room(seen: Comparison, settings: AdapterSettings, both: CheckpointPair, *, cache: ModuleCache) -> None:
    """Require room for the kept modules and the adapter made of them, where the rank is known beforehand."""
    if not isinstance(settings.rank, int):
        return
    shapes = [as_matrix(both.headers.tuned[name].shape) for name in seen.changed]
    width = ADAPTER_DTYPES[settings.dtype].itemsize
    adapter = sum(min(settings.rank, *shape) * sum(shape) for shape in shapes) * width
    for shape in (both.headers.tuned[name].shape for name in seen.experts):
        adapter += math.prod(shape[:-2]) * min(settings.rank, *shape[-2:]) * sum(shape[-2:]) * width
    exports = sum(map(sum, shapes)) * settings.rank * sum({"gguf": 4, "mlx": width}[one] for one in settings.exports)
    needed = 2 * adapter + exports - cache.size()
    work = cache.folder.parent
    work.mkdir(parents=True, exist_ok=True)
    if needed > shutil.disk_usage(work).free:
        raise no_room(work.parent, name="the adapter and its modules", size=needed, reason="seen beforehand")


# --- the modules ----------------------------------------------------------------------------------------------


def _arithmetic_key(settings: AdapterSettings, snapshots: Sides[Snapshot], *, machine: Machine, tools: Tools) -> str:
    """Return the digest of all that the factors of a module rest on."""
    checkpoints = [snapshot.checkpoint.model_dump() for snapshot in snapshots]
    arithmetic = settings.model_dump(include={"method", "rank", "dtype", "residual"})
    digits = [machine.threads, machine.capability]  # both move the last ones
    base = snapshots.base.quantised
    quantised = [] if base is None else [base.model_dump()]
    return digest_of([checkpoints, arithmetic, tools.code, tools.device, tools.packages, digits, *quantised])


def _placed(figures: Sequence[ModuleFigures], seen: Comparison, *, uniform: int | None) -> tuple[ModuleExtraction, ...]:
    """Return the modules in the adapter's layout, with every factor padded to the rank `uniform` where there is one."""
    return tuple(
        ModuleExtraction(
            **dict(found),
            alpha=uniform or found.rank,
            transposed=f"{found.name}.weight" in seen.transposed,
            kind=_kind(f"{found.name}.weight", seen),
            kernel=seen.kernels.get(f"{found.name}.weight", ()),
        )
        for found in figures
    )


def _kind(name: str, seen: Comparison) -> ModuleKind:
    if name in seen.tables:
        return "embedding"
    return "convolution" if name in seen.kernels else "linear"


def _placed_experts(
    figures: Sequence[ExpertTensorFigures],
    seen: Comparison,
    *,
    uniform: int | None,
    model_class: str,
    config: Path,
) -> tuple[ExpertTensor, ...]:
    """Return the parameters of experts in the adapter's layout, with the names that PEFT has for their factors."""
    if not figures:
        return ()
    keys = parameter_keys(model_class, [found.name for found in figures], config=config)
    return tuple(
        ExpertTensor(
            **dict(found), alpha=uniform or found.rank, transposed=found.name in seen.transposed, keys=keys[found.name]
        )
        for found in figures
    )


# --- the adapter --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Adapter:
    """All that the adapter's files are made of.

    Attributes:
        settings: the manifest's `adapter`.
        modules: in the adapter's layout.
        experts: parameters of experts, in the same layout.
        saved: modules that are stored whole.
        token_rows: tables of which some rows are stored.
        both: the checkpoints, of which whole modules are read.
        cache: where the modules' factors are.
    """

    settings: AdapterSettings
    modules: tuple[ModuleExtraction, ...]
    experts: tuple[ExpertTensor, ...]
    saved: tuple[SavedModule, ...]
    token_rows: tuple[TokenRows, ...]
    both: CheckpointPair
    cache: ModuleCache

    def write(self, staged: Path) -> None:
        """Write adapter_config.json, the weights, and the residual where it is asked for; an earlier one goes."""
        config = adapter_config(
            self.modules,
            task_type=self.settings.task_type,
            rank=widest_rank(self.modules, self.experts),
            base=self.both.snapshots.base.checkpoint,
            carried=self.saved,
            token_rows=self.token_rows,
            experts=self.experts,
        )
        write_text(staged / ADAPTER_CONFIG, canonical_json(config))
        write_adapter(
            staged / ADAPTER,
            self.modules,
            dtype=ADAPTER_DTYPES[self.settings.dtype],
            load=self.cache.factors,
            carried={key: self._whole(name) for key, name in carried_keys(self.saved).items()}
            | {key: self._rows(table) for key, table in token_row_keys(self.token_rows).items()},
            experts={key: tensor for one in self.experts for key, tensor in self._experts(one).items()},
        )
        (staged / RESIDUAL).unlink(missing_ok=True)
        if self.settings.residual:
            header = self.both.headers.tuned[f"{self.modules[0].name}.weight"]
            tensors = planned_residuals(self.modules, self.cache.residual, dtype=torch_dtype(header))
            write_tensors(staged / RESIDUAL, tensors)

    def _experts(self, tensor: ExpertTensor) -> dict[str, Planned]:
        """Return the factors of a parameter of experts, which are read when they are written."""
        load = partial(self.cache.expert_factors, tensor)
        return planned_experts(tensor, load, dtype=ADAPTER_DTYPES[self.settings.dtype])

    def _rows(self, table: TokenRows) -> Planned:
        """Return rows of a table of the tuned checkpoint, which are read when they are written."""
        header = self.both.headers.tuned[f"{table.module}.weight"]
        shape = (len(table.rows), header.shape[1])
        return Planned(
            shape, torch_dtype(header), lambda: self.both.readers.tuned.read(f"{table.module}.weight")[list(table.rows)]
        )

    def _whole(self, name: str) -> Planned:
        """Return a tensor of the tuned checkpoint that is read when it is written."""
        header = self.both.headers.tuned[name]
        return Planned(header.shape, torch_dtype(header), partial(self.both.readers.tuned.read, name))


def _rows_of(table: TokenRows, both: CheckpointPair) -> torch.Tensor:
    return both.readers.tuned.read(f"{table.module}.weight")[list(table.rows)]
