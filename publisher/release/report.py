"""`publish report`: everything that is known of a release on one HTML page that needs nothing but itself.

Style, script and charts are in the page; a policy in its head forbids the browser to fetch anything. Whatever a
checkpoint or a manifest brought along is escaped. The same evidence gives the same bytes.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from publisher.records.extraction import ModuleExtraction, spectrum_places
from publisher.records.verification import VerificationSet
from publisher.release.charts import divergences, error_map, exact_shares, floors, layer_sizes, margin, spectrum
from publisher.release.evidence import Evidence, ReleaseEvidence
from publisher.release.filters import FILTERS
from publisher.release.svg import Axis, Chart, Line, Mark, environment, log_axis
from publisher.release.verdict import Verdict, verdict_on

_SPARK = 88, 22  # width and height of the spectrum in a row of the table


@dataclass(frozen=True, slots=True)
class _Row:
    """A module in the table."""

    module: ModuleExtraction
    verdict: Verdict
    floors: float
    margin: float
    spark: Chart | None


@dataclass(frozen=True, slots=True)
class _Set:
    """A test set, and whom it holds against whom."""

    name: str
    figures: VerificationSet


@dataclass(frozen=True, slots=True)
class _Section:
    """One variant on the page; the names of all its modules begin with `prefix`."""

    evidence: Evidence
    charts: tuple[tuple[str, Chart], ...]
    prefix: str
    rows: tuple[_Row, ...]
    verdicts: Counter[str]
    sets: tuple[_Set, ...]


def render_report(found: ReleaseEvidence) -> str:
    """Return the HTML page of a release."""
    made = environment()
    made.filters.update(FILTERS)
    sections = tuple(map(_section, found.adapters))
    return made.get_template("report.html.j2").render(release=found, sections=sections)


def _section(evidence: Evidence) -> _Section:
    rows = tuple(map(_row, evidence.extraction.places))
    sets = [_Set(one.name, one) for one in evidence.sets]
    sets += [_Set(f"{one.name}, FP8 base", one) for one in evidence.fp8_sets]
    levels = Counter[str](row.verdict.level for row in rows)
    return _Section(evidence, _charts(evidence), _prefix(evidence), rows, levels, tuple(sets))


def _prefix(evidence: Evidence) -> str:
    """Return what all names of modules share, up to a point: `model.layers.`."""
    levels = zip(*(module.name.split(".")[:-1] for module in evidence.extraction.places), strict=False)
    return "".join(f"{level[0]}." for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _charts(evidence: Evidence) -> tuple[tuple[str, Chart], ...]:
    """Return the charts of one adapter, each with the name under which the page explains it."""
    made = {
        "errors": error_map(evidence.extraction),
        "spectrum": spectrum(evidence.extraction),
        "sizes": layer_sizes(evidence.extraction),
        "shares": exact_shares(evidence.extraction),
        "divergences": divergences(evidence.verification),
    }
    return tuple((name, chart) for name, chart in made.items() if chart is not None)


def _row(module: ModuleExtraction) -> _Row:
    return _Row(module, verdict_on(module), floors(module), margin(module), _spark(module))


def _spark(module: ModuleExtraction) -> Chart | None:
    """Draw the spectrum in the height of a line, with the noise edge; None where the evidence holds none."""
    if not module.spectrum:
        return None
    width, height = _SPARK
    x = Axis(1, max(module.rank, 2), 2, width - 2)
    y = log_axis([*module.spectrum, module.noise_edge], start=height - 2, end=2)
    points = zip(spectrum_places(module.rank), module.spectrum, strict=False)
    edge = y.at(module.noise_edge)
    marks: tuple[Mark, ...] = (
        Line(((2, edge), (width - 2, edge)), "edge"),
        Line(tuple((x.at(place), y.at(value)) for place, value in points), "curve"),
    )
    described = f"{module.sigma_1:.3g} to {module.sigma_r:.3g}, noise edge {module.noise_edge:.3g}"
    return Chart("Spectrum", described, width, height, marks)
