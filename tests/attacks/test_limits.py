"""The bounds of what is foreign stand in one table, which the docs print."""

import re
from dataclasses import asdict
from pathlib import Path

from publisher.border.limits import LIMITS

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")


def test_the_page_prints_every_limit_as_the_code_has_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| \S", PAGE.partition("## Limits")[2], flags=re.MULTILINE)
    assert {name: int(value.replace(",", "")) for name, value in rows} == asdict(LIMITS)
    assert len(rows) == len(asdict(LIMITS))
