"""A browser, and the pages that are looked at in it."""

import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt

from publisher.artefacts import CARD, EXTRACTION, VERIFICATION
from publisher.dossier import dossier
from publisher.figures import Pair, set_figures
from publisher.files import packaged_folder
from publisher.pipeline import Run, run
from publisher.progress import silent
from publisher.records import Extraction, Kind, Verification
from publisher.report import render_report
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


KINDS: tuple[tuple[Kind, int], ...] = (("noul", 2), ("choice", 5), ("score", 7))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="session")
def staged(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's staged tree, with a verification whose figures are made up."""
    folder = tmp_path_factory.mktemp("seen")
    shutil.copytree(demo_run / "dist", folder / "dist")
    shutil.copytree(demo_run / "demo", folder / "demo", symlinks=True)
    staged = folder / "dist" / "demo"
    extraction = Extraction.read(staged / EXTRACTION)
    made_up(extraction).write(staged / VERIFICATION)
    with chdir(folder):
        manifest = packaged_folder("manifests") / "demo.yaml"
        run(Run(manifest, Path("dist"), device="cpu", first="card", last="card"), silent)
    return staged


def made_up(extraction: Extraction) -> Verification:
    """Answers drawn at random, the candidate's near the reference's."""
    draw = np.random.default_rng(3)
    pairs = []
    for index in range(400):
        kind, options = KINDS[index % 3]
        ours = draw.normal(size=options) * 2
        theirs = ours + draw.normal(size=options) * 10.0 ** draw.uniform(-3, -1)
        pairs.append(Pair(str(index), "q", kind, "made up", ours, theirs, gold=int(draw.integers(options))))
    return Verification(
        path=extraction.path,
        adapter_sha256=extraction.summary.adapter.sha256,
        runner="decision",
        device="cpu",
        dtype="bfloat16",
        packages={},
        sets=(set_figures("Made-up set", pairs), set_figures("Its first hundred", pairs[:100])),
    )


@pytest.fixture(scope="session")
def report(staged: Path) -> Path:
    """The report's page."""
    page = staged.parent / "demo.html"
    page.write_text(render_report(dossier(None, staged, staged=None)), encoding="utf-8")
    return page


@pytest.fixture(scope="session")
def card(staged: Path) -> Path:
    """The card as HTML, beside its pictures."""
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
