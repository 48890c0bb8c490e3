"""Releases of every version since 0.1 audit green for ever, whatever the templates say now; an edited figure does not.

tests/make_release.py made those in tests/releases/, each by the version in its name. The templates are the present
ones, or copies with other words in every section.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from publisher import __version__
from publisher.audits import audit
from publisher.audits.adapter import Adapter
from publisher.audits.chart_meaning import chart_problems
from publisher.audits.checks import UncheckedError
from publisher.audits.evidence import charts, digests, evidence, figures, verification
from publisher.audits.meaning import Comparison, compared
from publisher.audits.release import Release, card, open_release
from publisher.errors import AuditError, PublisherError
from publisher.manifest.reading import load_manifest
from publisher.records.files import canonical_json, packaged_folder
from publisher.records.progress import silent
from publisher.release.card import render_card
from publisher.release.evidence import load_evidence
from tests.make_release import KINDS, RELEASES, make

EVERY = sorted(path.name for path in RELEASES.iterdir())
FIGURE = re.compile(r"(?<![\w.])[<>]?[+-]?\d[\d.,]*(?:e-\d+)?%?(?!\w)")
UNTOLD = {("file", "size"), ("p99_kl",)}  # of a test set: on no card, and they follow from nothing that is published
OTHER_WORDS = {
    "lora_card.md.j2": {
        "| Path | Model | Source | Base | Adapter |": "| Where | Which | Fine-tune | Foundation | Changed |",
        "is a PEFT LoRA in": "holds a LoRA for PEFT, stored as",
        "A checkpoint without a link": "What has no link",
        "## Extraction": "## How it was taken out",
        "For each linear module, delta is": "Delta is, in every linear layer,",
        "Relative error (least / median / greatest)": "What the factors miss, relative to the update",
        "Left by merge rounding alone": "Of this, rounding explains",
        "Weights restored bit for bit": "Identical weights",
        "Parameters": "Numbers in A and B",
        "**The {{ item.variant.label }} adapter is an approximation.**": "**An approximation.**",
        "Merging rounded the release's weights": "The release's weights were rounded when they were merged",
        "Whole in the": "Carried unchanged by the",
        "Not in the": "Left out of the",
        "No verification was run for": "Nobody has yet tried",
        "Base + adapter against the released model": "The adapter on its base beside the release",
        "## Licence": "## Terms of use",
    },
    "verification_tables.md.j2": {"| Answers changed | Max KL |": "| Other answers | Greatest KL |"},
    "loaders.md.j2": {"| Loader | Rules of |": "| Program | As of |", "Executed:": "Where it says executed:"},
}


# every fifth figure in `make test`, each of them in `make test-long`
some_and_all = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])


def opened_anew(release: Path) -> Release:
    return open_release(str(release), silent, scratch=Path(tempfile.mkdtemp()))


@pytest.fixture(params=EVERY)
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a kept release; its base is beside it, where its manifest says."""
    return _copied(request.param, tmp_path, monkeypatch)


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return _copied("0.1.0-verified", tmp_path, monkeypatch)


@pytest.fixture(params=["present words", "other words"])
def templates(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the templates that come with this tool say."""
    if request.param == "other words":
        _reword(tmp_path, monkeypatch)
    return str(request.param)


def _copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(RELEASES / name, tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    return Path("release")


def _reword(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(packaged_folder("templates"), tmp_path / "templates")
    for name, words in OTHER_WORDS.items():
        file = tmp_path / "templates" / name
        text = file.read_text(encoding="utf-8")
        for here, other in words.items():
            assert here in text, f"{name} does not say: {here}"
            text = text.replace(here, other)
        file.write_text(text, encoding="utf-8")
    for module in ("publisher.release.card", "publisher.audits.release"):
        monkeypatch.setattr(f"{module}.packaged_folder", lambda folder: tmp_path / folder)


def cards(release: Path) -> tuple[str, str]:
    """The card that was published, and the one that would be rendered now."""
    manifest = load_manifest(release / "manifest.yaml")
    now = render_card(manifest, load_evidence(manifest, release), beside=packaged_folder("templates"))
    return (release / "README.md").read_text(encoding="utf-8"), now


def card_of(release: Path) -> str:
    return card(opened_anew(release))


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


# --- green --------------------------------------------------------------------------------------------------


def test_a_release_of_before_has_no_failed_check(kept: Path) -> None:
    found = audit(str(kept), deep=False, work=Path("work"), device="cpu", progress=silent)
    assert [f"{check.name}: {check.detail}" for check in found.failed] == []


def test_its_card_holds_by_meaning_when_the_templates_use_other_words(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _reword(tmp_path, monkeypatch)
    assert "wording not compared" in card_of(kept)
    there, now = cards(kept)
    assert compared(there, now) == Comparison((), (), (), compared(there, there).facts)


def test_every_version_keeps_a_release_of_every_kind() -> None:
    assert {f"{__version__}-{kind}" for kind in KINDS} <= set(EVERY)
    sizes = {
        name: sum(file.stat().st_size for file in (RELEASES / name).rglob("*") if file.is_file()) for name in EVERY
    }
    assert [name for name, size in sizes.items() if size > 150_000] == []


def test_a_kept_release_is_never_made_again() -> None:
    with pytest.raises(FileExistsError, match="never made again"):
        make("svd", RELEASES)


def test_a_card_says_who_rendered_it_and_what_it_does_not_state(verified: Path, templates: str) -> None:
    edit(verified / "README.md", "| Method | exact svd |\n| Made by ", "| Made by ")
    edit(verified / "README.md", "| Parameters | 1,728 |\n", "")
    told = card_of(verified)
    assert told.startswith(f"rendered by publisher 0.1.0 (this is {__version__}): wording not compared")
    assert "besides:\n- line " in told
    assert "1,728" in told
    assert templates


# --- one edited figure --------------------------------------------------------------------------------------


@some_and_all
def test_a_card_with_any_one_figure_altered_is_noticed(kept: Path, templates: str, every: int) -> None:
    there, now = cards(kept)
    assert not compared(there, now).problems
    places = list(FIGURE.finditer(there.partition("<!--")[0]))
    assert len(places) > 20
    for place in places[::every]:
        number = place[0]
        other = re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), number)
        text = there[: place.start()] + other + there[place.end() :]
        assert compared(text, now).problems, f"{number} as {other} with {templates}"


@some_and_all
def test_two_figures_of_a_card_that_change_places_are_noticed(kept: Path, templates: str, every: int) -> None:
    there, now = cards(kept)
    places = [place for place in FIGURE.finditer(there.partition("<!--")[0]) if "%" in place[0] or "." in place[0]]
    pairs = [
        (a, b) for n, a in enumerate(places) for b in places[n + 1 : n + 8] if a[0].strip(".,") != b[0].strip(".,")
    ]
    assert len(pairs) > 20
    for a, b in pairs[:: 5 * every - 4]:
        text = there[: a.start()] + b[0] + there[a.end() : b.start()] + a[0] + there[b.end() :]
        assert compared(text, now).problems, f"{a[0]} and {b[0]} with {templates}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("library_name: peft\n", "library_name: peft\nmodel-index: [{accuracy: 0.99}]\n"),
        ("license: apache-2.0\n", "license: mit\n"),
        ("license: apache-2.0\n", "license: mit\nlicense: apache-2.0\n"),
        ("pipeline_tag: text-generation\n", "pipeline_tag: text-classification\n"),
        ("- peft\n", "- peft\n- gold-medal\n"),
        ("library_name: peft\n", "library_name: &a [peft]\nx: [*a, *a]\n"),
        ("## Licence\n", "## Benchmarks\n\n| | MMLU |\n|---|---|\n| Tiny | 91.2% |\n\n## Licence\n"),
        ("## Licence\n", "It is 91.2% right.\n\n## Licence\n"),
        ("## Licence\n", "It is \uff19\uff11% right.\n\n## Licence\n"),
        ("## Licence\n", "It is &#57;1% right.\n\n## Licence\n"),
        ("## Licence\n", "Weights restored bit for bit: 100%.\n\n## Licence\n"),
        ("## Licence\n", "<b>It is right.</b>\n\n## Licence\n"),
        ("## Licence\n", "<!-- hidden -->\n\n## Licence\n"),
        ("## Licence\n", "See [the site](https://example.org).\n\n## Licence\n"),
        ("## Licence\n", "See [the site].\n\n[the site]: https://example.org\n\n## Licence\n"),
        ("## Licence\n", "See https://example.org for more.\n\n## Licence\n"),
        ("## Licence\n", "![better](better.svg)\n\n## Licence\n"),
        ("## Licence\n", "```python\nimport os\n```\n\n## Licence\n"),
        ("## Licence\n", "    import os\n\n## Licence\n"),
        ("## Licence\n", "Load `better.safetensors` instead.\n\n## Licence\n"),
        ('"tiny/verified")', '"evil/verified")'),
        ("(errors.svg)", "(other.svg)"),
        ("(errors.svg)", "(https://example.org/errors.svg)"),
        ("in bfloat16 with", "in float32 with"),
        ("| Rank | 4 |", "| Rank | |"),
        ("5.0 kB", "5.0 GB"),
    ],
)
def test_what_is_added_to_a_card_or_altered_in_it_is_noticed(
    verified: Path, templates: str, old: str, new: str
) -> None:
    edit(verified / "README.md", old, new)
    assert templates
    with pytest.raises(AuditError, match="what the artefacts do not give"):
        card_of(verified)


def test_columns_of_a_card_that_change_their_names_are_noticed(verified: Path) -> None:
    edit(verified / "README.md", "| Changed | Mean KL |", "| Mean KL | Changed |")
    with pytest.raises(AuditError, match="the columns are Model, Test set, Questions, Mean KL, Changed"):
        card_of(verified)


def test_rows_of_a_card_that_change_their_titles_are_noticed(verified: Path) -> None:
    edit(verified / "README.md", "| Relative error (least / median / greatest) |", "| X |")
    edit(verified / "README.md", "| Left by merge rounding alone |", "| Relative error (least / median / greatest) |")
    edit(verified / "README.md", "| X |", "| Left by merge rounding alone |")
    with pytest.raises(AuditError, match="what the artefacts do not give"):
        card_of(verified)


def test_code_of_another_version_is_shown_and_not_vouched_for(verified: Path) -> None:
    edit(verified / "README.md", "model.eval()\n", "model.eval()\n__import__('antigravity')\n")
    with pytest.raises(UncheckedError, match="read it before you run it:\n  __import__"):
        card_of(verified)


def test_a_card_of_this_version_is_compared_in_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = _copied(f"{__version__}-svd", tmp_path, monkeypatch)
    (release / "README.md").write_text(cards(release)[1], encoding="utf-8", newline="")
    assert card_of(release).startswith("README.md is what the artefacts give, byte for byte")
    edit(release / "README.md", "It answers nothing.", "It answers everything.")
    with pytest.raises(AuditError, match=r"README\.md is not what the artefacts give"):
        card_of(release)
    edit(release / "README.md", "<!-- Rendered by", "Rendered by")
    with pytest.raises(AuditError, match=r"README\.md is not what the artefacts give"):
        card_of(release)


# --- the artefacts ------------------------------------------------------------------------------------------


def numbers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the numbers of a JSON value are."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from numbers(item, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def rewrite(file: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(canonical_json(data), encoding="utf-8")


def complaints(release: Path) -> list[str]:
    """What the checks say that hold the artefacts against each other and against the card."""
    found = []
    opened = opened_anew(release)
    adapter = Adapter.read("/", release, variant=opened.variant("/"))
    for claim in (evidence, digests, figures, verification):
        try:
            claim(adapter)
        except UncheckedError:
            pass
        except PublisherError as error:
            found.append(error.found)
    try:
        card(opened)
    except PublisherError as error:
        found.append(error.found)
    return found


@pytest.mark.parametrize(("file", "part"), [("extraction.json", "summary"), ("verification.json", "sets")])
@some_and_all
def test_an_artefact_with_any_one_figure_altered_is_noticed(
    verified: Path, templates: str, file: str, part: str, *, every: int
) -> None:
    kept = (verified / file).read_bytes()
    places = [path for path in numbers(json.loads(kept)[part], (part,)) if path[2:] not in UNTOLD]
    assert len(places) > 8
    assert not complaints(verified)
    for path in places[::every]:

        def alter(data: Any, path: tuple[str | int, ...] = path) -> None:
            for key in path[:-1]:
                data = data[key]
            number = data[path[-1]]
            data[path[-1]] = number + 1 if isinstance(number, int) else float(f"{1.07 * number or 0.07:.6g}")

        rewrite(verified / file, alter)
        assert complaints(verified), f"{path} with {templates}"
        (verified / file).write_bytes(kept)


def test_an_artefact_that_lacks_fields_of_later_versions_is_read(verified: Path) -> None:
    def older(data: Any) -> None:
        del data["summary"]["exports"], data["summary"]["fp8"], data["settings"]["exports"]

    rewrite(verified / "extraction.json", older)
    adapter = Adapter.read("/", verified, variant=opened_anew(verified).variant("/"))
    assert evidence(adapter).endswith("of before there was exports, fp8, which it lacks")
    assert not complaints(verified)


def test_an_artefact_of_a_newer_schema_is_not_checked_and_the_audit_says_so(verified: Path) -> None:
    def newer(data: Any) -> None:
        data["schema_version"], data["summary"] = 2, {"all": "new"}

    rewrite(verified / "extraction.json", newer)
    rewrite(verified / "verification.json", newer)
    found = audit(str(verified), deep=False, work=Path("work"), device="cpu", progress=silent)
    told = {check.name: check for check in found.checks}
    assert [check.name for check in found.failed] == []
    assert told["evidence"].status == told["card"].status == "not checked"
    assert "extraction.json was made by a newer version (schema 2;" in told["evidence"].detail
    assert "update this tool" in told["evidence"].detail


def test_a_field_that_nobody_knows_is_a_newer_versions_or_an_edit(verified: Path) -> None:
    rewrite(verified / "extraction.json", lambda data: data["summary"].update(stars=5))
    adapter = Adapter.read("/", verified, variant=None)
    with pytest.raises(PublisherError, match="stars"):
        evidence(adapter)
    rewrite(verified / "extraction.json", lambda data: data["tools"].update(publisher="99.1.0"))
    with pytest.raises(UncheckedError, match=r"newer version \(publisher 99\.1\.0;"):
        evidence(adapter)


# --- charts -----------------------------------------------------------------------------------------------


def test_a_chart_of_another_version_may_be_drawn_otherwise_and_say_nothing_else(verified: Path) -> None:
    edit(verified / "errors.svg", 'y="20"', 'y="21"')
    adapter = Adapter.read("/", verified, variant=opened_anew(verified).variant("/"))
    with pytest.raises(UncheckedError, match=r"drawn by publisher 0\.1\.0: the numbers on errors\.svg follow"):
        charts(adapter)
    edit(verified / "errors.svg", ">below 0.5<", ">below 0.1<")
    with pytest.raises(AuditError, match=r"errors\.svg: 0\.1 follows from no artefact"):
        charts(adapter)


@pytest.mark.parametrize(
    "active",
    ["<script>alert()</script>", '<rect onload="alert()"/>', '<image href="https://example.org"/>', "<!ENTITY a 'b'>"],
)
def test_a_chart_that_does_anything_is_noticed(verified: Path, active: str) -> None:
    drawn = (verified / "errors.svg").read_text(encoding="utf-8")
    assert not chart_problems(drawn, drawn)
    assert "which no chart of this tool does" in chart_problems(drawn.replace("</svg>", f"{active}</svg>"), drawn)[0]
