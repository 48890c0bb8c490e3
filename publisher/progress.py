"""How a stage tells what it is doing, without knowing who listens."""

from collections.abc import Callable
from typing import Protocol

Notice = Callable[[], None]


class Progress(Protocol):
    """Called before each piece of work; with a total, `done` of `total` pieces are finished."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Take note of one piece of work."""


def silent(what: str, done: int = 0, total: int = 0) -> None:
    """Tell nobody."""
