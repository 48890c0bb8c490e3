"""The charts of a release, drawn from extraction.json and verification.json alone.

Each takes a record and gives a `Chart`; what a record does not hold is not drawn: evidence without spectra has no
chart of them. docs/report.md says how to read each.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from publisher.records.extraction import Extraction, ModuleExtraction, spectrum_places
from publisher.records.filenames import ERRORS_CHART, SPECTRUM_CHART
from publisher.records.formats import significant_percent
from publisher.records.verification import Verification, VerificationSet
from publisher.release.svg import (
    Axis,
    Chart,
    Dot,
    Label,
    Line,
    Mark,
    Rect,
    Tick,
    bottom_axis,
    left_axis,
    legend,
    log_axis,
)
from publisher.release.svg import svg as drawn

_Key = TypeVar("_Key")

# Lengths in units of the chart, about a pixel each; y grows downwards.
WIDTH = 720  # of every chart
_TOP, _RIGHT = 46, 16  # room for the title, and at the right
_LETTER = 6.4  # mean width of a letter of a label
_TITLE_BASE, _TITLE_LEFT, _TITLE_LETTER = 20, 4, 7  # base line and left end of the title, mean width of its letters
_TITLE_GAP = 40  # between the title and what is added at its right
_PLOT_LEFT, _PLOT_BOTTOM = 66, 236  # of a plot with numbers on its left
_NAMES_MOST = 260  # the longest names of rows take so much at most
_NAMES_MARGIN, _NAME_GAP = 24, 8  # beside the names of rows, and between a name and its row
_AXIS_NAME_X = 16  # of an axis' name that reads upwards
_LEGEND_BELOW, _END_BELOW = 68, 80  # from the plot's bottom to the legend's base line, and to the chart's end
_COLUMN_MOST = 40  # width of a layer's column
_LAYER_ROOM = 26  # for the number of a layer below its column
_STACKS_BELOW = (33, 47)  # from the axis to the names of stacks, which stand on two lines in turns
_STACK_TICK = 22  # length of the line between two stacks
_ROW, _LOW_ROW, _MANY_ROWS = 20, 15, 9  # height of a row of the map, of one among more than that many
_BASE_LINE = 4  # from the middle of a row down to the base line of its label
_HEADROOM = 1.06  # how much longer than its largest value an axis is

_BLOCKS = 6  # colours for the parts of a layer; what is left shares the last
_LEVELS = (  # error in units of the floor: up to what, the tone, in words
    (0.5, "m0", "below 0.5"),
    (0.8, "m1", "0.5–0.8"),
    (1.2, "m2", "0.8–1.2"),
    (1.5, "m3", "1.2–1.5"),
    (3.0, "m4", "1.5–3"),
    (math.inf, "m5", "above 3"),
)
_CHOSEN = ("closest to the noise", "in the middle", "farthest from the noise")


# --- which module is where ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Column:
    """A layer of a stack of layers, as the text model's or the vision tower's; no layer: a module outside of any."""

    stack: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a module is: its column, its name within the layer (`mlp.up_proj`), and the part of it that comes first."""

    column: Column
    part: str

    @property
    def block(self) -> str:
        """The part of the layer that the module belongs to: `mlp` of `mlp.up_proj`."""
        return self.part.rpartition(".")[0].rpartition(".")[2] or self.part.rpartition(".")[2]


def spot_of(name: str) -> Spot:
    """Return where a module is, by the first number in its name; `comparison.layers_of` does the same."""
    if match := re.match(r"(?:(.*?)\.)?(\d+)\.(.+)", name):
        return Spot(Column(match[1] or "", int(match[2])), match[3])
    return Spot(Column("", None), name)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Places of columns side by side, from `left` to the chart's right edge."""

    known: tuple[Column, ...]
    left: float

    @classmethod
    def of(cls, modules: Sequence[ModuleExtraction], *, left: float) -> "_Columns":
        """Return the columns of these modules, the layers of a stack together."""
        columns = {spot_of(module.name).column for module in modules}
        return cls(tuple(sorted(columns, key=lambda c: (c.layer is None, c.stack, c.layer or 0))), left)

    @property
    def right(self) -> float:
        return WIDTH - _RIGHT

    @property
    def width(self) -> float:
        """The width of one column."""
        return min((self.right - self.left) / len(self.known), _COLUMN_MOST)

    @property
    def end(self) -> float:
        """Where the last column ends."""
        return self.left + self.width * len(self.known)

    def start(self, column: Column) -> float:
        return self.left + self.width * self.known.index(column)

    def centre(self, column: Column) -> float:
        return self.start(column) + self.width / 2

    def axis(self, y: float) -> list[Mark]:
        """Yield the labels of the layers, as many as have room, and of the stacks where there are several."""
        stride = max(1, math.ceil(_LAYER_ROOM / self.width))
        shown = [column for place, column in enumerate(self.known) if place % stride == 0]
        labels = (Tick(self.centre(c), "–" if c.layer is None else str(c.layer)) for c in shown)
        return [*bottom_axis(tuple(labels), y=y), *self._stacks(y)]

    def _stacks(self, y: float) -> Iterator[Mark]:
        """Yield what the columns are; names of several stacks stand on two lines in turns, so that none meet."""
        stacks = [(stack, list(group)) for stack, group in groupby(self.known, key=lambda column: column.stack)]
        for place, (stack, group) in enumerate(stacks):
            above = stack.rpartition(".")[0].rpartition(".")[2] or stack
            text = f"layer of {above}" if stack else "elsewhere"
            if len(stacks) == 1:
                text = "layer"
            middle = (self.start(group[0]) + self.start(group[-1]) + self.width) / 2
            middle = min(middle, WIDTH - _LETTER * len(text) / 2)
            yield Label(middle, y + _STACKS_BELOW[place % 2], text, "middle", "small")
            if place:
                yield Line(((self.start(group[0]), y), (self.start(group[0]), y + _STACK_TICK)), "frame")


def _title(text: str, more: str = "") -> list[Mark]:
    """Return the chart's title and, at its right, what may be added in small letters."""
    room = WIDTH - _RIGHT - _TITLE_GAP - _TITLE_LETTER * len(text)
    added = [Label(WIDTH - _RIGHT, _TITLE_BASE, _cut(more, room), "end", "small")] if more else []
    return [Label(_TITLE_LEFT, _TITLE_BASE, text, "start", "strong"), *added]


def _names_width(names: Iterable[str], *, most: float) -> float:
    """Return how much room the names of rows take on the left."""
    return min(_NAMES_MARGIN + _LETTER * max(map(len, names)), most)


def _percent(share: float) -> str:
    return significant_percent(share, digits=3)


# --- errors against their floor -----------------------------------------------------------------------------


def error_map(extraction: Extraction) -> Chart:
    """Draw each module's relative error over what merge rounding leaves: layers across, modules of a layer down."""
    modules = extraction.places
    rows = list(dict.fromkeys(spot_of(m.name).part for m in sorted(modules, key=lambda m: spot_of(m.name).block)))
    columns = _Columns.of(modules, left=_names_width(rows, most=_NAMES_MOST))
    height = _LOW_ROW if len(rows) > _MANY_ROWS else _ROW
    bottom = _TOP + height * len(rows)
    marks = [*_title("Relative error of each module, in units of what merge rounding leaves", extraction.label)]
    for row, part in enumerate(rows):
        marks.append(Label(columns.left - _NAME_GAP, _TOP + height * (row + 0.5) + _BASE_LINE, part, "end"))
    marks.append(Rect(columns.left, _TOP, columns.end - columns.left, bottom - _TOP, "empty"))
    for module in modules:
        spot = spot_of(module.name)
        y = _TOP + height * rows.index(spot.part)
        gap = min(1, columns.width / 6)
        x = columns.start(spot.column) + gap / 2
        marks.append(Rect(x, y + 0.5, columns.width - gap, height - 1, _level(module), _error_tip(module)))
    marks += columns.axis(bottom)
    marks += legend([(tone, label) for _, tone, label in _LEVELS], x=columns.left, y=bottom + _LEGEND_BELOW)
    counts = (f"{sum(floors(m) <= limit for m in modules)} of {len(modules)} at most {limit:g}" for limit in (1.2, 3.0))
    described = f"A map, layers across and modules down. Modules by error over floor: {', '.join(counts)}."
    return Chart("Relative error against its floor", described, WIDTH, bottom + _END_BELOW, tuple(marks))


def _level(module: ModuleExtraction) -> str:
    """Return the tone of a module's error over its floor."""
    return next((tone for limit, tone, _ in _LEVELS if floors(module) <= limit), _LEVELS[-1][1])


def floors(module: ModuleExtraction) -> float:
    """Return the relative error in units of the rounding floor; infinity where that floor is zero."""
    return module.relative_error / module.rounding_floor if module.rounding_floor else math.inf


def _error_tip(module: ModuleExtraction) -> str:
    error, floor = _percent(module.relative_error), _percent(module.rounding_floor)
    return f"{module.name}\nrelative error {error}, floor {floor}: {floors(module):.3g}"


# --- spectra ------------------------------------------------------------------------------------------------

_PANELS_LEFT, _PANELS_BOTTOM, _PANEL_GAP = 56, 250, 22
_PANEL_HEADING = 40  # height of the two lines above a panel
_PANEL_LINES = (4, 22)  # base lines of those two, from the top
_RANK_BELOW = 32  # from the axis to the words below it
_NO_STACKS = 10  # what this chart is lower, as no names of stacks stand below it
_VALUE_RADIUS, _LEFT_OUT_RADIUS = 2.6, 3.2  # of the dots


def spectrum(extraction: Extraction) -> Chart | None:
    """Draw the singular values of three modules, with noise edge and rank.

    The answer is None where the evidence holds no spectra.
    """
    chosen = chosen_modules(extraction)
    if not chosen:
        return None
    values = [v for m in chosen for v in (*m.spectrum, m.noise_edge, m.sigma_next or m.noise_edge)]
    left, bottom = _PANELS_LEFT, _PANELS_BOTTOM
    width = (WIDTH - _RIGHT - left - _PANEL_GAP * (len(chosen) - 1)) / len(chosen)
    y = log_axis(values, start=bottom, end=_TOP + _PANEL_HEADING)
    marks = [*_title("Singular values of the update, and the largest that rounding alone would have", extraction.label)]
    headings = _CHOSEN[-len(chosen) :]
    for place, module in enumerate(chosen):
        start = left + place * (width + _PANEL_GAP)
        x = Axis(0, module.rank * 1.08 + 1, start, start + width)
        marks += _panel(module, x, y=y, heading=headings[place])
        if place == 0:
            marks += left_axis(y.ticks(), x=start, right=start + width)
        else:
            marks += [Line(((start, tick.at), (start + width, tick.at))) for tick in y.ticks()]
    marks.append(Label(_AXIS_NAME_X, (bottom + y.end) / 2, "singular value", "middle", "small", turned=True))
    entries = [("kept", "kept in the adapter"), ("ring", "first one left out"), ("noise", "what rounding alone gives")]
    marks += legend(entries, x=left, y=bottom + _LEGEND_BELOW - _NO_STACKS)
    edges = "; ".join(
        f"{m.name}: {m.sigma_1:.3g} to {m.sigma_r:.3g} kept at rank {m.rank}, noise edge {m.noise_edge:.3g}"
        for m in chosen
    )
    return Chart("Spectrum and noise edge", f"{edges}.", WIDTH, bottom + _END_BELOW - _NO_STACKS, tuple(marks))


def chosen_modules(extraction: Extraction) -> tuple[ModuleExtraction, ...]:
    """Return the modules closest to the noise, in the middle and farthest from it, of those that leave something out.

    Their distance is the smallest value kept over the noise edge. Where none leaves anything out, all are candidates.
    """
    known = [module for module in extraction.places if module.spectrum]
    known = [module for module in known if module.sigma_next is not None] or known
    ordered = sorted(known, key=lambda module: (margin(module), module.name))
    places = sorted({0, len(ordered) // 2, len(ordered) - 1}) if ordered else []
    return tuple(ordered[place] for place in places)


def margin(module: ModuleExtraction) -> float:
    """Return the smallest value kept in units of the noise edge; infinity where that edge is zero."""
    return module.sigma_r / module.noise_edge if module.noise_edge else math.inf


def _panel(module: ModuleExtraction, x: Axis, *, y: Axis, heading: str) -> Iterator[Mark]:
    """Yield the marks of one module's spectrum."""
    edge, spot = y.at(module.noise_edge), spot_of(module.name)
    where = "" if spot.column.layer is None else f"layer {spot.column.layer}: "
    yield Label(x.start, _TOP + _PANEL_LINES[0], heading, "start", "small")
    yield Label(x.start, _TOP + _PANEL_LINES[1], _cut(f"{where}{spot.part}", x.end - x.start), "start")
    yield Rect(x.start, edge, x.end - x.start, y.start - edge, "noise", f"noise edge {module.noise_edge:.3g}")
    yield Line(((x.start, edge), (x.end, edge)), "edge")
    points = list(zip(spectrum_places(module.rank), module.spectrum, strict=False))
    yield Line(tuple((x.at(place), y.at(value)) for place, value in points), "curve")
    for place, value in points:
        yield Dot(
            x.at(place), y.at(value), "kept", f"{module.name}\nsingular value {place}: {value:.4g}", _VALUE_RADIUS
        )
    if module.sigma_next is not None:
        tip = f"{module.name}\nfirst left out: {module.sigma_next:.4g}"
        yield Dot(x.at(module.rank + 1), y.at(module.sigma_next), "ring", tip, _LEFT_OUT_RADIUS)
    yield Line(((x.start, y.end), (x.start, y.start), (x.end, y.start)), "frame")
    yield from bottom_axis([Tick(x.at(1), "1"), Tick(x.at(module.rank), str(module.rank))][: module.rank], y=y.start)
    yield Label((x.start + x.end) / 2, y.start + _RANK_BELOW, f"rank {module.rank}", "middle", "small")


def _cut(text: str, width: float) -> str:
    letters = int(width / _LETTER)
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


# --- size of the update -------------------------------------------------------------------------------------


def layer_sizes(extraction: Extraction) -> Chart:
    """Draw the update's squared Frobenius norm by layer, and which part of the layer it is in."""
    modules, left, bottom = extraction.places, _PLOT_LEFT, _PLOT_BOTTOM
    tones = _tones(modules, _square)
    columns = _Columns.of(modules, left=left)
    stacks = _by(modules, lambda module: spot_of(module.name).column)
    y = Axis(0, max(sum(map(_square, group)) for group in stacks.values()) * _HEADROOM or 1, bottom, _TOP)
    marks = [*_title("Size of the update in each layer, by part"), *left_axis(y.ticks(), x=left, right=columns.end)]
    for column, group in stacks.items():
        below = 0.0
        parts = _by(group, lambda module: spot_of(module.name).block)
        for block in sorted(parts, key=list(tones).index):
            size = sum(map(_square, parts[block]))
            top, gap = y.at(below + size), min(2, columns.width / 5)
            tip = f"{_column_name(column)}, {block}\nsquared norm {size:.3g}"
            at = columns.start(column) + gap / 2
            marks.append(Rect(at, top, columns.width - gap, y.at(below) - top, tones[block], tip))
            below += size
    marks.append(Line(((left, bottom), (columns.end, bottom)), "frame"))
    marks += [
        *columns.axis(bottom),
        Label(_AXIS_NAME_X, (bottom + _TOP) / 2, "squared norm", "middle", "small", turned=True),
    ]
    marks += legend(_named(tones), x=left, y=bottom + _LEGEND_BELOW)
    described = (
        f"Bars by layer, {extraction.summary.layers or 'no'} layers; the tallest holds {y.high / _HEADROOM:.3g}."
    )
    return Chart("Size of the update per layer", described, WIDTH, bottom + _END_BELOW, tuple(marks))


def _square(module: ModuleExtraction) -> float:
    return module.update_rms**2 * math.prod(module.shape)


def _column_name(column: Column) -> str:
    return "outside of the layers" if column.layer is None else f"{column.stack} {column.layer}".strip()


def _by(
    modules: Iterable[ModuleExtraction], key: Callable[[ModuleExtraction], _Key]
) -> dict[_Key, list[ModuleExtraction]]:
    groups: dict[_Key, list[ModuleExtraction]] = {}
    for module in modules:
        groups.setdefault(key(module), []).append(module)
    return groups


def _tones(modules: Sequence[ModuleExtraction], weight: Callable[[ModuleExtraction], float]) -> dict[str, str]:
    """Return a colour for each part of a layer, in the order of their names; of many, the lightest share one."""
    groups = _by(modules, lambda module: spot_of(module.name).block)
    ordered = sorted(groups, key=lambda block: (-sum(map(weight, groups[block])), block))
    named = [*sorted(ordered[:_BLOCKS]), *ordered[_BLOCKS:]]
    return {block: f"b{min(place, _BLOCKS - 1)}" for place, block in enumerate(named)}


def _named(tones: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the entries of the legend; parts of a layer that share a colour have one entry."""
    groups: dict[str, list[str]] = {}
    for block, tone in tones.items():
        groups.setdefault(tone, []).append(block)
    return [(tone, blocks[0] if len(blocks) == 1 else "others") for tone, blocks in groups.items()]


# --- bit for bit --------------------------------------------------------------------------------------------

_SHARE_ROOM, _LEAST_ROOM = 0.08, 2e-4  # of the axis beyond its values: of their range, and at least
_SHARE_RADIUS = 2.8  # of the dots


def exact_shares(extraction: Extraction) -> Chart:
    """Draw which share of each module's weights a merge gives exactly as released, layer by layer."""
    modules, left, bottom = extraction.places, _PLOT_LEFT, _PLOT_BOTTOM
    tones = _tones(modules, _square)
    columns = _Columns.of(modules, left=left)
    shares = [module.exact_share for module in modules]
    room = max(_SHARE_ROOM * (max(shares) - min(shares)), _LEAST_ROOM)
    y = Axis(max(min(shares) - room, 0), min(max(shares) + room, 1), bottom, _TOP)
    overall_text = f"{_exact(extraction.summary.exact_share)} over all weights"
    marks = _title("Weights that a merge restores bit for bit, module by module", f"dotted: {overall_text}")
    marks += left_axis(y.ticks(percent=True), x=left, right=columns.end)
    overall = y.at(extraction.summary.exact_share)
    marks.append(Line(((left, overall), (columns.end, overall)), "whole"))
    for module in modules:
        spot = spot_of(module.name)
        tip = f"{module.name}\n{_exact(module.exact_share)} bit for bit"
        marks.append(Dot(columns.centre(spot.column), y.at(module.exact_share), tones[spot.block], tip, _SHARE_RADIUS))
    marks.append(Line(((left, _TOP), (left, bottom), (columns.end, bottom)), "frame"))
    marks += columns.axis(bottom)
    marks += legend(_named(tones), x=left, y=bottom + _LEGEND_BELOW)
    described = f"Dots by layer, from {_exact(min(shares))} to {_exact(max(shares))}; {overall_text}."
    return Chart("Share restored bit for bit", described, WIDTH, bottom + _END_BELOW, tuple(marks))


def _exact(share: float) -> str:
    return significant_percent(share, digits=4)


# --- verification -------------------------------------------------------------------------------------------

_QUESTIONS_MOST, _QUESTIONS_ROW = 270, 26  # the longest names of types of question, and the height of a row
_CHANGED_ROOM, _CHANGED_GAP, _CHANGED_HEADING = 150, 16, 20  # for the answers changed, at the right
_ZERO_X, _ZERO_ROOM = 14, 40  # where exactly zero is, and where the logarithmic axis begins
_DIVERGENCE_RADIUS = 4
_POINTS = (("b0", "mean"), ("b1", "99th percentile"), ("greatest", "greatest"))  # tone and name of each dot


@dataclass(frozen=True, slots=True)
class _Row:
    """One type of question of a test set."""

    name: str
    mean: float
    ninety_ninth: float
    greatest: float
    changed: str

    @property
    def divergences(self) -> tuple[float, float, float]:
        """The three divergences, in the order of `_POINTS`."""
        return self.mean, self.ninety_ninth, self.greatest


def divergences(verification: Verification | None) -> Chart | None:
    """Draw how far answers lie apart, by test set and type of question: mean, 99th percentile and greatest KL.

    The answer is None where nothing was verified.
    """
    rows = list(_rows(verification)) if verification else []
    if not rows:
        return None
    left, right = _names_width((row.name for row in rows), most=_QUESTIONS_MOST), WIDTH - _CHANGED_ROOM
    first = _TOP + _CHANGED_HEADING
    bottom = first + _QUESTIONS_ROW * len(rows)
    x = log_axis([kl for row in rows for kl in row.divergences], start=left + _ZERO_ROOM, end=right)
    zero = left + _ZERO_X
    marks = [*_title("Divergence between the two models' answers, by type of question")]
    marks += bottom_axis([Tick(zero, "0"), *x.ticks()], y=bottom, top=_TOP + 8)
    for place, row in enumerate(rows):
        y = first + _QUESTIONS_ROW * (place + 0.5)
        marks.append(Label(left - _NAME_GAP, y + _BASE_LINE, _cut(row.name, left - 2 * _NAME_GAP), "end"))
        marks.append(Label(right + _CHANGED_GAP, y + _BASE_LINE, row.changed, tone="small"))
        points = [x.at(kl) if kl > 0 else zero for kl in row.divergences]
        marks.append(Line(((points[0], y), (points[-1], y)), "span"))
        for at, kl, (tone, what) in zip(points, row.divergences, _POINTS, strict=True):
            marks.append(Dot(at, y, tone, f"{row.name}\n{what} KL {kl:.3g} nats", _DIVERGENCE_RADIUS))
    marks.append(Label((left + right) / 2, bottom + 34, "KL(reference ‖ candidate) in nats", "middle", "small"))
    marks.append(Label(right + _CHANGED_GAP, _TOP + 12, "answers changed", tone="small"))
    marks += legend(_POINTS, x=left, y=bottom + _LEGEND_BELOW)
    described = "; ".join(
        f"{row.name}: mean {row.mean:.3g}, greatest {row.greatest:.3g}, {row.changed}" for row in rows
    )
    return Chart("Verification", f"{described}.", WIDTH, bottom + _END_BELOW, tuple(marks))


def _rows(verification: Verification) -> Iterator[_Row]:
    yield from _rows_of(verification.sets, "")
    yield from _rows_of(verification.fp8.sets if verification.fp8 else (), ", FP8 base")


def _rows_of(sets: Sequence[VerificationSet], suffix: str) -> Iterator[_Row]:
    for one in sets:
        for kind in one.kinds:
            yield _Row(
                name=f"{one.name}{suffix}: {kind.kind}",
                mean=kind.mean_kl,
                ninety_ninth=kind.p99_kl,
                greatest=kind.max_kl,
                changed=f"{kind.answers_changed:,} of {kind.questions:,}",
            )


# --- the card's ---------------------------------------------------------------------------------------------


def card_chart_names(extraction: Extraction) -> tuple[str, ...]:
    """Return the names of the charts beside a variant's card: none of spectra where the evidence holds none."""
    return (ERRORS_CHART, SPECTRUM_CHART) if chosen_modules(extraction) else (ERRORS_CHART,)


def card_charts(extraction: Extraction) -> dict[str, str]:
    """Return the SVG files that go beside a variant's card, by name."""
    made = {ERRORS_CHART: error_map(extraction), SPECTRUM_CHART: spectrum(extraction)}
    return {name: drawn(chart) for name, chart in made.items() if chart is not None}
