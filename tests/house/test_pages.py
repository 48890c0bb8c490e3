"""The pages: every link leads to something that is there, and the index leads to every page."""

import re
from pathlib import Path

import pytest

import publisher

ROOT = Path(__file__).parents[2]
PACKAGE = Path(publisher.__file__).parent  # the sources, or what the wheel has installed
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)\s]*)\)|!\[[^\]]*\]\((?!https?:)([^)\s]*)\)")
ELSEWHERE = {  # what a page names of another version, another project, or the reader
    "cluster.md: benchmarks/scale.py",
    "local-hub.md: tests/test_hf_api.py",
    "manifest.md: manifests/tuned.yaml",
}
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return the page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def is_there(name: str) -> bool:
    """Return whether a path that a page names leads to something, in this checkout or in the installed package."""
    inside = name.removeprefix("publisher/")
    return (ROOT / name).exists() or (inside != name and (PACKAGE / inside).exists())


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


def test_every_file_that_a_page_names_is_there() -> None:
    folders = "publisher|tests|benchmarks|templates|requirements|schemas|manifests|examples"
    path = re.compile(rf"(?<![\w/])(?:{folders})/[\w/.-]*\w(?![\w*])")
    missing = {
        f"{page.name}: {name}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in path.findall(page.read_text(encoding="utf-8"))
        if not is_there(name)
    }
    assert missing == ELSEWHERE


def test_the_threat_model_names_files_that_are_there() -> None:
    text = prose(ROOT / "SECURITY.md")
    named: list[str] = []
    for cell in re.findall(r"(?:`[\w./]+`(?:, |; | ))*`[\w./]+`", text):
        folder = ""
        for name in re.findall(r"`([\w./]+)`", cell):
            path = name if "/" in name else f"{folder}/{name}"
            folder = str(Path(path).parent)
            if path.startswith(("publisher/", "tests/", "requirements", ".github/")):
                named.append(path)
    assert len(named) > 20
    assert [path for path in named if not is_there(path)] == []


def test_the_map_of_contributing_is_what_the_package_holds() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = set(re.findall(r"^    (\w+/|\w+\.py) +\S", text, flags=re.MULTILINE))
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms - {"errors.py"} == there


def test_the_answers_of_contributing_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:which|how|what|where|whether) .*\| (.*) \|$", text, flags=re.MULTILINE)
    places = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    assert len(rows) >= 10
    assert [place for place in places if not is_there(f"publisher/{place}") and not is_there(place)] == []


def test_the_pages_that_code_and_templates_name_are_there() -> None:
    folders = [(PACKAGE, "*.py"), (ROOT / "templates", "*.j2"), (ROOT / "benchmarks", "*.py")]
    sources = [path for folder, kind in folders for path in folder.rglob(kind)]
    named = {name for path in sources for name in re.findall(r"docs/[\w-]+\.\w+", path.read_text(encoding="utf-8"))}
    assert named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
