"""A chart of another version, held against this version's by meaning.

The numbers on it must be those on this version's chart, and nothing in it may act.
"""

import html
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from publisher.audits.statements import facts_in

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
        yield from facts_in(html.unescape(label))
