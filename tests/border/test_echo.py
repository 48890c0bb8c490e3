"""What is printed, logged and warned of is escaped on its way out."""

import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from publisher.border.echo import echo, echo_json, guard_libraries


@pytest.fixture
def _guarded() -> Iterator[None]:
    factory, formats = logging.getLogRecordFactory(), warnings.formatwarning
    guard_libraries()
    yield
    logging.setLogRecordFactory(factory)
    warnings.formatwarning = formats


def test_lines_stay_and_escape_sequences_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    echo("one\ntwo \x1b[31m\u202e\r", err=True)
    assert capsys.readouterr() == ("", "one\ntwo \\x1b[31m\\u202e\\r\n")


def test_a_json_document_reads_the_same_and_holds_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"a\x9b\u202e": "\x7f\U000e0041 é"}
    echo_json(json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    out = capsys.readouterr().out
    assert json.loads(out) == document
    assert out.replace("\n", "").isprintable()
    assert "é" in out


@pytest.mark.usefixtures("_guarded")
def test_what_a_library_logs_or_warns_of_is_escaped() -> None:
    record = logging.getLogger("a.library").makeRecord("a", 40, "f", 1, "no weight %s\nat all", ("\x1b[2J",), None)
    assert record.getMessage() == "no weight \\x1b[2J\nat all"
    assert "unexpected \\x1b[2J" in warnings.formatwarning("unexpected \x1b[2J", UserWarning, "file.py", 1)
