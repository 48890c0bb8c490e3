"""An extraction in a few figures: each follows from the modules' own and from the comparison of the checkpoints.

`extract` writes the summary; `validate` and `audit` work it out again and demand the same.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from publisher.errors import shown
from publisher.extraction.comparison import Comparison
from publisher.extraction.matrices import Matrix, matrices
from publisher.extraction.preflight import layers_of, ranges
from publisher.records.checkpoint import FileDigest
from publisher.records.extraction import (
    APPROXIMATE,
    PLATEAU,
    Carried,
    CountedArithmetic,
    ExpertSummary,
    ExpertTensor,
    Extraction,
    ExtractionSummary,
    FactoredModule,
    LeftOut,
    ModuleExtraction,
    RankCount,
    RecoverySummary,
    Spread,
    StoredRows,
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
    experts: Sequence[ExpertTensor] = (),
) -> ExtractionSummary:
    """Sum up an extraction.

    Args:
        modules: of the adapter; none where it has experts alone.
        seen: what the comparison of the checkpoints found.
        adapter: digest of adapter_model.safetensors.
        config: digest of adapter_config.json.
        residual: digest of residual.safetensors, where it was asked for.
        exports: digests of the files in other formats.
        experts: the parameters of experts of the adapter.

    Returns:
        The summary; every figure in it follows from `modules`, `experts` and `seen`.
    """
    fits = matrices(modules, experts)
    elements = [fit.elements for fit in fits]
    total = _whole_update(fits, seen)
    adapted = sum(fit.update for fit in fits)
    missing = sum(fit.update * fit.figures.relative_error**2 for fit in fits)
    ratios = [fit.figures.ratio for fit in fits if fit.figures.ratio is not None]
    return ExtractionSummary(
        linears=sum(module.kind == "linear" for module in modules),
        layers=ranges(seen.layers),
        layers_total=seen.layers_total,
        rank=max(fit.figures.rank for fit in fits),
        ranks=_rank_counts([module for module in modules if module.kind == "linear"]),
        tensors_equal=seen.equal,
        tensors_base_only=seen.base_only,
        left_out=tuple(LeftOut.of(tensor, total=total) for tensor in seen.left_out),
        fp8=seen.fp8,
        mxfp4=seen.mxfp4,
        carried=tuple(Carried.of(module, total=total) for module in seen.saved),
        token_rows=tuple(StoredRows.of(rows, total=total) for rows in seen.token_rows),
        factored=tuple(FactoredModule.of(module, total=total) for module in modules if module.kind != "linear"),
        labels=seen.labels,
        parameters=sum(module.parameters for module in modules)
        + sum(module.parameters for module in seen.saved)
        + sum(tensor.parameters for tensor in experts),
        adapter=adapter,
        config=config,
        relative_error=_spread(fit.figures.relative_error for fit in fits),
        fit_error=_spread(fit.figures.fit_error for fit in fits),
        rounding_floor=_spread(fit.figures.rounding_floor for fit in fits),
        ratio=_spread(ratios) if ratios else None,
        update_rms=_spread(fit.figures.update_rms for fit in fits),
        energy=1 - missing / adapted,
        approximation=_approximates(fits),
        exact_share=_weighted_mean([fit.figures.exact_share for fit in fits], elements),
        exact_share_modules=_spread(fit.figures.exact_share for fit in fits),
        recovery=_recovery(fits, residual),
        exports=exports,
        base_quantisation=seen.quantised,
        merge_arithmetic=_arithmetics(fits),
        experts=_experts(experts, total=total) if experts else None,
    )


def _arithmetics(fits: Sequence[Matrix]) -> tuple[CountedArithmetic, ...]:
    """Return the ways in which matrices were merged that were not the usual one, the most frequent first."""
    found = Counter(fit.figures.arithmetic for fit in fits if fit.figures.arithmetic is not None)
    return tuple(CountedArithmetic(**dict(way), modules=number) for way, number in found.most_common())


def _experts(experts: Sequence[ExpertTensor], *, total: float) -> ExpertSummary:
    """Return the experts in a few figures, where `total` is the squared norm of all differences."""
    found = matrices((), experts)
    held = [fit.figures for fit in found if fit.figures.rank]
    return ExpertSummary(
        tensors=len(experts),
        single=sum(tensor.number == 1 for tensor in experts),
        matrices=sum(tensor.number for tensor in experts),
        changed=len(found),
        silent=len(found) - len(held),
        rank=_spread(figures.rank for figures in held),
        relative_error=_spread(figures.relative_error for figures in held),
        share=sum(fit.update for fit in found) / total,
        parameters=sum(tensor.parameters for tensor in experts),
        weights=sum(fit.elements for fit in found),
    )


def _recovery(fits: Sequence[Matrix], residual: FileDigest | None) -> RecoverySummary | None:
    found = [(fit, fit.figures.recovery) for fit in fits if fit.figures.recovery is not None]
    if not found:
        return None
    elements = [fit.elements for fit, _ in found]
    recoveries = [recovery for _, recovery in found]
    return RecoverySummary(
        svd_share=_weighted_mean([recovery.svd_share for recovery in recoveries], elements),
        float32_share=_weighted_mean([recovery.float32_share for recovery in recoveries], elements),
        share=_weighted_mean([recovery.share for recovery in recoveries], elements),
        modules=_spread(recovery.float32_share for recovery in recoveries),
        arithmetic=dict(sorted(Counter(recovery.arithmetic for recovery in recoveries).items())),
        told_apart=sum(recovery.told_apart for recovery in recoveries),
        short=sum(recovery.float32_share < PLATEAU for recovery in recoveries),
        rank_beyond=sum(fit.figures.rank > recovery.rank_shown for fit, recovery in found),
        residual=residual,
        residual_elements=sum(recovery.residual or 0 for recovery in recoveries) if residual else None,
    )


def _weighted_mean(shares: Sequence[float], elements: Sequence[int]) -> float:
    return sum(count * share for count, share in zip(elements, shares, strict=True)) / sum(elements)


def _whole_update(fits: Sequence[Matrix], seen: Comparison) -> float:
    """Return the squared norm of everything that differs: in the adapter's factors, stored whole, or left out."""
    adapted = sum(fit.update for fit in fits)
    carried = sum(module.norm**2 for module in seen.saved if module.norm is not None)
    carried += sum(rows.norm**2 for rows in seen.token_rows)
    return adapted + carried + sum(tensor.norm**2 for tensor in seen.left_out if tensor.norm is not None)


def _approximates(fits: Sequence[Matrix]) -> bool:
    """Return whether the fits miss more than rounding, even a merge that rounded twice, could have added."""
    ratios = [fit.figures.ratio for fit in fits if fit.figures.ratio is not None]
    lost = statistics.median(fit.figures.fit_error for fit in fits)
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
        experts=extraction.experts,
    )
    wanted = [name for export in extraction.settings.exports for name in EXPORTS.get(export, ())]
    names = [file.name for file in claimed.exports]
    unasked = [f"summary.exports are {', '.join(names) or 'none'}; the settings ask for {', '.join(wanted) or 'none'}"]
    return [*differences(claimed, again), *(unasked if names != wanted else [])]


def _as_claimed(extraction: Extraction) -> Comparison:
    """Return what only the checkpoints could tell, as the summary has it; the layers come from the modules' names."""
    names = [f"{module.name}.weight" for module in extraction.modules]
    experts = [tensor.name for tensor in extraction.experts]
    summary = extraction.summary
    return Comparison(
        changed=tuple(names),
        equal=summary.tensors_equal,
        base_only=summary.tensors_base_only,
        left_out=summary.left_out,
        layers=layers_of([*names, *experts], [*names, *experts])[0],
        layers_total=summary.layers_total,
        saved=summary.carried,
        fp8=summary.fp8,
        quantised=summary.base_quantisation,
        mxfp4=summary.mxfp4,
        experts=tuple(experts),
        labels=summary.labels,
        token_rows=summary.token_rows,
    )


def differences(claimed: ExtractionSummary, again: ExtractionSummary) -> Iterator[str]:
    """Yield the fields of the summary that do not come out again, in words."""
    there, found = claimed.model_dump(mode="json"), again.model_dump(mode="json")
    for field in dict.fromkeys([*there, *found]):  # what is left out in the usual case may stand in one of them alone
        value: Any = there.get(field)
        other: Any = found.get(field)
        deeper = list(_different_parts(value, other))
        for part in deeper:
            yield f"summary.{field}.{part} is {shown(value[part])}; it comes out as {shown(other[part])}"
        if value != other and not deeper:
            yield f"summary.{field} is {shown(value)}; it comes out as {shown(other)}"


def _different_parts(value: Any, other: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(other, dict):
        yield from (part for part in value if part in other and value[part] != other[part])


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
