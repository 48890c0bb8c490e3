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
WIDTH = 720
_TOP, _RIGHT = 46, 16  # room for the title, and at the right
_LETTER = 6.4
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
        """`mlp` of `mlp.up_proj`."""
        return self.part.rpartition(".")[0].rpartition(".")[2] or self.part.rpartition(".")[2]


def spot_of(name: str) -> Spot:
    """By the first number in the name, as `comparison.layers_of` has it."""
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
        """All columns of these modules, the layers of a stack together."""
        columns = {spot_of(module.name).column for module in modules}
        return cls(tuple(sorted(columns, key=lambda c: (c.layer is None, c.stack, c.layer or 0))), left)

    @property
    def right(self) -> float:
        return WIDTH - _RIGHT

    @property
    def width(self) -> float:
        """Of one column: at most 40."""
        return min((self.right - self.left) / len(self.known), 40)

    @property
    def end(self) -> float:
        """Where the last column ends."""
        return self.left + self.width * len(self.known)

    def start(self, column: Column) -> float:
        return self.left + self.width * self.known.index(column)

    def centre(self, column: Column) -> float:
        return self.start(column) + self.width / 2

    def axis(self, y: float) -> list[Mark]:
        """Layers, as many as have room, and the stacks where there are several."""
        stride = max(1, math.ceil(26 / self.width))
        shown = [column for place, column in enumerate(self.known) if place % stride == 0]
        labels = (Tick(self.centre(c), "–" if c.layer is None else str(c.layer)) for c in shown)
        return [*bottom_axis(tuple(labels), y=y), *self._stacks(y)]

    def _stacks(self, y: float) -> Iterator[Mark]:
        """What the columns are; names of several stacks stand on two lines in turns: none runs into the next."""
        stacks = [(stack, list(group)) for stack, group in groupby(self.known, key=lambda column: column.stack)]
        for place, (stack, group) in enumerate(stacks):
            above = stack.rpartition(".")[0].rpartition(".")[2] or stack
            text = "layer" if len(stacks) == 1 else f"layer of {above}" if stack else "elsewhere"
            middle = (self.start(group[0]) + self.start(group[-1]) + self.width) / 2
            middle = min(middle, WIDTH - _LETTER * len(text) / 2)
            yield Label(middle, y + (33 if place % 2 == 0 else 47), text, "middle", "small")
            if place:
                yield Line(((self.start(group[0]), y), (self.start(group[0]), y + 22)), "frame")


def _title(text: str, more: str = "") -> list[Mark]:
    """The chart's title, and at its right what may be added in small."""
    room = WIDTH - _RIGHT - 40 - 7 * len(text)
    added = [Label(WIDTH - _RIGHT, 20, _cut(more, room), "end", "small")] if more else []
    return [Label(4, 20, text, "start", "strong"), *added]


def _percent(share: float) -> str:
    return significant_percent(share, digits=3)


# --- errors against their floor -----------------------------------------------------------------------------


def error_map(extraction: Extraction) -> Chart:
    """Each module's relative error in units of what merge rounding leaves; layers across, modules of a layer down."""
    modules = extraction.modules
    rows = list(dict.fromkeys(spot_of(m.name).part for m in sorted(modules, key=lambda m: spot_of(m.name).block)))
    columns = _Columns.of(modules, left=min(24 + _LETTER * max(map(len, rows)), 260))
    height = 15 if len(rows) > len("self_attn") else 20
    bottom = _TOP + height * len(rows)
    marks = [*_title("Relative error of each module, in units of what merge rounding leaves", extraction.label)]
    marks += [Label(columns.left - 8, _TOP + height * (row + 0.5) + 4, part, "end") for row, part in enumerate(rows)]
    marks.append(Rect(columns.left, _TOP, columns.end - columns.left, bottom - _TOP, "empty"))
    for module in modules:
        spot = spot_of(module.name)
        y = _TOP + height * rows.index(spot.part)
        tone = next((tone for limit, tone, _ in _LEVELS if floors(module) <= limit), _LEVELS[-1][1])
        gap = min(1, columns.width / 6)
        at = columns.start(spot.column) + gap / 2
        marks.append(Rect(at, y + 0.5, columns.width - gap, height - 1, tone, _error_tip(module)))
    marks += columns.axis(bottom)
    marks += legend([(tone, label) for _, tone, label in _LEVELS], x=columns.left, y=bottom + 68)
    counts = (f"{sum(floors(m) <= limit for m in modules)} of {len(modules)} at most {limit:g}" for limit in (1.2, 3.0))
    described = f"A map, layers across and modules down. Modules by error over floor: {', '.join(counts)}."
    return Chart("Relative error against its floor", described, WIDTH, bottom + 80, tuple(marks))


def floors(module: ModuleExtraction) -> float:
    """The relative error in units of the rounding floor."""
    return module.relative_error / module.rounding_floor if module.rounding_floor else math.inf


def _error_tip(module: ModuleExtraction) -> str:
    error, floor = _percent(module.relative_error), _percent(module.rounding_floor)
    return f"{module.name}\nrelative error {error}, floor {floor}: {floors(module):.3g}"


# --- spectra ------------------------------------------------------------------------------------------------


def spectrum(extraction: Extraction) -> Chart | None:
    """Singular values of three modules, with noise edge and rank; None where the evidence holds no spectra."""
    chosen = chosen_modules(extraction)
    if not chosen:
        return None
    values = [v for m in chosen for v in (*m.spectrum, m.noise_edge, m.sigma_next or m.noise_edge)]
    gap, left, bottom = 22, 56, 250
    width = (WIDTH - _RIGHT - left - gap * (len(chosen) - 1)) / len(chosen)
    y = log_axis(values, start=bottom, end=_TOP + 40)
    marks = [*_title("Singular values of the update, and the largest that rounding alone would have", extraction.label)]
    for place, module in enumerate(chosen):
        start = left + place * (width + gap)
        marks += _panel(
            module, Axis(0, module.rank * 1.08 + 1, start, start + width), y=y, heading=_CHOSEN[-len(chosen) :][place]
        )
        marks += left_axis(y.ticks(), x=start, right=start + width) if place == 0 else _lines(y, start, start + width)
    marks.append(Label(16, (bottom + y.end) / 2, "singular value", "middle", "small", turned=True))
    entries = [("kept", "kept in the adapter"), ("ring", "first one left out"), ("noise", "what rounding alone gives")]
    marks += legend(entries, x=left, y=bottom + 58)
    edges = "; ".join(
        f"{m.name}: {m.sigma_1:.3g} to {m.sigma_r:.3g} kept at rank {m.rank}, noise edge {m.noise_edge:.3g}"
        for m in chosen
    )
    return Chart("Spectrum and noise edge", f"{edges}.", WIDTH, bottom + 70, tuple(marks))


def _lines(y: Axis, left: float, right: float) -> list[Mark]:
    return [Line(((left, tick.at), (right, tick.at))) for tick in y.ticks()]


def chosen_modules(extraction: Extraction) -> tuple[ModuleExtraction, ...]:
    """Closest to the noise, in the middle, farthest from it, by the smallest value kept over the noise edge.

    Of those that leave something out, where there are any.
    """
    known = [module for module in extraction.modules if module.spectrum]
    known = [module for module in known if module.sigma_next is not None] or known
    ordered = sorted(known, key=lambda module: (margin(module), module.name))
    places = sorted({0, len(ordered) // 2, len(ordered) - 1}) if ordered else []
    return tuple(ordered[place] for place in places)


def margin(module: ModuleExtraction) -> float:
    """The smallest value kept, in units of the noise edge."""
    return module.sigma_r / module.noise_edge if module.noise_edge else math.inf


def _panel(module: ModuleExtraction, x: Axis, *, y: Axis, heading: str) -> Iterator[Mark]:
    """One module's spectrum."""
    edge, spot = y.at(module.noise_edge), spot_of(module.name)
    where = "" if spot.column.layer is None else f"layer {spot.column.layer}: "
    yield Label(x.start, _TOP + 4, heading, "start", "small")
    yield Label(x.start, _TOP + 22, _cut(f"{where}{spot.part}", x.end - x.start), "start")
    yield Rect(x.start, edge, x.end - x.start, y.start - edge, "noise", f"noise edge {module.noise_edge:.3g}")
    yield Line(((x.start, edge), (x.end, edge)), "edge")
    points = list(zip(spectrum_places(module.rank), module.spectrum, strict=False))
    yield Line(tuple((x.at(place), y.at(value)) for place, value in points), "curve")
    for place, value in points:
        yield Dot(x.at(place), y.at(value), "kept", f"{module.name}\nsingular value {place}: {value:.4g}", 2.6)
    if module.sigma_next is not None:
        tip = f"{module.name}\nfirst left out: {module.sigma_next:.4g}"
        yield Dot(x.at(module.rank + 1), y.at(module.sigma_next), "ring", tip, 3.2)
    yield Line(((x.start, y.end), (x.start, y.start), (x.end, y.start)), "frame")
    yield from bottom_axis([Tick(x.at(1), "1"), Tick(x.at(module.rank), str(module.rank))][: module.rank], y=y.start)
    yield Label((x.start + x.end) / 2, y.start + 32, f"rank {module.rank}", "middle", "small")


def _cut(text: str, width: float) -> str:
    letters = int(width / _LETTER)
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


# --- size of the update -------------------------------------------------------------------------------------


def layer_sizes(extraction: Extraction) -> Chart:
    """The update's squared norm by layer, and which part of the layer it is in."""
    modules, left, bottom = extraction.modules, 66, 236
    tones = _tones(modules, _square)
    columns = _Columns.of(modules, left=left)
    stacks = _by(modules, lambda module: spot_of(module.name).column)
    y = Axis(0, max(sum(map(_square, group)) for group in stacks.values()) * 1.06 or 1, bottom, _TOP)
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
    marks += [*columns.axis(bottom), Label(16, (bottom + _TOP) / 2, "squared norm", "middle", "small", turned=True)]
    marks += legend(_named(tones), x=left, y=bottom + 68)
    described = f"Bars by layer, {extraction.summary.layers or 'no'} layers; the tallest holds {y.high / 1.06:.3g}."
    return Chart("Size of the update per layer", described, WIDTH, bottom + 80, tuple(marks))


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
    """A colour for each part of a layer, in the order of their names; where there are many, the lightest share one."""
    groups = _by(modules, lambda module: spot_of(module.name).block)
    ordered = sorted(groups, key=lambda block: (-sum(map(weight, groups[block])), block))
    named = [*sorted(ordered[:_BLOCKS]), *ordered[_BLOCKS:]]
    return {block: f"b{min(place, _BLOCKS - 1)}" for place, block in enumerate(named)}


def _named(tones: Mapping[str, str]) -> list[tuple[str, str]]:
    """The legend; blocks that share a colour are told together."""
    groups: dict[str, list[str]] = {}
    for block, tone in tones.items():
        groups.setdefault(tone, []).append(block)
    return [(tone, blocks[0] if len(blocks) == 1 else "others") for tone, blocks in groups.items()]


# --- bit for bit --------------------------------------------------------------------------------------------


def exact_shares(extraction: Extraction) -> Chart:
    """Which share of each module's weights a merge gives exactly as released, layer by layer."""
    modules, left, bottom = extraction.modules, 66, 236
    tones, columns = _tones(modules, _square), _Columns.of(modules, left=left)
    shares = [module.exact_share for module in modules]
    room = max(0.08 * (max(shares) - min(shares)), 2e-4)
    y = Axis(max(min(shares) - room, 0), min(max(shares) + room, 1), bottom, _TOP)
    told = f"{_exact(extraction.summary.exact_share)} over all weights"
    marks = _title("Weights that a merge restores bit for bit, module by module", f"dotted: {told}")
    marks += left_axis(y.ticks(percent=True), x=left, right=columns.end)
    overall = y.at(extraction.summary.exact_share)
    marks.append(Line(((left, overall), (columns.end, overall)), "whole"))
    for module in modules:
        spot = spot_of(module.name)
        tip = f"{module.name}\n{_exact(module.exact_share)} bit for bit"
        marks.append(Dot(columns.centre(spot.column), y.at(module.exact_share), tones[spot.block], tip, 2.8))
    marks.append(Line(((left, _TOP), (left, bottom), (columns.end, bottom)), "frame"))
    marks += columns.axis(bottom)
    marks += legend(_named(tones), x=left, y=bottom + 68)
    described = f"Dots by layer, from {_exact(min(shares))} to {_exact(max(shares))}; {told}."
    return Chart("Share restored bit for bit", described, WIDTH, bottom + 80, tuple(marks))


def _exact(share: float) -> str:
    return significant_percent(share, digits=4)


# --- verification -------------------------------------------------------------------------------------------


def divergences(verification: Verification | None) -> Chart | None:
    """How far answers lie apart, by test set and type of question: mean, 99th percentile and greatest KL."""
    rows = list(_rows(verification)) if verification else []
    if not rows:
        return None
    left, right, height = min(24 + _LETTER * max(len(name) for name, *_ in rows), 270), WIDTH - 150, 26
    bottom = _TOP + 20 + height * len(rows)
    x = log_axis([kl for _, *kls, _ in rows for kl in kls], start=left + 40, end=right)
    marks = [*_title("Divergence between the two models' answers, by type of question")]
    marks += bottom_axis([Tick(left + 14, "0"), *x.ticks()], y=bottom, top=_TOP + 8)
    for row, (name, mean, ninety_nine, greatest, changed) in enumerate(rows):
        y = _TOP + 20 + height * (row + 0.5)
        marks += [Label(left - 8, y + 4, _cut(name, left - 16), "end"), Label(right + 16, y + 4, changed, tone="small")]
        places = [x.at(kl) if kl > 0 else left + 14 for kl in (mean, ninety_nine, greatest)]
        marks.append(Line(((places[0], y), (places[2], y)), "span"))
        for at, kl, tone, what in zip(
            places, (mean, ninety_nine, greatest), ("b0", "b1", "greatest"), _POINTS, strict=True
        ):
            marks.append(Dot(at, y, tone, f"{name}\n{what} KL {kl:.3g} nats", 4))
    marks.append(Label((left + right) / 2, bottom + 34, "KL(reference ‖ candidate) in nats", "middle", "small"))
    marks.append(Label(right + 16, _TOP + 12, "answers changed", tone="small"))
    marks += legend(list(zip(("b0", "b1", "greatest"), _POINTS, strict=True)), x=left, y=bottom + 68)
    told = "; ".join(
        f"{name}: mean {mean:.3g}, greatest {greatest:.3g}, {changed}" for name, mean, _, greatest, changed in rows
    )
    return Chart("Verification", f"{told}.", WIDTH, bottom + 80, tuple(marks))


_POINTS = ("mean", "99th percentile", "greatest")
_Row = tuple[str, float, float, float, str]


def _rows(verification: Verification) -> Iterator[_Row]:
    yield from _rows_of(verification.sets, "")
    yield from _rows_of(verification.fp8.sets if verification.fp8 else (), ", FP8 base")


def _rows_of(sets: Sequence[VerificationSet], more: str) -> Iterator[_Row]:
    for one in sets:
        for kind in one.kinds:
            changed = f"{kind.answers_changed:,} of {kind.questions:,}"
            yield f"{one.name}{more}: {kind.kind}", kind.mean_kl, kind.p99_kl, kind.max_kl, changed


# --- the card's ---------------------------------------------------------------------------------------------


def card_chart_names(extraction: Extraction) -> tuple[str, ...]:
    """Return the names of the charts beside a variant's card: none of spectra where the evidence holds none."""
    return (ERRORS_CHART, SPECTRUM_CHART) if chosen_modules(extraction) else (ERRORS_CHART,)


def card_charts(extraction: Extraction) -> dict[str, str]:
    """Return the SVG files that go beside a variant's card, by name."""
    made = {ERRORS_CHART: error_map(extraction), SPECTRUM_CHART: spectrum(extraction)}
    return {name: drawn(chart) for name, chart in made.items() if chart is not None}
