"""Axes and marks: what a chart is made of, and its SVG.

Coordinates are in units of the chart, about a pixel each; y grows downwards. The same chart gives the same bytes.
No figure is worked out here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jinja2 import Environment

from publisher.records.formats import significant_percent
from publisher.release.templating import html_environment

_STEPS = (1, 2, 5, 10)
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PLAIN = 1e-3, 1e4  # numbers between these are written out
_PERCENT_DIGITS = 6  # of a label: enough for neighbouring ones to differ
_LETTER = 6.2  # mean width of a letter of a label


# --- axes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """A value of an axis that is labelled, and where it is."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high`, drawn from `start` to `end`; `log`: equal ratios are equally far apart."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return where this value is; one beyond the axis is at its end."""
        low, high, inside = (math.log10(x) if self.log else x for x in (self.low, self.high, self._within(value)))
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    def _within(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def ticks(self, *, most: int = 6, percent: bool = False) -> tuple[Tick, ...]:
        """Round values, `most` of them at most."""
        values = _decades(self.low, self.high, most) if self.log else _round_values(self.low, self.high, most)
        return tuple(
            Tick(self.at(v), significant_percent(v, digits=_PERCENT_DIGITS) if percent else number(v)) for v in values
        )


_LEAST = 1e-30  # of what is drawn: evidence of others may hold numbers that no division survives


def log_axis(values: Sequence[float], *, start: float, end: float) -> Axis:
    """Return a logarithmic axis with room for all of these values that are above zero.

    Args:
        values: what will be drawn; where none of them is above zero, the axis goes from 1e-6 to 1.
        start: the coordinate of its low end.
        end: the coordinate of its high end.

    Returns:
        The axis, somewhat longer than its values need.
    """
    positive = [max(value, _LEAST) for value in values if value > 0] or [1e-6, 1.0]
    return Axis(min(positive) / 1.5, max(positive) * 1.5, start, end, log=True)


def _round_values(low: float, high: float, most: int) -> list[float]:
    rough = max((high - low) / most, 1e-30)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in _STEPS if unit * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten: every second or third of many, and with 2 and 5 between them where there are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        values = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        return [value for value in values if low <= value <= high]
    stride = -(-(last - first + 1) // most)
    return [10.0**power for power in range(first, last + 1, stride)]


def number(value: float) -> str:
    """Return a number for an axis: `0.05`, `200`, `10⁻⁶`, `2·10⁻⁴`."""
    if value == 0 or _PLAIN[0] <= abs(value) < _PLAIN[1]:
        return f"{value:.6g}"
    digits, _, power = f"{value:.3e}".partition("e")
    factor = f"{float(digits):g}"
    return ("" if factor == "1" else f"{factor}·") + "10" + str(int(power)).translate(_SUPERSCRIPT)


# --- marks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `tone` is its class in the style sheet, `tip` what a pointer over it is told."""

    kind: ClassVar[str] = "rect"
    x: float
    y: float
    width: float
    height: float
    tone: str
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """A disc, or a ring where its tone says so."""

    kind: ClassVar[str] = "dot"
    x: float
    y: float
    tone: str
    tip: str = ""
    radius: float = 3


@dataclass(frozen=True, slots=True)
class Line:
    """Straight pieces through these points."""

    kind: ClassVar[str] = "line"
    points: tuple[tuple[float, float], ...]
    tone: str = "grid"

    @property
    def path(self) -> str:
        """The points as the path's data."""
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in self.points)


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text; `turned` reads upwards."""

    kind: ClassVar[str] = "label"
    x: float
    y: float
    text: str
    anchor: str = "start"
    tone: str = ""
    turned: bool = False


Mark = Rect | Dot | Line | Label


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: marks in the order in which they are drawn, and its content in words for who cannot see it."""

    title: str
    description: str
    width: float
    height: float
    marks: tuple[Mark, ...]


def legend(entries: Sequence[tuple[str, str]], *, x: float, y: float) -> list[Mark]:
    """Return a swatch of each tone with its label, in a row.

    Args:
        entries: tone and label of each.
        x: where the row begins.
        y: the base line of the labels.

    Returns:
        The marks.
    """
    marks: list[Mark] = []
    for tone, label in entries:
        marks += [Rect(x, y - 9, 10, 10, tone), Label(x + 15, y, label)]
        x += 33 + _LETTER * len(label)
    return marks


def bottom_axis(ticks: Sequence[Tick], *, y: float, top: float | None = None) -> list[Mark]:
    """Return the labels of an axis below a chart, with lines up to `top`.

    Args:
        ticks: the values that are labelled.
        y: where the axis is.
        top: where the lines end; without it there are none.

    Returns:
        The marks.
    """
    marks: list[Mark] = []
    for tick in ticks:
        if top is not None:
            marks.append(Line(((tick.at, top), (tick.at, y))))
        marks.append(Label(tick.at, y + 16, tick.label, "middle"))
    return marks


def left_axis(ticks: Sequence[Tick], *, x: float, right: float) -> list[Mark]:
    """Return the labels of an axis on the left of a chart, with lines across.

    Args:
        ticks: the values that are labelled.
        x: where the axis is.
        right: where the lines end.

    Returns:
        The marks.
    """
    marks: list[Mark] = []
    for tick in ticks:
        marks += [Line(((x, tick.at), (right, tick.at))), Label(x - 7, tick.at + 4, tick.label, "end")]
    return marks


# --- SVG ----------------------------------------------------------------------------------------------------


def svg(chart: Chart) -> str:
    """Return an SVG file that is legible on a light and on a dark ground, and fetches nothing from elsewhere."""
    return environment().get_template("chart.svg.j2").render(chart=chart)


def environment() -> Environment:
    """Return Jinja for SVG and HTML: everything that comes from a checkpoint or a manifest is escaped."""
    made = html_environment()
    made.filters["place"] = place
    return made


def place(value: float) -> str:
    """Return a coordinate to a tenth, without a zero at its end."""
    return f"{value:.1f}".removesuffix(".0")
