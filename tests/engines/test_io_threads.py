"""One piece ahead, one behind, in order."""

import threading
import time
from itertools import islice

import pytest

from publisher.engines.io_threads import WriteBehind, read_ahead, thread_pool


def test_items_come_in_order_each_with_what_was_loaded_of_it() -> None:
    def load(item: int) -> int:
        time.sleep(0.001 * (item % 3))
        return item * item

    assert list(read_ahead(range(20), load)) == [(item, item * item) for item in range(20)]


def test_the_next_item_is_loaded_while_the_caller_works_and_no_more_than_that() -> None:
    loaded: list[int] = []
    second = threading.Event()

    def load(item: int) -> int:
        loaded.append(item)
        if item == 1:
            second.set()
        return item

    pieces = read_ahead(range(10), load)
    next(pieces)
    assert second.wait(10)
    time.sleep(0.05)
    assert loaded == [0, 1]
    assert list(islice(pieces, 2)) == [(1, 1), (2, 2)]


def test_an_error_in_loading_is_raised_when_its_turn_comes() -> None:
    pieces = read_ahead([2, 1, 0, 5], lambda item: 10 // item)
    assert list(islice(pieces, 2)) == [(2, 5), (1, 10)]
    with pytest.raises(ZeroDivisionError):
        next(pieces)


def test_nothing_to_load_is_nothing() -> None:
    assert not list(read_ahead([], str))


def test_what_was_not_begun_is_left_undone_on_the_way_out_of_an_error() -> None:
    made: list[int] = []

    def slowly(number: int) -> None:
        time.sleep(0.05)
        made.append(number)

    def interrupted() -> None:
        with thread_pool(2) as threads:
            for number in range(40):
                threads.submit(slowly, number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(made) < 20


def test_calls_are_made_one_after_the_other_and_all_of_them_by_the_end_of_the_block() -> None:
    made: list[int] = []
    with WriteBehind() as writing:
        for number in range(10):
            writing.submit(made.append, number)
    assert made == list(range(10))


def fail() -> None:
    message = "no room"
    raise ValueError(message)


def test_a_call_that_failed_is_raised_by_the_next_one() -> None:
    with WriteBehind() as writing:
        writing.submit(fail)
        with pytest.raises(ValueError, match="no room"):
            writing.submit(fail)


def test_the_last_call_that_failed_is_raised_at_the_end() -> None:
    with pytest.raises(ValueError, match="no room"), WriteBehind() as writing:
        writing.submit(fail)


def test_what_was_begun_is_finished_on_the_way_out_of_an_error() -> None:
    made: list[int] = []

    def slowly(number: int) -> None:
        time.sleep(0.05)
        made.append(number)

    def interrupted() -> None:
        with WriteBehind() as writing:
            writing.submit(slowly, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert made == [1]
