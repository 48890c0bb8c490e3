"""A card of another version, held against the evidence by meaning: its figures, digests, links and code.

Another version words the card otherwise, so that its bytes prove nothing. But both cards say the same things of the
same evidence, in the same order. So the card that this version would render is taken apart into statements (a row of a
table, an item of a list, a paragraph, a block of code), and so is the card that is there. Whatever stands for a fact
in a statement (a figure, a digest, a commit, a link, a dtype) must stand in this version's card too: in one statement,
in that order, and where the words around it are the same, in the same place. docs/audit.md says what that proves.
"""

import html
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from publisher import __version__
from publisher.border.files import read_text
from publisher.border.limits import LIMITS
from publisher.records import filenames
from publisher.release.card import stamp

_STAMP: Final = re.compile(r"<!-- Rendered by publisher (\S{1,64}), card ([0-9a-f]{12})\. -->")
_RULE: Final = re.compile(r"\|?[\s:|-]*-[\s:|-]*")
_ITEM: Final = re.compile(r"\s{0,3}([-*+]|\d{1,9}[.)])\s")
_FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})")
_CELLS: Final = re.compile(r"(?<!\\)\|")
_ESCAPED: Final = re.compile(r"\\([!-/:-@\[-`{-~])")
_TAG: Final = re.compile(r"<[A-Za-z/!?][^>]*>?")
_SPAN: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK: Final = re.compile(r"\]\s?\(\s*<?([^)\s>]*)|^\s*\[[^\]]+\]:\s*<?([^\s>]+)")
_UNIT: Final = re.compile(r"(\d) (?=[kMGT]?B\b|%)")  # charts of before wrote `0.44 %`
_BETWEEN: Final = re.compile(r"[\s|()\[\]`*~\"'\u2018\u2019\u201c\u201d]+")
# numbers in words of the templates, which are no figures of a release
_TERMS: Final = re.compile(r"\bbelow 99\.9%|\bfp(?:8|16|32)\b|\b99th\b", re.IGNORECASE)
_FILE: Final = re.compile(r"[\w./-]+\.(?:safetensors|jsonl?|ya?ml|svg|gguf|sig|bin|pt|pth|ckpt|npz|zip|py|sh|exe)\b")
_OUR_TAGS: Final = frozenset({"<details>", "</details>", "<summary>", "</summary>"})
_SHOWN = 100  # characters of a statement in a message
_NAMED = 5  # statements in a remark

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
        """Line and text, cut where it is long."""
        return f"line {self.line}: {self.text[:_SHOWN]}{'…' * (len(self.text) > _SHOWN)}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a card of another version compares with the one that this version renders.

    Attributes:
        problems: what it states that the evidence does not give.
        code: lines of its code that this version's card does not have.
        unsaid: statements of this version's card, with facts, that it does not make.
        facts: how many facts were found in their places.
    """

    problems: tuple[str, ...]
    code: tuple[str, ...]
    unsaid: tuple[str, ...]
    facts: int

    def remark(self, made_by: str, this: str) -> str:
        """Return what the audit says of a card that holds by meaning: who made it, and who compared it."""
        told = (
            f"rendered by {made_by} (this is {this}): wording not compared; its {self.facts} figures, digests and "
            "links are what the artefacts give, in their places"
        )
        more = ("…",) if len(self.unsaid) > _NAMED else ()
        lines = "".join(f"\n- {text}" for text in (*self.unsaid[:_NAMED], *more))
        return f"{told}; a card of this version states besides:{lines}" if lines else told


def other_renderer(card: Path, made: Collection[str]) -> str:
    """Return who rendered a card, where it was another version than this one; empty where it was this one.

    Args:
        card: README.md; its last line says who rendered it. Cards of 0.1 do not say it.
        made: the versions that made the evidence.
    """
    if not card.is_file() or card.stat().st_size > LIMITS.text_bytes:
        return ""
    last = read_text(card).rstrip("\n").rpartition("\n")[2]
    if found := _STAMP.fullmatch(last):
        return "" if last == stamp() else f"publisher {found[1]}, card {found[2]}"
    return "" if __version__ in made else f"publisher {', '.join(sorted(made))}"


def compared(card: str, expected: str) -> Comparison:
    """Return how a card compares by meaning with the one that this version renders from the same evidence.

    Args:
        card: README.md as it was published.
        expected: README.md as this version renders it.
    """
    there, here = _Card.of(card), _Card.of(expected)
    problems = [*_header_problems(there.header, here.header), *_markup(there, here), *_columns(there, here)]
    problems += [*_files(there, here), *_same_words(there, here)]
    unsaid: list[Statement] = []
    for made, known in _sections(there, here):
        amiss, left = _in_order(made, known)
        problems += amiss
        unsaid += left
    facts = sum(len(statement.facts) for statement in there.statements)
    told = tuple(str(statement) for statement in unsaid)
    return Comparison(tuple(dict.fromkeys(problems)), tuple(_other_code(there, here)), told, facts)


# --- taking a card apart ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Card:
    """Header and statements of one card; `lines` is its text without the header and the stamp."""

    header: str
    lines: list[str]
    first: int
    statements: list[Statement] = field(default_factory=list)
    headings: dict[int, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    blocks: int = 0

    @classmethod
    def of(cls, text: str) -> "_Card":
        header, body, first = _split(text)
        lines = body.rstrip("\n").split("\n")
        if lines and _STAMP.fullmatch(lines[-1]):
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
                    self.headings[len(self.statements)] = _plain(line[3:]).strip()
                waiting.append((number, line))
                if line.startswith("#"):
                    self._add("text", waiting)
                    waiting = []
        self._add("text", waiting)

    def _row(self, number: int, line: str, columns: tuple[str, ...]) -> tuple[str, ...]:
        cells = [_plain(cell).strip() for cell in _CELLS.split(line.strip().strip("|"))]
        if not _RULE.fullmatch(line.strip()):
            text = " | ".join(cells)
            facts = tuple(tuple(_facts(cell)) for cell in cells)
            every = tuple(fact for cell in facts for fact in cell)
            self.statements.append(Statement("row", number, text, every, _words(text, every), facts, columns))
        return columns or tuple(cells)

    def _add(self, kind: Kind, lines: Sequence[tuple[int, str]]) -> None:
        if not lines:
            return
        text = " ".join(_plain(line).strip() if kind == "text" else line.strip() for _, line in lines)
        facts = tuple(_facts(text, code=kind == "code"))
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
    """The lines up to the one that closes the block."""
    for number, line in numbered:
        yield number, line
        if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            return


def _plain(text: str) -> str:
    """The text as a reader sees it: without Markdown's and HTML's escapes."""
    return _ESCAPED.sub(r"\1", html.unescape(text))


def _facts(text: str, *, code: bool = False) -> Iterator[str]:
    """Whatever has a digit of any script, and whatever is a link; in code, every path too."""
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
    """The text with `#` for each fact: longer ones first, since one may be a part of another."""
    text = _UNIT.sub(r"\1", text)
    for fact in sorted(set(facts), key=len, reverse=True):
        text = text.replace(fact.removeprefix("link to "), "#")
    return " ".join(text.split())


# --- comparing two ------------------------------------------------------------------------------------------


def _header_problems(there: str, here: str) -> Iterator[str]:
    """Every field of the header is this version's."""
    try:
        found, expected = _fields(there), _fields(here)
    except (ValueError, yaml.YAMLError) as error:
        yield f"the header cannot be read: {' '.join(str(error).split())[:_SHOWN]}"
        return
    for name, value in found.items():
        if name not in expected:
            yield f"the header has {name}, which follows from no artefact"
        elif value != expected[name]:
            yield f"the header's {name} is {str(value)[:_SHOWN]}; expected {str(expected[name])[:_SHOWN]}"


def _fields(text: str) -> dict[str, Any]:
    """The header's fields, read within bounds: flat enough, no alias, none twice.

    Raises:
        ValueError: it is not such a header.
        YAMLError: it is no YAML.
    """
    depth = 0
    if len(text) > LIMITS.yaml_bytes:
        raise ValueError(f"it has more than {LIMITS.yaml_bytes} characters")
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > LIMITS.yaml_depth:
            raise ValueError("it has an alias, or is nested too deep")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if len(set(map(str, names))) != len(names):
        raise ValueError("it has a field twice")
    data = yaml.safe_load(text)
    if not isinstance(data, dict):
        raise ValueError("it has no fields")  # noqa: TRY004 - of a document, not of an argument
    return {str(name): value for name, value in data.items()}


def _markup(there: _Card, here: _Card) -> Iterator[str]:
    """No HTML and no block of code that this version's card does not have."""
    known = "\n".join(map(_plain, here.lines))
    fenced = {line for line in there.code if line}
    for number, line in enumerate(there.lines, there.first):
        if line.strip() in fenced:
            continue
        for tag in _TAG.findall(re.sub(r"\\.|`[^`]*`", " ", line)):
            if tag not in _OUR_TAGS and tag not in known:
                yield f"line {number}: {tag[:_SHOWN]} is markup that this card does not have"
        if line.startswith(("    ", "\t")) and line.strip() and _plain(line).strip() not in known:
            yield f"line {number}: {line.strip()[:_SHOWN]} is a block of code that this card does not have"
    if there.blocks > here.blocks:
        yield f"it has {there.blocks} blocks of code; expected {here.blocks}"


def _files(there: _Card, here: _Card) -> Iterator[str]:
    """Every file that is named is one of a release, or is named by this version's card."""
    known = {name for line in here.lines for name in _FILE.findall(_plain(line))} | filenames.ALL
    for number, line in enumerate(there.lines, there.first):
        for name in _FILE.findall(_plain(line)):
            if name not in known:
                yield f"line {number}: {name[:_SHOWN]} is no file of the release"


def _columns(there: _Card, here: _Card) -> Iterator[str]:
    """No table has this version's columns in another order."""
    known = {row.columns for row in here.statements if row.columns}
    for row in there.statements:
        if row.columns and row.columns not in known:
            others = [one for one in known if Counter(one) == Counter(row.columns)]
            if others:
                yield f"line {row.line}: the columns are {', '.join(row.columns)}; expected {', '.join(others[0])}"


def _same_words(there: _Card, here: _Card) -> Iterator[str]:
    """Where a statement has the very words of one of this version's, or a row its title, it has the facts too."""
    by_words: dict[tuple[str, str], list[Statement]] = {}
    by_title: dict[tuple[tuple[str, ...], str], list[Statement]] = {}
    for known in here.statements:
        by_words.setdefault((known.kind, known.words), []).append(known)
        if known.kind == "row":
            by_title.setdefault(_title(known), []).append(known)
    for made in there.statements:
        others = by_words.get((made.kind, made.words), [])
        if others and made.facts not in {other.facts for other in others}:
            yield _instead(made, others)
        rows = by_title.get(_title(made), []) if made.kind == "row" else []
        if rows and not any(_fits(made, row) for row in rows):
            yield _instead(made, rows)


def _title(row: Statement) -> tuple[tuple[str, ...], str]:
    return row.columns, row.text.partition(" | ")[0]


def _fits(made: Statement, row: Statement) -> bool:
    """Each cell has facts of the other's, and some where that has some."""
    pairs = zip(made.cells, row.cells, strict=False)
    return len(made.cells) == len(row.cells) and all(_within(a, b) >= 0 and (a or not b) for a, b in pairs)


def _instead(made: Statement, others: Sequence[Statement]) -> str:
    wanted = list(dict.fromkeys(fact for other in others for fact in other.facts))
    other = [fact for fact in made.facts if fact not in wanted]
    if other:
        return f"{made}: {', '.join(other)} instead of {', '.join(f for f in wanted if f not in made.facts) or 'none'}"
    return f"{made}: other figures than {', '.join(wanted[:_NAMED]) or 'none'}, or in another order"


def _sections(there: _Card, here: _Card) -> Iterator[tuple[list[Statement], list[Statement]]]:
    """The statements of both, section by section where the headings are known, else all at once."""
    made, known = _by_heading(there), _by_heading(here)
    if made is None or known is None or not made.keys() <= known.keys():
        yield there.statements, here.statements
        return
    for heading, statements in known.items():
        yield made.get(heading, []), statements


def _by_heading(card: _Card) -> dict[str, list[Statement]] | None:
    """The statements by heading; None where two headings are the same."""
    found: dict[str, list[Statement]] = {"": []}
    heading = ""
    for place, statement in enumerate(card.statements):
        if place in card.headings:
            heading = card.headings[place]
            if heading in found:
                return None
            found[heading] = []
        found[heading].append(statement)
    return found


def _in_order(made: Sequence[Statement], known: Sequence[Statement]) -> tuple[list[str], list[Statement]]:
    """Return what is not found in its place among the known statements, and the known ones that nothing was found of.

    The facts of one statement are found within one known statement of the same kind, and never before what was found
    last.
    """
    problems, found = [], set[int]()
    place, offset = 0, 0
    for statement in made:
        if not statement.facts:
            continue
        start = offset
        for number in range(place, len(known)):
            other = known[number]
            end = _within(statement.facts, other.facts[start:]) if other.kind == statement.kind else -1
            if end >= 0:
                place, offset = number, start + end
                found.add(number)
                break
            start = 0
        else:
            problems.append(_unfound(statement, known))
    flat = [[fact for one in every for fact in one.facts] for every in (made, known)]
    if problems and flat[0] == flat[1]:
        return [], []
    return problems, [one for number, one in enumerate(known) if one.facts and number not in found]


def _within(facts: Sequence[str], others: Sequence[str]) -> int:
    """Return how many of `others` it takes to find all of `facts` among them in order; -1 where they are not there."""
    place = 0
    for fact in facts:
        while place < len(others) and others[place] != fact:
            place += 1
        if place == len(others):
            return -1
        place += 1
    return place


def _unfound(statement: Statement, known: Sequence[Statement]) -> str:
    there = {fact for other in known for fact in other.facts}
    strange = [fact for fact in statement.facts if fact not in there]
    if strange:
        return f"{statement}: {', '.join(strange)} follows from no artefact"
    return f"{statement}: {', '.join(statement.facts)} stands elsewhere on the card that the artefacts give"


def _other_code(there: _Card, here: _Card) -> Iterator[str]:
    """Lines of code, and commands within the text, that this version's card does not have."""
    known = Counter(here.code)
    yield from (Counter(there.code) - known).elements()
    spans = {span for line in here.lines for span in _SPAN.findall(line)}
    for line in there.lines:
        if line.strip() not in there.code:
            yield from (span for span in _SPAN.findall(line) if " " in span.strip() and span not in spans)


# --- charts -----------------------------------------------------------------------------------------------

_ACTIVE: Final = re.compile(
    r"<\s*(script|foreignObject|image|a|use|iframe|animate|set)\b|href|\bon\w+\s*=|<!|url\s*\(|@import", re.IGNORECASE
)
_STYLE: Final = re.compile(r"<style>[^<]*</style>")
_LABEL: Final = re.compile(r">([^<]*)")


def chart_problems(chart: str, expected: str) -> list[str]:
    """Return what an SVG file of another version says that this version's does not: numbers, or anything active."""
    active = _ACTIVE.search(chart)
    if active:
        return [f"it holds {active[0]}, which no chart of this tool does"]
    there, here = (Counter(_numbers(text)) for text in (chart, expected))
    return [f"{number} follows from no artefact" for number in there - here]


def _numbers(chart: str) -> Iterator[str]:
    for label in _LABEL.findall(_STYLE.sub("", chart)):
        yield from _facts(html.unescape(label))
