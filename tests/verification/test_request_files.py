"""Request files: what is read, and what the author of a bad line is told."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from publisher.errors import VerificationError
from publisher.verification.request_files import Question, Runner, read_request_file

CHOICE = {"type": "choice", "criteria": {"b": "second", "a": "first"}}
SCORE = {"type": "score", "criteria": ["low", "middle", "high"]}
GOOD = {"id": "r1", "family": "colours", "state": {}, "questions": {"q": CHOICE, "s": SCORE, "n": {"type": "noul"}}}


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "set.jsonl"
    file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return file


def test_options_of_a_choice_are_counted_in_the_order_of_their_ids(tmp_path: Path) -> None:
    row = GOOD | {"expected": {"q": "b", "s": 2, "n": True}}
    (request,) = read_request_file(written(tmp_path, row), name="set", runner="decision").requests
    assert request.questions == (Question("q", "choice", 1), Question("s", "score", 2), Question("n", "noul", 0))
    assert request.benchmark == "colours"
    assert "expected" not in request.body


@pytest.mark.parametrize(("given", "index"), [(True, 0), (False, 1), (1, 0), (0.0, 1), ("yes", 0), ("no", 1)])
def test_yes_comes_before_no_as_in_a_decision_module_s_logits(tmp_path: Path, given: Any, index: int) -> None:
    file = written(tmp_path, GOOD | {"expected": {"n": given}})
    (request,) = read_request_file(file, name="set", runner="decision").requests
    assert request.questions[2] == Question("n", "noul", index)


def test_a_packed_file_is_read_like_a_plain_one_and_a_limit_cuts_it(tmp_path: Path) -> None:
    file = written(tmp_path, *({"text": f"t{i}"} for i in range(4)))
    packed = tmp_path / "set.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain, zipped = (read_request_file(one, name="set", runner="logits", limit=3) for one in (file, packed))
    assert [one.id for one in zipped.requests] == ["line 1", "line 2", "line 3"]
    assert [one.body for one in plain.requests] == [one.body for one in zipped.requests]


@pytest.mark.parametrize(
    ("runner", "line", "words"),
    [
        ("decision", "{", "line 2: the line cannot be read as JSON: Expecting"),
        ("decision", "[]", "line 2: the line cannot be read as JSON: it is not a JSON object"),
        ("decision", GOOD, "line 2: id is 'r1', as on line 1"),
        ("decision", {"questions": {"n": {"type": "noul"}}}, "line 2: state is missing"),
        ("decision", GOOD | {"questions": {}}, "line 2: questions is {}"),
        ("decision", {"state": 1, "questions": {"n": {"type": "x"}}}, "line 2: questions.n.type is 'x'"),
        ("decision", {"state": 1, "questions": {"n": {"type": "score"}}}, "questions.n.criteria is nothing"),
        ("decision", GOOD | {"id": "2", "expected": {"q": "c"}}, "line 2: expected.q is 'c', none of the options"),
        ("decision", GOOD | {"id": "2", "expected": {"s": -1}}, "line 2: expected.s is -1, none of the options"),
        ("decision", GOOD | {"id": "2", "expected": {"n": 2}}, "line 2: expected.n is 2, none of the options"),
        (
            "decision",
            GOOD | {"id": "2", "expected": {"n": math.inf}},
            "line 2: the line cannot be read as JSON: Infinity is no number",
        ),
        ("decision", GOOD | {"id": "2", "images": ["no.png"]}, r"line 2: images\[0\] 'no.png' does not exist"),
        ("decision", GOOD | {"id": "2", "images": ["data:,x"]}, r"line 2: images\[0\] is no image"),
        ("decision", GOOD | {"id": "2", "images": ["../a.png"]}, r"line 2: images\[0\] is no image \(one of its parts"),
        ("decision", GOOD | {"id": "2", "images": ["/dev/zero"]}, r"line 2: images\[0\] is no image \(it is absolute"),
        ("logits", {"id": "2", "text": 7}, "line 2: text is 7"),
    ],
)
def test_a_bad_line_is_one_error_by_file_line_and_field(tmp_path: Path, runner: Runner, line: Any, words: str) -> None:
    file = written(tmp_path, GOOD if runner == "decision" else {"text": "a"}, line)
    with pytest.raises(VerificationError, match=words) as caught:
        read_request_file(file, name="set", runner=runner)
    assert str(caught.value).startswith(str(file))


def test_files_that_are_missing_damaged_or_empty_are_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-12])
    for file, words in ((tmp_path / "no", "no request file"), (cut, "is damaged"), (written(tmp_path), "no request")):
        with pytest.raises(VerificationError, match=words):
            read_request_file(file, name="set", runner="logits")
