"""A browser, and the pages that are looked at in it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from publisher.records.filenames import CARD
from publisher.release.evidence import read_release
from publisher.release.report import render_report
from tests.browser.chromium import Browser, Open, Page, running

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 860px; margin: 24px auto; padding: 0 16px;
  background: light-dark(#fff, #0b0f19); color: light-dark(#1f2328, #e6edf3) }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border: 1px solid #8886; padding: 4px 10px }
img { max-width: 100% }
pre { overflow-x: auto; background: #8882; padding: 12px; border-radius: 6px } code { font-size: .9em }
a { color: light-dark(#0969da, #58a6ff) }
"""


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="session")
def staged(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo's staged tree, to put pages beside it."""
    folder = tmp_path_factory.mktemp("seen") / "demo"
    shutil.copytree(demo_run / "dist" / "demo", folder)
    return folder


@pytest.fixture(scope="session")
def report(staged: Path) -> Path:
    """The report's page."""
    page = staged.parent / "demo.html"
    page.write_text(render_report(read_release(None, staged, staged=None)), encoding="utf-8")
    return page


@pytest.fixture(scope="session")
def card(staged: Path) -> Path:
    """The card as HTML, beside its charts."""
    body = (staged / CARD).read_text(encoding="utf-8").split("---\n", 2)[2]
    html = MarkdownIt("commonmark").enable("table").render(body)
    viewport = '<meta name="viewport" content="width=device-width">'
    head = f'<!doctype html><meta charset="utf-8">{viewport}<style>{_STYLE}</style>'
    page = staged / "card.html"
    page.write_text(f"{head}<title>card</title>{html}", encoding="utf-8")
    return page


@pytest.fixture
def opened(browser: Browser) -> Open:
    """`opened(file, width=…, height=…, dark=…)`: a page."""
    return lambda file, **window: Page.opened(browser, file, **window)
