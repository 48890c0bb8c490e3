"""How fast it goes, and what a terminal and a pipe see of it."""

import io
import re

import pytest
from rich.console import Console

from publisher.cli.console import progress_on
from publisher.records.formats import duration
from publisher.records.progress import Octets, Pace, amount

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        """What it was set to."""
        return self.now


def test_nothing_is_said_of_the_pace_before_a_piece_is_done() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.describe("extracting a", 0, 100) == ""
    clock.now = 3.0
    assert pace.describe("extracting b", 0, 100) == ""


@pytest.mark.parametrize(
    ("seconds", "done", "total", "said"),
    [
        (10.0, 20, 100, "2/s, 0:40 left"),
        (60.0, 1, 3, "1/min, 2:00 left"),
        (10.0, 1, 7201, "6/min, 20:00:00 left"),
        (2.0, 3_000_000, Octets(9_000_000), "1.5 MB/s, 0:04 left"),
    ],
)
def test_rate_and_time_left_follow_from_what_is_done(seconds: float, done: int, total: int, said: str) -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.describe("extracting a", 0, total)
    clock.now = seconds
    assert pace.describe("extracting b", done, total) == said


def test_what_an_earlier_run_finished_does_not_count_as_fast() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.describe("extracting a", 90, 100)
    clock.now = 10.0
    assert pace.describe("extracting b", 95, 100) == "30/min, 0:10 left"


def test_another_kind_of_work_and_the_same_begun_anew_start_from_nothing() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.describe("extracting a", 0, 10)
    clock.now = 10.0
    assert pace.describe("extracting b", 5, 10) != ""
    assert pace.describe("checking a", 5, 10) == ""
    pace.describe("checking b", 9, 10)
    assert pace.describe("checking a", 0, 10) == ""


def test_work_without_a_total_has_no_pace() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.describe("signing", 0, 0)
    clock.now = 10.0
    assert pace.describe("signing", 0, 0) == ""


def test_amounts_and_durations_read() -> None:
    assert [amount(3, 186), amount(1_200_000_000, Octets(9_800_000_000)), amount(0, Octets(5_000_000))] == [
        "3/186",
        "1.20/9.80 GB",
        "0.00/5.00 MB",
    ]
    assert [duration(seconds) for seconds in (0.4, 5, 760, 10931)] == ["0:00", "0:05", "12:40", "3:02:11"]


def test_a_pipe_gets_plain_lines_now_and_then_with_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), io.StringIO()
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("publisher.cli.console.time.monotonic", clock)
    monkeypatch.setattr("publisher.cli.console.Pace", lambda: Pace(clock))
    with progress_on(Console(file=out)) as progress:
        for done in range(5):
            clock.now = 2.0 * done
            progress(f"extracting model.layers.{done}.{'long_' * 30}", done, 5)
    lines = out.getvalue().splitlines()
    assert [line.rpartition(" (")[2] for line in lines] == ["0/5)", "3/5, 30/min, 0:04 left)"]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_a_terminal_s_line_keeps_to_its_width_with_amount_and_pace_in_it(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width)
    with progress_on(console) as progress:
        progress(f"extracting model.layers.0.{'long_' * 30}", 0, 186)
        progress(f"extracting model.layers.1.{'long_' * 30}", 12, 186)
    shown = [line for line in re.split(r"[\r\n]", _CODES.sub("", out.getvalue())) if line.strip()]
    assert max(map(len, shown)) <= width
    assert any("12/186" in line and "left" in line and line.lstrip().startswith("extr") for line in shown)


def test_no_color_leaves_colour_out_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    with progress_on(Console(file=out, force_terminal=True, width=120)) as progress:
        progress("extracting a", 1, 3)
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|38|48)[0-9;]*m", out.getvalue())
