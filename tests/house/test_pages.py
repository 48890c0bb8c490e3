"""The pages: every link leads to something that is there, and the index leads to every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)\s]*)\)|!\[[^\]]*\]\((?!https?:)([^)\s]*)\)")
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return the page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Return the links of the page to files of this repository, or places in them, that are not there."""
    links = [first or second for first, second in LINK.findall(prose(page))]
    found = []
    for link in links:
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_something_that_is_there(page: Path) -> None:
    assert broken(page) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One, two\n\n[a](#one-two) [b](page.md#one-two) [c](#three) [d](other.md) ![e](no.png)\n")
    assert broken(page) == ["#three", "other.md", "no.png"]


def test_the_index_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((\S+?\.md)\)", prose(ROOT / "docs/README.md")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked
