"""A card taken apart into statements: rows of tables, items of lists, paragraphs, blocks of code.

Each statement has its facts, in order: whatever stands for a figure, a digest, a commit, a link or a dtype. This module
compares nothing: `meaning` does.
"""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

STAMP: Final = re.compile(r"<!-- Rendered by publisher (\S{1,64}), card ([0-9a-f]{12})\. -->")
_RULE: Final = re.compile(r"\|?[\s:|-]*-[\s:|-]*")
_ITEM: Final = re.compile(r"\s{0,3}([-*+]|\d{1,9}[.)])\s")
_FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})")
_CELLS: Final = re.compile(r"(?<!\\)\|")
_ESCAPED: Final = re.compile(r"\\([!-/:-@\[-`{-~])")
_LINK: Final = re.compile(r"\]\s?\(\s*<?([^)\s>]*)|^\s*\[[^\]]+\]:\s*<?([^\s>]+)")
_UNIT: Final = re.compile(r"(\d) (?=[kMGT]?B\b|%)")  # charts of before wrote `0.44 %`
_BETWEEN: Final = re.compile(r"[\s|()\[\]`*~\"'\u2018\u2019\u201c\u201d]+")
# numbers in words of the templates, which are no figures of a release
_TERMS: Final = re.compile(r"\bbelow 99\.9%|\bfp(?:8|16|32)\b|\b99th\b", re.IGNORECASE)
SHOWN = 100  # characters of a statement in a message

Kind = Literal["text", "row", "code"]


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a card.

    Attributes:
        kind: a row of a table, a block of code, or other text.
        line: where it begins, counted from 1.
        text: all of it on one line, without Markdown's escapes.
        facts: what stands for a fact in it, in order.
        words: the text with `#` in the place of each fact.
        cells: of a row, the facts of each cell.
        columns: of a row, the texts of its table's first row.
    """

    kind: Kind
    line: int
    text: str
    facts: tuple[str, ...]
    words: str
    cells: tuple[tuple[str, ...], ...] = ()
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return line and text of the statement, cut where it is long."""
        return f"line {self.line}: {self.text[:SHOWN]}{'…' * (len(self.text) > SHOWN)}"


@dataclass(slots=True)
class Card:
    """Header and statements of one card; `lines` is its text without the header and the stamp."""

    header: str
    lines: list[str]
    first: int
    statements: list[Statement] = field(default_factory=list)
    headings: dict[int, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    blocks: int = 0

    @classmethod
    def of(cls, text: str) -> "Card":
        """Take a card's text apart."""
        header, body, first = _split(text)
        lines = body.rstrip("\n").split("\n")
        if lines and STAMP.fullmatch(lines[-1]):
            lines.pop()
        card = cls(header, lines, first)
        card._read()
        return card

    def _read(self) -> None:
        waiting: list[tuple[int, str]] = []
        columns: tuple[str, ...] = ()
        numbered = iter(enumerate(self.lines, self.first))
        for number, line in numbered:
            fence, row = _FENCE.match(line), line.lstrip().startswith("|")
            if fence or row or not line.strip() or line.startswith("#") or _ITEM.match(line):
                self._add("text", waiting)
                waiting = []
            columns = columns if row else ()
            if fence:
                self._add("code", [(number, line), *_fenced(numbered, fence[1])])
            elif row:
                columns = self._row(number, line, columns)
            elif line.strip():
                if line.startswith("## "):
                    self.headings[len(self.statements)] = plain(line[3:]).strip()
                waiting.append((number, line))
                if line.startswith("#"):
                    self._add("text", waiting)
                    waiting = []
        self._add("text", waiting)

    def _row(self, number: int, line: str, columns: tuple[str, ...]) -> tuple[str, ...]:
        cells = [plain(cell).strip() for cell in _CELLS.split(line.strip().strip("|"))]
        if not _RULE.fullmatch(line.strip()):
            text = " | ".join(cells)
            facts = tuple(tuple(facts_in(cell)) for cell in cells)
            every = tuple(fact for cell in facts for fact in cell)
            self.statements.append(Statement("row", number, text, every, _words(text, every), facts, columns))
        return columns or tuple(cells)

    def _add(self, kind: Kind, lines: Sequence[tuple[int, str]]) -> None:
        if not lines:
            return
        text = " ".join(plain(line).strip() if kind == "text" else line.strip() for _, line in lines)
        facts = tuple(facts_in(text, code=kind == "code"))
        self.statements.append(Statement(kind, lines[0][0], text, facts, _words(text, facts)))
        if kind == "code":
            self.blocks += 1
            self.code += [line.strip() for _, line in lines if line.strip()]


def _split(text: str) -> tuple[str, str, int]:
    """Return header, body, and the number of the body's first line."""
    if text.startswith("---\n") and (end := text.find("\n---\n", 3)) >= 0:
        return text[4 : end + 1], text[end + 5 :], text.count("\n", 0, end + 5) + 1
    return "", text, 1


def _fenced(numbered: Iterator[tuple[int, str]], fence: str) -> Iterator[tuple[int, str]]:
    """Yield the lines up to the one that closes the block of code."""
    for number, line in numbered:
        yield number, line
        if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            return


def plain(text: str) -> str:
    """Return the text as a reader sees it, without Markdown's and HTML's escapes."""
    return _ESCAPED.sub(r"\1", html.unescape(text))


def facts_in(text: str, *, code: bool = False) -> Iterator[str]:
    """Yield the facts of a text: whatever has a digit of any script, whatever is a link, and in code every path."""
    for part in _BETWEEN.split(_UNIT.sub(r"\1", _TERMS.sub(" ", text))):
        token = part.rstrip(".,;:!?")
        if (
            any(map(str.isnumeric, token))
            or "://" in token
            or token.startswith(("www.", "mailto:"))
            or (code and "/" in token)
        ):
            yield token
    if not code:
        yield from (f"link to {match[1] or match[2] or 'nothing'}" for match in _LINK.finditer(text))


def _words(text: str, facts: Sequence[str]) -> str:
    """Return the text with `#` for each fact; longer facts are replaced first, since one may be a part of another."""
    text = _UNIT.sub(r"\1", text)
    for fact in sorted(set(facts), key=len, reverse=True):
        text = text.replace(fact.removeprefix("link to "), "#")
    return " ".join(text.split())
