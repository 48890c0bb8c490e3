"""Results as a wide terminal, a narrow one and a pipe show them."""

import io
import re

import pytest
from rich.console import Console

from publisher.cli.console import show_audit, show_outcome, show_plan
from publisher.records.audit import Audit, Check
from publisher.records.outcome import Outcome, VariantOutcome
from publisher.records.publication import CommitPlan, Operation
from tests.factories import a_set, agreement, extraction, module, verification

OUTCOME = Outcome(
    manifest="m.yaml",
    staged="dist/m",
    stages=("extract",),
    variants=(
        VariantOutcome(
            path="/",
            label="A model with a long name (27B)",
            reused=("extract",),
            summary=extraction([module("layers.0.fc")]).summary,
            validation=None,
            verification=verification(a_set("A set", agreement("choice", mean=1e-5, most=1e-2)), fp8=True),
        ),
    ),
    card_changed=True,
    signature=None,
    plan=CommitPlan(
        repo="owner/name",
        parent=None,
        compared_with="a new repository",
        operations=(Operation(path="README.md", size=4200, sha256="0" * 64, change="added"),),
    ),
    push=None,
)
AUDIT = Audit(
    repo="owner/name",
    revision=None,
    checks=(
        Check(name="files", variant="", status="passed", detail="8 files of the release, and a good many words more"),
        Check(name="card", variant="small/", status="failed", detail="README.md is not what it should be\nline\nline"),
    ),
)


def terminal(width: int, *, colour: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system="truecolor" if colour else None)


def pipe() -> Console:
    return Console(file=io.StringIO())


def text(console: Console) -> str:
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_wide_terminal_gets_tables() -> None:
    console = terminal(120)
    show_outcome(OUTCOME, console)
    assert re.search(r"variant +linears +layers +relative error +bit for bit +adapter", text(console))
    assert re.search(r"long name \(27B\) +1 +0-1 of 2 +2\.00% / 2\.00% / 2\.00% +80\.00% +1 B", text(console))
    assert re.search(r"added +README.md +4.2 kB +0{12}", text(console))


def test_a_terminal_of_forty_columns_gets_lists_and_no_longer_line_and_nothing_is_lost() -> None:
    console = terminal(40)
    show_outcome(OUTCOME, console)
    show_audit(AUDIT, console)
    lines = text(console).splitlines()
    assert max(map(len, lines)) <= 40
    joined = " ".join(text(console).split())
    assert "linears 1 layers 0-1 of 2 relative error 2.00% / 2.00% / 2.00% bit for bit 80.00% adapter 1 B" in joined
    assert "test set A set, FP8 base" in joined
    assert "added README.md 4.2 kB 000000000000" in joined
    assert "check files result passed seen 8 files of the release, and a good many words more" in joined
    assert "…" not in joined


def test_a_pipe_gets_no_codes_and_its_paragraphs_whole() -> None:
    console = pipe()
    show_outcome(OUTCOME, console)
    show_audit(AUDIT, console)
    assert "\x1b" not in text(console)
    assert "card written: dist/m/README.md" in text(console)
    assert re.search(r"small/ +card +failed +README.md is not what it should be *\n", text(console))


def test_columns_tells_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console = pipe()
    show_plan(OUTCOME.plan or pytest.fail("no plan"), console)
    show_audit(AUDIT, console)
    assert max(map(len, text(console).splitlines())) <= 40
    assert "\x1b" not in text(console)


def test_no_color_takes_the_colour_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = terminal(120, colour=True)
    show_audit(AUDIT, coloured)
    assert "\x1b[32mpassed" in text(coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = terminal(120, colour=True)
    show_audit(AUDIT, plain)
    assert not re.search(r"\x1b\[[\d;]*3[0-7]m", text(plain))


def test_markup_in_a_label_is_shown_as_it_is() -> None:
    label = "[bold red]x[/]"
    variant = OUTCOME.variants[0].model_copy(update={"label": label})
    for width in (40, 200):
        console = terminal(width)
        show_outcome(OUTCOME.model_copy(update={"variants": (variant,)}), console)
        assert label in text(console)
