"""The filters with which templates write figures, names and checkpoints on cards and pages (docs/card.md).

The number formats themselves are those of `records.formats`; here they become Markdown, which is not escaped again.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

from publisher.border.escape import Markdown, for_code, for_markdown
from publisher.manifest.schema import Reference
from publisher.records import formats
from publisher.records.checkpoint import Checkpoint
from publisher.records.extraction import ExpertSummary, Extraction, ExtractionSummary, Spread, Tools
from publisher.records.filenames import ERRORS_CHART, RESIDUAL, SPECTRUM_CHART
from publisher.release.charts import card_chart_names
from publisher.release.evidence import VariantEvidence

_CHART_TEXTS = {
    ERRORS_CHART: "each module's relative error, in units of what merge rounding leaves",
    SPECTRUM_CHART: "singular values of three modules and the largest that rounding alone would have",
}


def count(number: int) -> Markdown:
    """Return a whole number with commas between thousands."""
    return Markdown(formats.count(number))


def percent(share: float) -> Markdown:
    """Return a share in per cent with two decimals."""
    return Markdown(formats.percent(share))


def figure(value: float) -> Markdown:
    """Return a figure with three significant digits."""
    return Markdown(formats.figure(value))


def points(share: float) -> Markdown:
    """Return a difference of two shares in percentage points, signed."""
    return Markdown(formats.points(share))


def size(octets: int) -> Markdown:
    """Return a number of bytes in decimal units."""
    return Markdown(formats.size(octets))


def extent(summary: ExtractionSummary) -> str:
    """Return how much of the model is adapted: `186 linears, layers 40–63`, or `248 linears, all 32 layers`.

    Where names have no layer, it is `2 linears`; parameters of experts are counted after the linears.
    """
    total = summary.layers_total
    if not summary.layers:
        return places(summary)
    if total > 1 and summary.layers == f"0-{total - 1}":
        where = f"all {total} layers"
    else:
        where = f"layer{'s' * (not summary.layers.isdigit())} {summary.layers.replace('-', '–')}"
    return f"{places(summary)}, {where}"


def places(summary: ExtractionSummary) -> str:
    """Return what is adapted: `24 linears`, `24 linears and 16 expert tensors`, or with `1 table`."""
    kinds = Counter(module.kind for module in summary.factored)
    single = summary.experts.single if summary.experts else 0
    counts = {
        "linear": summary.linears,
        "table": kinds["embedding"],
        "convolution": kinds["convolution"],
        "expert tensor": summary.experts.tensors - single if summary.experts else 0,
        "other weight": single,
    }
    found = [_counted(number, what) for what, number in counts.items() if number]
    return " and ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)


def linears(number: int) -> Markdown:
    """Return how many linears there are, in words: `1 linear`, `186 linears`."""
    return _counted(number, "linear")


def _counted(number: int, noun: str) -> Markdown:
    return Markdown(f"{count(number)} {noun}{'s' * (number != 1)}")


def checkpoint(reference: Reference, known: Checkpoint) -> Markdown:
    """Return `repo@short`, linked to its tree at the full commit; a local folder has no link."""
    name = for_markdown(f"{reference.where}@{known.revision[:8]}")
    tree = f"https://huggingface.co/{reference.repo}/tree/{reference.revision}"  # both checked by the manifest
    return Markdown(f"[{name}]({tree})") if reference.repo else name


def full_width(extraction: Extraction, rank: int) -> bool:
    """Return whether every module of this rank has no more rows or columns than that."""
    return all(min(module.shape) == rank for module in extraction.modules if module.rank == rank)


def uncertain(extraction: Extraction) -> int:
    """Return how many modules and experts have their smallest value in the noise: their true rank may be higher."""
    experts = (found for tensor in extraction.experts for found in tensor.experts)
    return sum(found.rank_at_least for found in (*extraction.modules, *experts))


def whole_spread(found: Spread) -> Markdown:
    """Return least, median and greatest of whole numbers, as of ranks."""
    return Markdown(f"{found.min:g} / {found.median:g} / {found.max:g}")


def outgrows(experts: ExpertSummary) -> bool:
    """Return whether the factors of experts take more than half of what the weights that they change take."""
    return experts.parameters > experts.weights / 2


def chart_paths(evidence: VariantEvidence) -> tuple[str, ...]:
    """Return where a variant's charts are in the release."""
    folder = f"{evidence.variant.folder}/" if evidence.variant.folder else ""
    return tuple(f"{folder}{name}" for name in card_chart_names(evidence.extraction))


def chart_text(path: str) -> str:
    """Return what a chart shows, for a reader who cannot see it."""
    return _CHART_TEXTS[path.rpartition("/")[2]]


def residual_path(evidence: VariantEvidence) -> str:
    """Return where a variant's residual.safetensors is in the release."""
    return f"{evidence.variant.folder}/{RESIDUAL}" if evidence.variant.folder else RESIDUAL


def made_by(tools: Tools) -> str:
    """Return which version of this tool made an extraction, with which torch."""
    checkout = ""
    if tools.commit:
        changes = ", with uncommitted changes" if tools.dirty else ""
        checkout = f" ({tools.commit[:8]}{changes})"
    return f"publisher {tools.publisher}{checkout}, torch {tools.packages['torch']}"


def grouped(names: Sequence[str]) -> tuple[Markdown, ...]:
    """Return tensor names by what they share: `mtp.*` (15); a name that is alone stands as it is."""
    return tuple(_groups(sorted(names)))


def _groups(names: Sequence[str]) -> Iterator[Markdown]:
    for _, together in groupby(names, key=lambda name: name.partition(".")[0]):
        group = tuple(together)
        if len(group) > 1:
            yield Markdown(f"{for_code(f'{_shared(group)}.*')} ({count(len(group))})")
        else:
            yield for_code(group[0])


def _shared(names: Sequence[str]) -> str:
    levels = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


FILTERS: dict[str, Callable[..., Any]] = {
    form.__name__: form
    for form in (
        count,
        percent,
        figure,
        points,
        size,
        linears,
        extent,
        places,
        whole_spread,
        outgrows,
        checkpoint,
        full_width,
        uncertain,
        grouped,
        chart_paths,
        chart_text,
        residual_path,
        made_by,
    )
}
