"""How a stage tells what it is doing, without knowing who listens; and how fast it goes."""

import time
from collections.abc import Callable
from typing import Protocol

from publisher.records.formats import bytes_per_second, duration, part_of_size, pieces_per_second

Notice = Callable[[], None]


class Octets(int):
    """A number of bytes: a `total` of this type says in what the work is counted."""


class Progress(Protocol):
    """Called before each piece of work; with a total, `done` of `total` pieces are finished."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Take note of one piece of work.

        Args:
            what: the work, in words; the first word is its kind.
            done: pieces, or bytes, that are finished.
            total: all of them; 0 where nobody knows, and `Octets` where they are bytes.
        """


def silent(what: str, done: int = 0, total: int = 0) -> None:
    """Take note of nothing: the progress of whoever does not listen.

    Args:
        what: the work, in words.
        done: pieces, or bytes, that are finished.
        total: all of them.
    """


class Pace:
    """Rate and time left of one kind of work after another; a kind goes by its first word and its total.

    What was finished before a kind of work was first reported, by an earlier run, does not count as fast.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing known; `clock` gives seconds that never go back."""
        self._clock = clock
        self._kind: tuple[str, int] = "", 0
        self._start, self._first, self._last = 0.0, 0, 0

    def describe(self, what: str, done: int, total: int) -> str:
        """Return rate and time left, such as `3.1/s, 0:56 left`.

        Args:
            what: the work, in words; the first word is its kind.
            done: pieces, or bytes, that are finished.
            total: all of them; `Octets` where they are bytes.

        Returns:
            The text; empty before a piece is done, and where there is no total.
        """
        kind, now = (what.partition(" ")[0], total), self._clock()
        if kind != self._kind or done < self._last:
            self._kind, self._start, self._first = kind, now, done
        self._last = done
        passed, finished = now - self._start, done - self._first
        if not total or finished <= 0 or passed <= 0:
            return ""
        rate = finished / passed
        speed = bytes_per_second(rate) if isinstance(total, Octets) else pieces_per_second(rate)
        return f"{speed}, {duration((total - done) / rate)} left"


def amount(done: int, total: int) -> str:
    """Return how much of the work is done: `3/186`, or `1.20/9.80 GB` where the total is in bytes."""
    return part_of_size(done, total) if isinstance(total, Octets) else f"{done}/{total}"
