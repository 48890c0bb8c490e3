"""How a stage tells what it is doing, without knowing who listens; and how fast it goes."""

import time
from collections.abc import Callable
from typing import Protocol

Notice = Callable[[], None]
_FAST = 1.0  # a second: slower than this is told by the minute
_HOUR, _MINUTE = 3600, 60


class Octets(int):
    """A number of bytes: a `total` of this type says in what the work is counted."""


class Progress(Protocol):
    """Called before each piece of work; with a total, `done` of `total` pieces are finished."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Take note of one piece of work."""


def silent(what: str, done: int = 0, total: int = 0) -> None:
    """Tell nobody."""


class Pace:
    """Rate and time left of one kind of work after another; a kind goes by its first word and its total.

    What was finished before a kind of work was first told of, by an earlier run, does not count as fast.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known yet."""
        self._clock = clock
        self._kind: tuple[str, int] = "", 0
        self._start, self._first, self._last = 0.0, 0, 0

    def told(self, what: str, done: int, total: int) -> str:
        """`3.1/s, 0:56 left`, as soon as a piece is done; empty before, and where there is no total."""
        kind, now = (what.partition(" ")[0], total), self._clock()
        if kind != self._kind or done < self._last:
            self._kind, self._start, self._first = kind, now, done
        self._last = done
        passed, finished = now - self._start, done - self._first
        if not total or finished <= 0 or passed <= 0:
            return ""
        rate = finished / passed
        return f"{_rate(rate, total)}, {duration((total - done) / rate)} left"


def _rate(rate: float, total: int) -> str:
    if isinstance(total, Octets):
        return f"{rate / 1e6:.3g} MB/s"
    return f"{rate:.3g}/s" if rate >= _FAST else f"{60 * rate:.3g}/min"


def duration(seconds: float) -> str:
    """`0:05`, `12:40`, `3:02:11`."""
    whole = round(seconds)
    hours, rest = divmod(whole, _HOUR)
    minutes, last = divmod(rest, _MINUTE)
    return f"{hours}:{minutes:02d}:{last:02d}" if hours else f"{minutes}:{last:02d}"


def amount(done: int, total: int) -> str:
    """`3/186`, or `1.20/9.80 GB`."""
    if not isinstance(total, Octets):
        return f"{done}/{total}"
    scale, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")  # noqa: PLR2004 - where a gigabyte begins
    return f"{done / scale:.2f}/{total / scale:.2f} {unit}"
