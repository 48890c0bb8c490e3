"""A card of another version, held against the evidence by meaning: its figures, digests, links and code.

Another version words the card otherwise, so that its bytes prove nothing. But both cards say the same things of the
same evidence, in the same order. So the card that this version would render is taken apart into statements (a row of a
table, an item of a list, a paragraph, a block of code), and so is the card that is there. Whatever stands for a fact
in a statement (a figure, a digest, a commit, a link, a dtype) must stand in this version's card too: in one statement,
in that order, and where the words around it are the same, in the same place. docs/audit.md says what that proves.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from publisher import __version__
from publisher.audits.statements import SHOWN, STAMP, Card, Statement, plain
from publisher.border.files import read_text
from publisher.border.limits import LIMITS
from publisher.records import filenames
from publisher.release.card import stamp

_TAG: Final = re.compile(r"<[A-Za-z/!?][^>]*>?")
_SPAN: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FILE: Final = re.compile(r"[\w./-]+\.(?:safetensors|jsonl?|ya?ml|svg|gguf|sig|bin|pt|pth|ckpt|npz|zip|py|sh|exe)\b")
_OUR_TAGS: Final = frozenset({"<details>", "</details>", "<summary>", "</summary>"})
_NAMED = 5  # statements in a remark


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
    if found := STAMP.fullmatch(last):
        return "" if last == stamp() else f"publisher {found[1]}, card {found[2]}"
    return "" if __version__ in made else f"publisher {', '.join(sorted(made))}"


def compared(card: str, expected: str) -> Comparison:
    """Return how a card compares by meaning with the one that this version renders from the same evidence.

    Args:
        card: README.md as it was published.
        expected: README.md as this version renders it.
    """
    there, here = Card.of(card), Card.of(expected)
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


# --- comparing two ------------------------------------------------------------------------------------------


def _header_problems(there: str, here: str) -> Iterator[str]:
    """Yield each field of the header that is not this version's."""
    try:
        found, expected = _fields(there), _fields(here)
    except (ValueError, yaml.YAMLError) as error:
        yield f"the header cannot be read: {' '.join(str(error).split())[:SHOWN]}"
        return
    for name, value in found.items():
        if name not in expected:
            yield f"the header has {name}, which follows from no artefact"
        elif value != expected[name]:
            yield f"the header's {name} is {str(value)[:SHOWN]}; expected {str(expected[name])[:SHOWN]}"


def _fields(text: str) -> dict[str, Any]:
    """Read the header's fields within bounds: flat enough, without an alias, none twice.

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


def _markup(there: Card, here: Card) -> Iterator[str]:
    """Yield HTML and blocks of code that this version's card does not have."""
    known = "\n".join(map(plain, here.lines))
    fenced = {line for line in there.code if line}
    for number, line in enumerate(there.lines, there.first):
        if line.strip() in fenced:
            continue
        for tag in _TAG.findall(re.sub(r"\\.|`[^`]*`", " ", line)):
            if tag not in _OUR_TAGS and tag not in known:
                yield f"line {number}: {tag[:SHOWN]} is markup that this card does not have"
        if line.startswith(("    ", "\t")) and line.strip() and plain(line).strip() not in known:
            yield f"line {number}: {line.strip()[:SHOWN]} is a block of code that this card does not have"
    if there.blocks > here.blocks:
        yield f"it has {there.blocks} blocks of code; expected {here.blocks}"


def _files(there: Card, here: Card) -> Iterator[str]:
    """Yield files that are named and are neither of a release nor named by this version's card."""
    known = {name for line in here.lines for name in _FILE.findall(plain(line))} | filenames.ALL
    for number, line in enumerate(there.lines, there.first):
        for name in _FILE.findall(plain(line)):
            if name not in known:
                yield f"line {number}: {name[:SHOWN]} is no file of the release"


def _columns(there: Card, here: Card) -> Iterator[str]:
    """Yield tables that have this version's columns in another order."""
    known = {row.columns for row in here.statements if row.columns}
    for row in there.statements:
        if row.columns and row.columns not in known:
            others = [one for one in known if Counter(one) == Counter(row.columns)]
            if others:
                yield f"line {row.line}: the columns are {', '.join(row.columns)}; expected {', '.join(others[0])}"


def _same_words(there: Card, here: Card) -> Iterator[str]:
    """Yield statements that have the very words of one of this version's, or rows its title, and other facts."""
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
    """Return whether each cell has facts of the other's, and some where that has some."""
    pairs = zip(made.cells, row.cells, strict=False)
    return len(made.cells) == len(row.cells) and all(_within(a, b) >= 0 and (a or not b) for a, b in pairs)


def _instead(made: Statement, others: Sequence[Statement]) -> str:
    wanted = list(dict.fromkeys(fact for other in others for fact in other.facts))
    other = [fact for fact in made.facts if fact not in wanted]
    if other:
        return f"{made}: {', '.join(other)} instead of {', '.join(f for f in wanted if f not in made.facts) or 'none'}"
    return f"{made}: other figures than {', '.join(wanted[:_NAMED]) or 'none'}, or in another order"


def _sections(there: Card, here: Card) -> Iterator[tuple[list[Statement], list[Statement]]]:
    """Yield the statements of both, section by section where the headings are known, else all at once."""
    made, known = _by_heading(there), _by_heading(here)
    if made is None or known is None or not made.keys() <= known.keys():
        yield there.statements, here.statements
        return
    for heading, statements in known.items():
        yield made.get(heading, []), statements


def _by_heading(card: Card) -> dict[str, list[Statement]] | None:
    """Return the statements by heading; None where two headings are the same."""
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


def _other_code(there: Card, here: Card) -> Iterator[str]:
    """Yield lines of code, and commands within the text, that this version's card does not have."""
    known = Counter(here.code)
    yield from (Counter(there.code) - known).elements()
    spans = {span for line in here.lines for span in _SPAN.findall(line)}
    for line in there.lines:
        if line.strip() not in there.code:
            yield from (span for span in _SPAN.findall(line) if " " in span.strip() and span not in spans)
