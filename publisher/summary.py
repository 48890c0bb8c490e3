"""An extraction in a few figures: each follows from the modules' own and from the comparison of the checkpoints.

`extract` writes the summary, `audit` works it out again and demands the same.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from publisher.comparison import Comparison, ranges
from publisher.records import ExtractionSummary, FileDigest, ModuleExtraction, RankCount, Spread


def summarise(
    modules: Sequence[ModuleExtraction], seen: Comparison, *, adapter: FileDigest, config: FileDigest
) -> ExtractionSummary:
    """The summary of these modules, at least one; `adapter` and `config` are the two files written."""
    elements = [math.prod(module.shape) for module in modules]
    exact = sum(module.exact_share * count for module, count in zip(modules, elements, strict=True))
    ratios = [module.ratio for module in modules if module.ratio is not None]
    return ExtractionSummary(
        linears=len(modules),
        layers=ranges(seen.layers),
        layers_total=seen.layers_total,
        rank=max(module.rank for module in modules),
        ranks=_rank_counts(modules),
        tensors_equal=seen.equal,
        tensors_base_only=seen.base_only,
        left_out=seen.left_out,
        parameters=sum(module.alpha * sum(module.shape) for module in modules),
        adapter=adapter,
        config=config,
        relative_error=_spread(module.relative_error for module in modules),
        fit_error=_spread(module.fit_error for module in modules),
        rounding_floor=_spread(module.rounding_floor for module in modules),
        ratio=_spread(ratios) if ratios else None,
        update_rms=_spread(module.update_rms for module in modules),
        exact_share=exact / sum(elements),
        exact_share_modules=_spread(module.exact_share for module in modules),
    )


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
