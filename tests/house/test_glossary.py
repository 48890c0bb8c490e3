"""The glossary names a file for each word, and it is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+\.) \| `([^`]+)` \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    """Return word, meaning and file of each line of the table."""
    return ROW.findall((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))


def test_every_line_of_the_table_has_a_word_a_sentence_and_a_file() -> None:
    lines = [line for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    assert len(rows()) == len(lines) - 2
    assert len(rows()) >= 35


def test_every_word_has_one_meaning() -> None:
    words = [word for word, _, _ in rows()]
    assert sorted(set(words)) == sorted(words)


def test_the_file_in_which_a_word_is_decided_is_there() -> None:
    assert [file for _, _, file in rows() if not (ROOT / file).is_file()] == []


def test_readme_and_contributing_lead_to_it() -> None:
    assert "docs/glossary.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/glossary.md" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
