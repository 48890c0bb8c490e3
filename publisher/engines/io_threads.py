"""Reading and writing beside the arithmetic: one piece ahead, one behind, never more, so that memory is bounded.

Each is one thread that does one thing after the other in the order given: which of them is faster changes no byte.
What needs no memory, such as hashing, may go on side by side.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self, TypeVar

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def ahead(items: Iterable[Item], load: Callable[[Item], Loaded]) -> Iterator[tuple[Item, Loaded]]:
    """Each item with what `load` makes of it; the next one is loaded while the caller works on this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as thread:
        loading: tuple[Item, Future[Loaded]] | None = None
        for item in items:
            following = item, thread.submit(load, item)
            if loading is not None:
                yield loading[0], loading[1].result()
            loading = following
        if loading is not None:
            yield loading[0], loading[1].result()


@contextmanager
def side_by_side(number: int) -> Iterator[ThreadPoolExecutor]:
    """So many threads; on the way out of an error, what they have not begun is left undone."""
    threads = ThreadPoolExecutor(number)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


class Behind:
    """Calls that are made while the caller goes on; a failed one is raised by the next, or at the end of the block."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writing")
        self._call: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the last call, on the way out of an error as well: what was finished is kept."""
        self._thread.shutdown()
        if kind is None:
            self._settle()

    def do(self, call: Callable[..., None], /, *arguments: Any) -> None:
        """Make this call once the one before is done."""
        self._settle()
        self._call = self._thread.submit(call, *arguments)

    def _settle(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.result()
