"""Extract: two checkpoints become one adapter and extraction.json, the evidence of how well it carries the update.

First the headers of both, then every tensor's bytes: what is equal, what differs, and what differs that a LoRA
cannot carry. Only when all of that is as it should be does the arithmetic begin, one tensor pair at a time; each
finished module is kept on disk, so that an interrupted run goes on where it stopped. Modules are found by their
names in the checkpoint; transformers is asked only where those leave a doubt (`structure`).

It refuses checkpoints whose tensors do not match, a base equal to the source, changes outside linear weights that
the manifest neither leaves out nor carries whole, and whatever contradicts the manifest's `expect`.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from publisher import dequantised, fp8, lora, provenance
from publisher.adapter import Factors, adapter_config, carried_keys, padded, write_adapter
from publisher.artefacts import ADAPTER, CONFIG, EXTRACTION
from publisher.comparison import Comparison, ranges
from publisher.errors import ExtractionError, counted, listed
from publisher.files import atomic, canonical_json, digest_of, sha256_of, write_text
from publisher.kinship import require_kin, require_low_rank
from publisher.manifest import AdapterSettings, Energy, Expectation, Variant
from publisher.progress import Progress
from publisher.records import (
    Extraction,
    FileDigest,
    ModuleExtraction,
    Settings,
    Snapshot,
    Tools,
)
from publisher.structure import compared
from publisher.summary import summarise
from publisher.tensors import Reader
from publisher.weights import headers_of, reader_of

CODE = (
    "adapter.py",
    "carried.py",
    "comparison.py",
    "dequantised.py",
    "files.py",
    "fp8.py",
    "kinship.py",
    "lora.py",
    "records.py",
    "structure.py",
    "summary.py",
    "tensors.py",
    "weights.py",
    "stages/extract.py",
)  # what decides the bytes
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FULL_GAP = 1.25  # a smallest kept value closer to the noise edge than this may have hidden others


def extract(
    variant: Variant,
    source: Snapshot,
    *,
    base: Snapshot,
    staged: Path,
    work: Path,
    device: torch.device,
    progress: Progress,
) -> Extraction:
    """Write adapter_model.safetensors, adapter_config.json and extraction.json into `staged`.

    Args:
        variant: the manifest's entry.
        source: the released checkpoint.
        base: the checkpoint it was trained from.
        staged: the variant's folder in the staged tree.
        work: where finished modules are kept, for a run that was interrupted or that changes no arithmetic.
        device: where the arithmetic runs.
        progress: told of each tensor.

    Raises:
        ExtractionError: naming every tensor or expectation that stands in the way.
    """
    headers = headers_of(source), headers_of(base)
    with reader_of(source, headers[0]) as sources, reader_of(base, headers[1]) as bases:
        seen = compared(variant, headers=headers, readers=(sources, bases), base=base.folder, progress=progress)
        _require_expected(seen, variant.expect, label=variant.label)
        require_kin(seen.changed, (sources, bases))
        tools = provenance.tools(device_name(device), code=CODE)
        kept = _kept(work, _arithmetic_key(variant, source, base=base, tools=tools))
        modules = []
        for index, name in enumerate(seen.changed):
            progress(f"extracting {name}", index, len(seen.changed))
            modules.append(_module(name, variant.adapter, readers=(sources, bases), device=device, kept=kept))
        _require_signal(modules)
        require_low_rank([module.figures for module in modules], found=not isinstance(variant.adapter.rank, int))
        carried = {key: sources.read(name) for key, name in carried_keys(seen.carried).items()}
        snapshots = source, base
        return _assemble(modules, variant, seen=seen, carried=carried, snapshots=snapshots, tools=tools, staged=staged)


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


# --- one module ---------------------------------------------------------------------------------------------


def extract_module(
    name: str,
    source: torch.Tensor,
    *,
    base: torch.Tensor,
    settings: AdapterSettings,
    steps: torch.Tensor | None = None,
) -> Factors:
    """Factors and figures of one changed linear weight; a pure function of its arguments.

    Args:
        name: the tensor's name, which seeds the arithmetic.
        source: released weight (m, n).
        base: base weight (m, n).
        settings: rank and dtype.
        steps: of the quantisation of either side, float32 (m, n), where there is one.

    Raises:
        ExtractionError: NaN or infinity in either weight.
    """
    _require_finite(name, source, base=base)
    noise = lora.rounding_noise(source, name=name, steps=steps)
    delta = lora.update_of(base, source)
    rank = settings.rank.energy if isinstance(settings.rank, Energy) else settings.rank
    found = lora.decompose(delta, rank=rank, edge=noise.edge, name=name)
    size = math.sqrt(lora.squared_norm(delta))
    unchanged = delta.numel() - int(delta.count_nonzero())
    del delta
    b, a = lora.factors_of(found, _DTYPES[settings.dtype])
    quality = lora.merge_quality(base, source, b=b, a=a)
    figures = _figures(name, source, found=found, noise=noise, quality=quality, size=size, unchanged=unchanged)
    return Factors(b.cpu(), a.cpu(), figures)


def _figures(
    name: str,
    source: torch.Tensor,
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
    )


def _module(
    name: str,
    settings: AdapterSettings,
    *,
    readers: tuple[Reader, Reader],
    device: torch.device,
    kept: Path,
) -> Factors:
    """The finished module from an earlier run with the same inputs, or a new one, kept as soon as it is done."""
    figures, factors = kept / f"{name}.json", kept / f"{name}.safetensors"
    if figures.exists():  # written last: the factors are whole
        tensors = load_file(factors)
        return Factors(tensors["b"], tensors["a"], ModuleExtraction.read(figures))
    source, base = (reader.read(name).to(device) for reader in readers)
    steps = quantisation_steps(name, readers, device=device)
    module = extract_module(name, source, base=base, settings=settings, steps=steps)
    with atomic(factors) as partial:
        save_file({"b": module.b, "a": module.a}, partial)
    module.figures.write(figures)
    return module


def quantisation_steps(name: str, readers: tuple[Reader, Reader], *, device: torch.device) -> torch.Tensor | None:
    """The steps of the stored FP8 values, of both sides together; None where neither is in FP8."""
    steps = fp8.combined(dequantised.steps(name, reader) for reader in readers)
    return None if steps is None else steps.to(device)


def _kept(work: Path, key: str) -> Path:
    """The folder of modules finished with these inputs; those of other inputs are cleared away."""
    kept = work / f"modules-{key[:16]}"
    for other in work.glob("modules-*"):
        if other != kept:
            shutil.rmtree(other)
    return kept


def _arithmetic_key(variant: Variant, source: Snapshot, *, base: Snapshot, tools: Tools) -> str:
    checkpoints = [snapshot.checkpoint.model_dump() for snapshot in (source, base)]
    settings = variant.adapter.model_dump(include={"method", "rank", "dtype"})
    return digest_of([checkpoints, settings, tools.code, tools.device, tools.packages])


def _require_finite(name: str, source: torch.Tensor, *, base: torch.Tensor) -> None:
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


def _require_signal(modules: Sequence[Factors]) -> None:
    silent = [module.figures.name for module in modules if module.figures.rank == 0]
    if silent:
        raise ExtractionError(
            f"nothing stands out of rounding noise in {counted(len(silent), 'module')}:\n{listed(silent)}\n",
            expected="singular values above the noise edge",
            next_step="give a fixed adapter.rank, or name their weights under adapter.ignore",
        )


# --- the adapter --------------------------------------------------------------------------------------------


def _assemble(
    modules: Sequence[Factors],
    variant: Variant,
    *,
    seen: Comparison,
    carried: Mapping[str, torch.Tensor],
    snapshots: tuple[Snapshot, Snapshot],
    tools: Tools,
    staged: Path,
) -> Extraction:
    rank = max(module.figures.rank for module in modules)
    if variant.adapter.layout == "uniform":
        modules = [padded(module, rank) for module in modules]
    modules = [oriented(module, seen.transposed) for module in modules]
    figures = tuple(module.figures for module in modules)
    source, base = (snapshot.checkpoint for snapshot in snapshots)
    config = adapter_config(variant, figures, rank=rank, base=base, carried=seen.carried)
    write_text(staged / CONFIG, canonical_json(config))
    write_adapter(staged / ADAPTER, modules, carried=carried)
    extraction = Extraction(
        path=variant.path,
        label=variant.label,
        source=source,
        base=base,
        settings=_settings(variant),
        tools=tools,
        summary=summarise(figures, seen, adapter=_digest(staged / ADAPTER), config=_digest(staged / CONFIG)),
        modules=figures,
    )
    extraction.write(staged / EXTRACTION)
    return extraction


def oriented(module: Factors, transposed: frozenset[str]) -> Factors:
    """The module with its orientation stated, if its weight is among those stored as (in, out)."""
    if f"{module.figures.name}.weight" not in transposed:
        return module
    return Factors(module.b, module.a, module.figures.model_copy(update={"transposed": True}))


def _settings(variant: Variant) -> Settings:
    return Settings(**variant.adapter.model_dump(), model_class=variant.model_class)


def _digest(path: Path) -> FileDigest:
    return FileDigest(name=path.name, size=path.stat().st_size, sha256=sha256_of(path))


def device_name(device: torch.device) -> str:
    """`cpu`, or the accelerator's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
