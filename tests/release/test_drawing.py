"""Axes, marks and the SVG they become."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.release.svg import Axis, Chart, Dot, Label, Line, Rect, legend, log_axis, number, svg

SVG = "{http://www.w3.org/2000/svg}"
positive = st.floats(1e-12, 1e12)


def drawn(*marks: Rect | Dot | Line | Label) -> ET.Element:
    return ET.fromstring(svg(Chart("A <title>", "what & where", 100, 50, marks)))  # noqa: S314 - our own


@given(low=st.floats(-1e6, 1e6), reach=st.floats(1e-6, 1e6), most=st.integers(2, 9))
def test_ticks_are_on_the_axis_rising_and_not_too_many(low: float, reach: float, most: int) -> None:
    axis = Axis(low, low + reach, 300, 20)
    places = [tick.at for tick in axis.ticks(most=most)]
    assert len(places) <= most + 1
    assert places == sorted(places, reverse=True)
    assert all(20 - 1e-3 <= place <= 300 + 1e-3 for place in places)


@given(values=st.lists(positive, min_size=1, max_size=5))
def test_a_logarithmic_axis_has_room_for_all_its_values(values: list[float]) -> None:
    axis = log_axis(values, start=0, end=100)
    assert all(0 < axis.at(value) < 100 for value in values)
    places = [tick.at for tick in axis.ticks()]
    assert places == sorted(places)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)


def test_equal_ratios_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    axis = Axis(1e-4, 1, 0, 100, log=True)
    assert [axis.at(value) for value in (1e-4, 1e-3, 1e-2, 1e-1, 1)] == pytest.approx([0, 25, 50, 75, 100])


def test_few_decades_get_steps_between_them_and_many_are_thinned_out() -> None:
    assert [t.label for t in Axis(0.15, 0.6, 0, 1, log=True).ticks()] == ["0.2", "0.5"]
    assert [t.label for t in Axis(1e-9, 1, 0, 1, log=True).ticks(most=5)] == ["10⁻⁹", "10⁻⁷", "10⁻⁵", "0.001", "0.1"]


def test_no_value_above_zero_still_gives_an_axis() -> None:
    assert [tick.label for tick in log_axis([0.0, 0.0], start=0, end=1).ticks()][-1] == "1"


def test_a_value_beyond_the_axis_is_at_its_end() -> None:
    axis = Axis(0, 10, 0, 100)
    assert (axis.at(-5), axis.at(50)) == (0, 100)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (200, "200"), (1e-6, "10⁻⁶"), (2e-4, "2·10⁻⁴"), (5e4, "5·10⁴"), (-1e-5, "-1·10⁻⁵")],
)
def test_a_number_of_an_axis_reads(value: float, text: str) -> None:
    assert number(value) == text


def test_shares_are_told_in_per_cent() -> None:
    assert [t.label for t in Axis(0.9, 1, 0, 1).ticks(percent=True, most=2)] == ["90%", "95%", "100%"]


def test_what_comes_from_a_checkpoint_is_escaped() -> None:
    name = 'layers.0."><script>alert(1)</script>&'
    text = svg(Chart(name, name, 100, 50, (Rect(1, 2, 3, 4, "m0", name), Label(1, 2, name))))
    assert "<script>" not in text
    root = ET.fromstring(text)  # noqa: S314 - our own
    assert root.findtext(f"{SVG}title") == root.findtext(f"{SVG}text") == root.findtext(f"{SVG}rect/{SVG}title") == name


def test_each_mark_becomes_its_element_with_its_class() -> None:
    root = drawn(
        Rect(1, 2, 3.25, 4, "m0"), Dot(1, 2, "b0"), Line(((0, 0), (1, 2)), "edge"), Label(5, 6, "x", turned=True)
    )
    found = {child.tag.removeprefix(SVG): child.attrib for child in root}
    assert found["rect"] == {"class": "m0", "x": "1", "y": "2", "width": "3.2", "height": "4"}
    assert found["circle"] == {"class": "b0", "cx": "1", "cy": "2", "r": "3"}
    assert found["path"] == {"class": "edge", "d": "M0.0 0.0L1.0 2.0"}
    assert found["text"] == {"transform": "translate(5 6) rotate(-90)"}


def test_the_chart_is_told_in_words_and_asks_for_nothing_from_elsewhere() -> None:
    text = svg(Chart("Title", "Words.", 100, 50, ()))
    root = ET.fromstring(text)  # noqa: S314 - our own
    assert (root.get("role"), root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")) == ("img", "Title", "Words.")
    assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"')
    assert "url(" not in text
    assert "@import" not in text


def test_a_legend_is_a_swatch_and_a_word_for_each() -> None:
    marks = legend([("m0", "low"), ("m1", "high")], x=0, y=20)
    assert [
        (mark.tone if isinstance(mark, Rect) else mark.text) for mark in marks if not isinstance(mark, Dot | Line)
    ] == [
        "m0",
        "low",
        "m1",
        "high",
    ]
