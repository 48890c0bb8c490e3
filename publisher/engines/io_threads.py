"""Reading and writing in threads beside the arithmetic: one piece ahead, one behind, never more.

So memory is bounded. Each thread does one thing after the other in the order given: which of them is faster changes no
byte. What needs no memory, such as hashing, may go on in several threads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self, TypeVar

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def read_ahead(items: Iterable[Item], load: Callable[[Item], Loaded]) -> Iterator[tuple[Item, Loaded]]:
    """Yield each item with what `load` makes of it, while a thread loads the next one.

    An error of `load` is raised when the turn of its item comes.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as thread:
        loading = deque[tuple[Item, Future[Loaded]]]()
        for item in items:
            loading.append((item, thread.submit(load, item)))
            if len(loading) > 1:
                yield _loaded(loading.popleft())
        if loading:
            yield _loaded(loading.popleft())


def _loaded(pair: tuple[Item, Future[Loaded]]) -> tuple[Item, Loaded]:
    """Wait for an item; the generator that yields it keeps nothing of it, so that its memory is free for the next."""
    item, future = pair
    return item, future.result()


@contextmanager
def thread_pool(number: int) -> Iterator[ThreadPoolExecutor]:
    """Give a pool of `number` threads for as long as the block runs.

    On the way out of an error, calls that have not begun are cancelled.
    """
    threads = ThreadPoolExecutor(number)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


class WriteBehind:
    """A thread that makes one call at a time while the caller goes on.

    An error of a call is raised by the next call that is submitted, or at the end of the block.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writing")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the last call, on the way out of an error as well: what was finished is kept."""
        self._thread.shutdown()
        if kind is None:
            self._require_success()

    def submit(self, call: Callable[..., None], /, *arguments: Any) -> None:
        """Wait for the call before, raise its error if it failed, and let the thread make this one."""
        self._require_success()
        self._last = self._thread.submit(call, *arguments)

    def _require_success(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()
