"""Answers on disk survive a kill at any byte."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from publisher.verification.answer_log import Answer, AnswerLog

BATCHES: list[list[list[Answer]]] = [
    [[np.array([0.1, -3e38], dtype=np.float32), "ValueError: too long"], [np.array([7.0], dtype=np.float32)]],
    [[np.array([1.5, 2.5, np.inf], dtype=np.float32)]],
    [[np.array([0.25], dtype=np.float32)]],
]


@given(st.floats(0, 1))
def test_a_file_cut_anywhere_goes_on_with_the_batch_that_was_torn_and_ends_the_same(share: float) -> None:
    with TemporaryDirectory() as folder:
        answers = AnswerLog(Path(folder), "a")
        for number, batch in enumerate(BATCHES):
            answers.add(batch, number=number)
        whole = answers.file.read_bytes()
        answers.file.write_bytes(whole[: int(share * len(whole))])
        done = answers.finished()
        for number, batch in enumerate(BATCHES):
            if number not in done:
                answers.add(batch, number=number)
        assert answers.file.read_bytes() == whole
        assert answers.finished() == set(range(len(BATCHES)))


@given(st.permutations(range(len(BATCHES))))
def test_batches_are_kept_in_the_order_in_which_they_come_and_read_in_that_of_the_requests(order: list[int]) -> None:
    with TemporaryDirectory() as folder:
        answers = AnswerLog(Path(folder), "a")
        for number in order:
            answers.add(BATCHES[number], number=number)
        assert answers.finished() == set(order)
        expected = [request for batch in BATCHES for request in batch]
        assert [len(request) for request in answers.read()] == [len(request) for request in expected]
        for found, given_ in zip(answers.read(), expected, strict=True):
            assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, given_, strict=True))


def test_logits_come_back_as_they_were_and_reasons_too(tmp_path: Path) -> None:
    answers = AnswerLog(tmp_path, "a")
    for number, batch in enumerate(BATCHES):
        answers.add(batch, number=number)
    expected = [request for batch in BATCHES for request in batch]
    for found, given_ in zip(answers.read(), expected, strict=True):
        for ours, theirs in zip(found, given_, strict=True):
            assert np.array_equal(ours, theirs)
