"""An extraction in a few figures: each follows from the modules' own and from the comparison of the checkpoints.

`extract` writes the summary; `validate` and `audit` work it out again and demand the same.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from publisher.errors import shown
from publisher.extraction.comparison import Comparison
from publisher.extraction.preflight import layers_of, ranges
from publisher.records.checkpoint import FileDigest
from publisher.records.extraction import (
    APPROXIMATE,
    PLATEAU,
    Carried,
    CountedArithmetic,
    Extraction,
    ExtractionSummary,
    LeftOut,
    ModuleExtraction,
    RankCount,
    RecoverySummary,
    Spread,
)
from publisher.records.filenames import EXPORTS, RESIDUAL

NEGLIGIBLE = 0.01  # relative error of a fit below which nothing worth the word is missing


def summarise(
    modules: Sequence[ModuleExtraction],
    seen: Comparison,
    *,
    adapter: FileDigest,
    config: FileDigest,
    residual: FileDigest | None = None,
    exports: tuple[FileDigest, ...] = (),
) -> ExtractionSummary:
    """Sum up an extraction.

    Args:
        modules: of the adapter, at least one.
        seen: what the comparison of the checkpoints found.
        adapter: digest of adapter_model.safetensors.
        config: digest of adapter_config.json.
        residual: digest of residual.safetensors, where it was asked for.
        exports: digests of the files in other formats.

    Returns:
        The summary; every figure in it follows from `modules` and `seen`.
    """
    elements = [math.prod(module.shape) for module in modules]
    total = _whole_update(modules, seen)
    adapted = sum(map(_update_square, modules))
    missing = sum(_update_square(module) * module.relative_error**2 for module in modules)
    ratios = [module.ratio for module in modules if module.ratio is not None]
    return ExtractionSummary(
        linears=len(modules),
        layers=ranges(seen.layers),
        layers_total=seen.layers_total,
        rank=max(module.rank for module in modules),
        ranks=_rank_counts(modules),
        tensors_equal=seen.equal,
        tensors_base_only=seen.base_only,
        left_out=tuple(LeftOut.of(tensor, total=total) for tensor in seen.left_out),
        fp8=seen.fp8,
        carried=tuple(Carried.of(module, total=total) for module in seen.saved),
        parameters=sum(module.alpha * sum(module.shape) for module in modules)
        + sum(module.parameters for module in seen.saved),
        adapter=adapter,
        config=config,
        relative_error=_spread(module.relative_error for module in modules),
        fit_error=_spread(module.fit_error for module in modules),
        rounding_floor=_spread(module.rounding_floor for module in modules),
        ratio=_spread(ratios) if ratios else None,
        update_rms=_spread(module.update_rms for module in modules),
        energy=1 - missing / adapted,
        approximation=_approximates(modules),
        exact_share=_weighted_mean([module.exact_share for module in modules], elements),
        exact_share_modules=_spread(module.exact_share for module in modules),
        recovery=_recovery(modules, residual),
        exports=exports,
        merge_arithmetic=_arithmetics(modules),
    )


def _arithmetics(modules: Sequence[ModuleExtraction]) -> tuple[CountedArithmetic, ...]:
    """Return the ways in which modules were merged that were not the usual one, the most frequent first."""
    found = Counter(module.arithmetic for module in modules if module.arithmetic is not None)
    return tuple(CountedArithmetic(**dict(way), modules=modules) for way, modules in found.most_common())


def _recovery(modules: Sequence[ModuleExtraction], residual: FileDigest | None) -> RecoverySummary | None:
    found = [(module, module.recovery) for module in modules if module.recovery is not None]
    if not found:
        return None
    elements = [math.prod(module.shape) for module, _ in found]
    recoveries = [recovery for _, recovery in found]
    return RecoverySummary(
        svd_share=_weighted_mean([recovery.svd_share for recovery in recoveries], elements),
        float32_share=_weighted_mean([recovery.float32_share for recovery in recoveries], elements),
        share=_weighted_mean([recovery.share for recovery in recoveries], elements),
        modules=_spread(recovery.float32_share for recovery in recoveries),
        arithmetic=dict(sorted(Counter(recovery.arithmetic for recovery in recoveries).items())),
        told_apart=sum(recovery.told_apart for recovery in recoveries),
        short=sum(recovery.float32_share < PLATEAU for recovery in recoveries),
        rank_beyond=sum(module.rank > recovery.rank_shown for module, recovery in found),
        residual=residual,
        residual_elements=sum(recovery.residual or 0 for recovery in recoveries) if residual else None,
    )


def _weighted_mean(shares: Sequence[float], elements: Sequence[int]) -> float:
    return sum(count * share for count, share in zip(elements, shares, strict=True)) / sum(elements)


def _whole_update(modules: Sequence[ModuleExtraction], seen: Comparison) -> float:
    """Return the squared norm of everything that differs: in the adapter's modules, stored whole, or left out."""
    adapted = sum(map(_update_square, modules))
    carried = sum(module.norm**2 for module in seen.saved)
    return adapted + carried + sum(tensor.norm**2 for tensor in seen.left_out if tensor.norm is not None)


def _update_square(module: ModuleExtraction) -> float:
    return module.update_rms**2 * math.prod(module.shape)


def _approximates(modules: Sequence[ModuleExtraction]) -> bool:
    """Return whether the fits miss more than rounding, even a merge that rounded twice, could have added."""
    ratios = [module.ratio for module in modules if module.ratio is not None]
    lost = statistics.median(module.fit_error for module in modules)
    return bool(ratios) and statistics.median(ratios) > APPROXIMATE and lost > NEGLIGIBLE


def summary_problems(extraction: Extraction) -> list[str]:
    """Return the fields of the summary that do not follow from the modules, in words."""
    claimed = extraction.summary
    again = summarise(
        extraction.modules,
        _as_claimed(extraction),
        adapter=claimed.adapter,
        config=claimed.config,
        residual=claimed.written.get(RESIDUAL),
        exports=claimed.exports,
    )
    wanted = [name for export in extraction.settings.exports for name in EXPORTS.get(export, ())]
    names = [file.name for file in claimed.exports]
    unasked = [f"summary.exports are {', '.join(names) or 'none'}; the settings ask for {', '.join(wanted) or 'none'}"]
    return [*differences(claimed, again), *(unasked if names != wanted else [])]


def _as_claimed(extraction: Extraction) -> Comparison:
    """Return what only the checkpoints could tell, as the summary has it; the layers come from the modules' names."""
    names = [f"{module.name}.weight" for module in extraction.modules]
    summary = extraction.summary
    return Comparison(
        changed=tuple(names),
        equal=summary.tensors_equal,
        base_only=summary.tensors_base_only,
        left_out=summary.left_out,
        layers=layers_of(names, names)[0],
        layers_total=summary.layers_total,
        saved=summary.carried,
        fp8=summary.fp8,
    )


def differences(claimed: ExtractionSummary, again: ExtractionSummary) -> Iterator[str]:
    """Yield the fields of the summary that do not come out again, in words."""
    there, found = claimed.model_dump(mode="json"), again.model_dump(mode="json")
    for field, value in there.items():
        if value != found[field]:
            parts = value.keys() if isinstance(value, dict) and isinstance(found[field], dict) else ()
            deeper = [part for part in parts if value[part] != found[field][part]]
            for part in deeper:
                yield f"summary.{field}.{part} is {shown(value[part])}; it comes out as {shown(found[field][part])}"
            if not deeper:
                yield f"summary.{field} is {shown(value)}; it comes out as {shown(found[field])}"


def _rank_counts(modules: Sequence[ModuleExtraction]) -> tuple[RankCount, ...]:
    by_rank: dict[int, list[str]] = {}
    for module in modules:
        by_rank.setdefault(module.rank, []).append(module.name.rpartition(".")[2])
    return tuple(
        RankCount(rank=rank, modules=len(names), names=tuple(sorted(set(names))))
        for rank, names in sorted(by_rank.items(), reverse=True)
    )


def _spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    return Spread(min=ordered[0], median=statistics.median(ordered), max=ordered[-1])
