"""Extract: two checkpoints become one adapter and extraction.json, the evidence of how well it carries the update.

First the headers of both, then every tensor's bytes: what is equal, what differs, and what differs that a LoRA
cannot carry. Only when all of that is as it should be does the arithmetic begin, one tensor pair at a time; each
finished module is kept on disk, so that an interrupted run goes on where it stopped. Modules are found by their
names in the checkpoint; transformers is asked only where those leave a doubt (`structure`).

It refuses checkpoints whose tensors do not match, a base equal to the source, changes outside linear weights that
the manifest neither leaves out nor carries whole, and whatever contradicts the manifest's `expect`.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from publisher.adapters.exports import require_exportable, write_exports
from publisher.adapters.peft_files import adapter_config, carried_keys, write_adapter
from publisher.adapters.residual import planned
from publisher.checkpoints.dtypes import ADAPTER_DTYPES, torch_dtype
from publisher.checkpoints.files import read_config
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import Sides, TensorPair, open_pair
from publisher.checkpoints.reading import Reader
from publisher.checkpoints.writing import Planned, write_tensors
from publisher.engines import Engine, Machine
from publisher.engines.io_threads import WriteBehind
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.base_check import require_kin, require_low_rank
from publisher.extraction.comparison import Comparison, ranges
from publisher.extraction.model_structure import compared
from publisher.extraction.module import Extracting
from publisher.extraction.module_cache import Shelf, shelf
from publisher.extraction.summary import summarise
from publisher.manifest.schema import AdapterSettings, Expectation, Variant
from publisher.records import provenance
from publisher.records.checkpoint import FileDigest, Snapshot
from publisher.records.extraction import Extraction, ModuleExtraction, ModuleFigures, Settings, Tools
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, EXTRACTION, RESIDUAL
from publisher.records.files import canonical_json, digest_of, no_room, write_text
from publisher.records.progress import Progress


def extract(
    variant: Variant,
    source: Snapshot,
    *,
    base: Snapshot,
    staged: Path,
    work: Path,
    engine: Engine,
    progress: Progress,
) -> Extraction:
    """Write adapter_model.safetensors, adapter_config.json and extraction.json into `staged`.

    Args:
        variant: the manifest's entry.
        source: the released checkpoint.
        base: the checkpoint it was trained from.
        staged: the variant's folder in the staged tree.
        work: where finished modules are kept, for a run that was interrupted or that changes no arithmetic.
        engine: where tensors are compared and the arithmetic is done.
        progress: told of each tensor.

    Raises:
        ExtractionError: naming every tensor or expectation that stands in the way.
        EngineError: the cluster fails.
    """
    with open_pair(base=base, tuned=source) as both:
        headers = both.headers.tuned
        seen = compared(variant, both, engine=engine, progress=progress)
        _require_expected(seen, variant.expect, label=variant.label)
        if variant.adapter.method == "exact":
            _require_intervals(seen, headers, label=variant.label)
        _require_exports(variant, seen, headers=headers, base=base)
        require_kin(seen.changed, both.readers)
        tools = provenance.tools(engine.machine.device, packages=engine.machine.packages, code=__name__)
        kept = shelf(work, _arithmetic_key(variant, both.snapshots, machine=engine.machine, tools=tools))
        _require_room(variant.adapter, [headers[name].shape for name in seen.changed], work=work, kept=kept)
        pairs = [both.tensors(name) for name in seen.changed]
        modules = _finished(
            pairs, Extracting(both.snapshots, variant.adapter), engine=engine, kept=kept, progress=progress
        )
        _require_signal(modules)
        require_low_rank(modules, found=not isinstance(variant.adapter.rank, int))
        progress("writing the adapter")
        keys = carried_keys(seen.carried)
        carried = {key: _planned(both.readers.tuned, headers[name], name) for key, name in keys.items()}
        write = partial(
            _write, variant=variant, kept=kept, carried=carried, dtype=torch_dtype(headers[seen.changed[0]])
        )
        return _assemble(modules, variant, seen=seen, snapshots=both.snapshots, tools=tools, staged=staged, write=write)


def _require_exports(
    variant: Variant, seen: Comparison, *, headers: Mapping[str, TensorHeader], base: Snapshot
) -> None:
    """The formats that the manifest asks for can hold these modules; the ranks are known only later."""
    shapes = {name.removesuffix(".weight"): headers[name].shape for name in seen.changed}
    settings = variant.adapter
    if settings.exports:
        require_exportable(settings.exports, variant.model_class, shapes=shapes, config=read_config(base.folder))


def _require_intervals(seen: Comparison, source: Mapping[str, TensorHeader], *, label: str) -> None:
    """The exact method goes by the rounding of the source, which bf16 and fp16 weights show and others do not."""
    wrong = [name for name in seen.changed if torch_dtype(source[name]) not in (torch.bfloat16, torch.float16)]
    wrong = list(seen.changed) if "source" in seen.fp8 else wrong
    if wrong:
        stored = "FP8" if "source" in seen.fp8 else source[wrong[0]].dtype
        raise ExtractionError(
            f"{label}: {counted(len(wrong), 'weight')} of the source in {stored}:\n{listed(wrong)}\n",
            expected="bf16 or fp16 weights for adapter.method exact, which goes by the interval that rounded to each",
            next_step="set adapter.method: svd in the manifest",
        )


def _require_expected(seen: Comparison, expect: Expectation, *, label: str) -> None:
    found = {"linears": (len(seen.changed), expect.linears), "layers": (ranges(seen.layers), expect.layers)}
    wrong = {field: pair for field, pair in found.items() if pair[1] is not None and str(pair[0]) != str(pair[1])}
    if wrong:
        raise ExtractionError(
            f"{label}: the checkpoints differ in "
            + " and ".join(f"{field} {is_ or 'none'}" for field, (is_, _) in wrong.items()),
            expected=" and ".join(f"{field} {should}" for field, (_, should) in wrong.items()),
            next_step="correct expect, source or base of this variant in the manifest",
        )


# --- the modules ----------------------------------------------------------------------------------------------


def _finished(
    pairs: Sequence[TensorPair], job: Extracting, *, engine: Engine, kept: Shelf, progress: Progress
) -> tuple[ModuleFigures, ...]:
    """The figures of every module: from an earlier run with the same inputs, or new and kept as soon as they are done.

    While the next modules are computed, the one before is written.
    """
    found = {pair: kept.figures(pair.name.removesuffix(".weight")) for pair in pairs}

    def report(what: str) -> None:
        progress(what, sum(map(bool, found.values())), len(found))

    missing = [pair for pair in pairs if found[pair] is None]
    for pair in missing:
        if kept.has_files_of(pair.name.removesuffix(".weight")):
            progress(f"making {pair.name} again: what was kept of it is not whole")
    with WriteBehind() as writing, engine.run(job, missing, report=report) as results:
        for pair, module in results:
            writing.submit(kept.put, module)
            found[pair] = module.figures
    return tuple(figures for figures in found.values() if figures is not None)


def _require_room(settings: AdapterSettings, shapes: Iterable[tuple[int, ...]], *, work: Path, kept: Shelf) -> None:
    """Room for the kept modules and for the adapter made of them; a rank to be found tells nobody beforehand."""
    if not isinstance(settings.rank, int):
        return
    every, width = list(shapes), ADAPTER_DTYPES[settings.dtype].itemsize
    adapter = sum(min(settings.rank, *shape) * sum(shape) for shape in every) * width
    exports = sum(map(sum, every)) * settings.rank * sum({"gguf": 4, "mlx": width}[one] for one in settings.exports)
    needed = 2 * adapter + exports - kept.size()
    work.mkdir(parents=True, exist_ok=True)
    if needed > shutil.disk_usage(work).free:
        raise no_room(work.parent, name="the adapter and its modules", size=needed, reason="seen beforehand")


def _arithmetic_key(variant: Variant, snapshots: Sides[Snapshot], *, machine: Machine, tools: Tools) -> str:
    checkpoints = [snapshot.checkpoint.model_dump() for snapshot in snapshots]
    settings = variant.adapter.model_dump(include={"method", "rank", "dtype", "residual"})
    digits = [machine.threads, machine.capability]  # both move the last ones
    return digest_of([checkpoints, settings, tools.code, tools.device, tools.packages, digits])


def _require_signal(modules: Sequence[ModuleFigures]) -> None:
    silent = [module.name for module in modules if module.rank == 0]
    if silent:
        raise ExtractionError(
            f"nothing stands out of rounding noise in {counted(len(silent), 'module')}:\n{listed(silent)}\n",
            expected="singular values above the spectral noise threshold",
            next_step="give a fixed adapter.rank, or name their weights under adapter.ignore",
        )


# --- the adapter --------------------------------------------------------------------------------------------


def _assemble(
    figures: Sequence[ModuleFigures],
    variant: Variant,
    *,
    seen: Comparison,
    snapshots: Sides[Snapshot],
    tools: Tools,
    staged: Path,
    write: Callable[[Path, Sequence[ModuleExtraction]], None],
) -> Extraction:
    rank = max(found.rank for found in figures)
    uniform = variant.adapter.layout == "uniform"
    modules = tuple(
        ModuleExtraction.of(
            found,
            alpha=rank if uniform else found.rank,
            transposed=f"{found.name}.weight" in seen.transposed,
        )
        for found in figures
    )
    base, source = (snapshot.checkpoint for snapshot in snapshots)
    config = adapter_config(variant, modules, rank=rank, base=base, carried=seen.carried)
    write_text(staged / ADAPTER_CONFIG, canonical_json(config))
    write(staged, modules)
    residual = staged / RESIDUAL
    exports = write_exports(variant, modules, folder=staged, config=read_config(snapshots.base.folder))
    extraction = Extraction(
        path=variant.path,
        label=variant.label,
        source=source,
        base=base,
        settings=_settings(variant),
        tools=tools,
        summary=summarise(
            modules,
            seen,
            adapter=FileDigest.of(staged / ADAPTER),
            config=FileDigest.of(staged / ADAPTER_CONFIG),
            residual=FileDigest.of(residual) if residual.is_file() else None,
            exports=exports,
        ),
        modules=modules,
    )
    extraction.write(staged / EXTRACTION)
    return extraction


def _write(
    staged: Path,
    modules: Sequence[ModuleExtraction],
    *,
    variant: Variant,
    kept: Shelf,
    carried: Mapping[str, Planned],
    dtype: torch.dtype,
) -> None:
    """The adapter's weights, of kept modules and of what is carried whole, each read when its turn comes.

    And residual.safetensors, whose values are in the source's `dtype`; one that is not asked for any more goes.
    """
    factors = ADAPTER_DTYPES[variant.adapter.dtype]
    write_adapter(staged / ADAPTER, modules, dtype=factors, load=kept.factors, carried=carried)
    (staged / RESIDUAL).unlink(missing_ok=True)
    if variant.adapter.residual:
        write_tensors(staged / RESIDUAL, planned(modules, kept.residual, dtype=dtype))


def _planned(reader: Reader, header: TensorHeader, name: str) -> Planned:
    """A tensor of a checkpoint that is read when it is written."""
    return Planned(header.shape, torch_dtype(header), partial(reader.read, name))


def _settings(variant: Variant) -> Settings:
    return Settings(**variant.adapter.model_dump(), model_class=variant.model_class)
