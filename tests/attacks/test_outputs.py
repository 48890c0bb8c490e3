"""Hostile text in every field of artefacts, manifests and checkpoints: each output shows it, and it does nothing."""

import io
import json
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from xml.etree import ElementTree as ET

import pytest
import yaml
from markdown_it import MarkdownIt
from pydantic import BaseModel
from rich.console import Console
from safetensors.torch import load_file, save_file

from publisher import records
from publisher.border.escape import for_terminal, is_hidden
from publisher.border.names import tensor_name
from publisher.cli.app import main
from publisher.cli.console import (
    progress_on,
    show_audit,
    show_compat,
    show_merged,
    show_module,
    show_outcome,
    show_repaired,
)
from publisher.errors import CardError
from publisher.manifest.reading import parse_manifest
from publisher.manifest.schema import Manifest
from publisher.records.audit import Audit
from publisher.records.explained import Explained
from publisher.records.extraction import Extraction
from publisher.records.files import packaged_folder
from publisher.records.loaders import Judged, Loaders, LoaderVerdict, Repaired
from publisher.records.merged import Merged
from publisher.records.outcome import Outcome
from publisher.records.record import Record
from publisher.records.verification import Verification
from publisher.release.card import card_files, render_card
from publisher.release.evidence import Evidence, ReleaseEvidence, VariantEvidence
from publisher.release.explain import explain
from publisher.release.report import render_report

PAYLOADS = {
    "words": "plain words",
    "escape sequence": "a\x1b]0;PWNED\x07\x1b[31mred\x1b[2J",
    "bell and backspace": "a\x07\x08\x7fb",
    "C1 controls": "a\x9b31m\x9d0;PWNED\x9cb",
    "NUL": "a\x00b",
    "carriage return": "all is well\rerror: nothing",
    "lines": "a\n\n# PWNED\n\n[free](https://evil.example)\n\n- b",
    "bidi override": "a\u202egnp.exe\u2066b\u2069",
    "zero width": "a\u200bb\u2060c\ufeffd\u00ade\U000e0041f\u3164g",
    "separators": "a\u2028b\u2029c\x85d",
    "noncharacters": "a\uffffb\ufffec\ufdd0d",
    "image in a cell": "x` | <img src=x onerror=alert(1)> | **b** `",
    "heading": "# PWNED",
    "link": "[free](https://evil.example) ![p](https://evil.example/p.png) <https://evil.example> https://evil.example",
    "reference": "[free]: https://evil.example",
    "footnote": "[^1] [^1]: note",
    "fence": "``` ~~~ ``",
    "list": "1. - + * > a",
    "underline": "--- === | - |",
    "indented": "\t    code",
    "comment": "a <!-- b --> c <!-- d",
    "entity": "&#27;]0;PWNED&#7; &lt;b&gt; &amp;",
    "template": "{{ 7 * 7 }} {% for x in y %} {# a #} ${7*7}",
    "script": "</script></style></title></svg></code></details><script>alert(1)</script>",
    "attribute": "\" onload=alert(1) x=\" ' onload='alert(1)",
    "emphasis": "**bold** _it_ ~~gone~~ $x$ a_b_c",
    "shell": "'; touch PWNED; echo '$(touch PWNED)`touch PWNED`",
    "backslash": "a\\",
    "rich markup": "[red]a[/red] [link=https://evil.example]b[/link] :warning:",
    "long": "a" * 5_000,
}
every_payload = pytest.mark.parametrize("text", PAYLOADS.values(), ids=PAYLOADS.keys())

MANIFEST = """version: 1
repo: tiny/lora
license: apache-2.0
variants:
  - path: /
    label: Large
    source: {repo: o/tuned, revision: ed3eed331870db2eff4b0db01237128ede8a00ce}
    base: {repo: o/base, revision: c202236235762e1c871ad0ccb60c8ee5ba337b9a}
    model_class: Qwen3_5ForConditionalGeneration
    adapter: {method: exact, rank: auto, dtype: bfloat16, layout: pattern, task_type: FEATURE_EXTRACTION, ignore: [n]}
    expect: {layers: 0-1}
    verification:
      runner: decision
      trust_remote_code: true
      module: head.py
      sets: [{name: A, file: a.jsonl, dataset: {repo: o/set, revision: c202236235762e1c871ad0ccb60c8ee5ba337b9a}}]
    fp8: {repo: o/fp8, revision: c202236235762e1c871ad0ccb60c8ee5ba337b9a}
  - path: small/
    label: Small
    source: {path: src}
    base: {path: base}
    model_class: LlamaForCausalLM
    adapter: {method: svd, rank: 4, dtype: bfloat16, layout: uniform, task_type: CAUSAL_LM, carry: [head]}
card: {template: lora_card.md.j2, title: tiny-lora, summary: A tiny adapter., usage: usage_decision_head.md.j2}
sign: {sigstore: {identity: someone, issuer: "https://issuer.example"}}
"""


# --- records with one text in every field -------------------------------------------------------------------


def filled(kind: Any, text: str) -> Any:
    """A value of this type in which every text, the keys of mappings too, is `text`; nothing optional is left out."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in {Annotated, Union, types.UnionType}:
        return filled(next(one for one in arguments if one is not type(None)), text)
    if origin is Literal:
        return arguments[-1]
    if origin is tuple:
        found = tuple(filled(one, text) for one in arguments if one is not ...)
        return 3 * found if ... in arguments and isinstance(found[0], int) else found  # a shape, the longest there is
    if origin is dict:
        return dict.fromkeys((text, "torch"), filled(arguments[1], text))
    return _record(origin, text) if issubclass(origin, BaseModel) else _plain(text)[origin]


def _record(kind: type[BaseModel], text: str) -> BaseModel:
    kind.model_rebuild()
    fields = {name: filled(field.annotation, text) for name, field in kind.model_fields.items()}
    return kind.model_construct(**fields)  # unchecked: what validation refuses is tried too


def _plain(text: str) -> dict[type, Any]:
    return {str: text, bool: True, int: 3, float: 0.5, Path: Path("folder")}


R = TypeVar("R", bound=Record)


def a(kind: type[R], text: str) -> R:
    made = filled(kind, text)
    assert isinstance(made, kind)
    return made


def _names_a_tensor(text: str) -> bool:
    try:
        tensor_name(text)
    except ValueError:
        return False
    return True


def evidence_of(text: str, *, experts: bool | None = None) -> tuple[Manifest, tuple[VariantEvidence, ...]]:
    """A manifest whose free words are `text`, and evidence in which everything is."""
    found, problems = parse_manifest(Path("m.yaml"), MANIFEST)
    assert found is not None, problems
    variants = tuple(one.model_copy(update={"label": text}) for one in found.variants)
    card = found.card.model_copy(update={"title": text, "summary": text})
    made = a(Extraction, text)
    if not (_names_a_tensor(text) if experts is None else experts):  # what is worked out of them is a record too
        made = made.model_copy(update={"experts": ()})
    settings = made.settings.model_copy(update={"exports": ("gguf", "mlx")})
    summary = made.summary.model_copy(update={"rank": 9})
    modules = tuple(one.model_copy(update={"kernel": (3,)}) for one in made.modules)  # as many as columns
    made = made.model_copy(update={"settings": settings, "summary": summary, "modules": modules})
    verification, loaders = a(Verification, text), a(Loaders, text).verdicts
    manifest = found.model_copy(update={"variants": variants, "card": card})
    return manifest, (
        VariantEvidence(variant=variants[0], extraction=made, verification=verification, loaders=loaders),
        VariantEvidence(variant=variants[1], extraction=made, verification=None, loaders=loaders),
    )


@cache
def files_of(text: str, *, experts: bool | None = None) -> dict[str, str]:
    """The card and its charts; with experts where the text may be a tensor's name, if nothing else is said."""
    return card_files(*evidence_of(text, experts=experts), beside=packaged_folder("templates"))


@cache
def page_of(text: str) -> str:
    """The report."""
    _, evidence = evidence_of(text)
    parts = tuple(Evidence(extraction=item.extraction, verification=item.verification) for item in evidence)
    return render_report(ReleaseEvidence(title=text, summary=text, repo=text, adapters=parts))


# --- what a reader's program makes of an output -------------------------------------------------------------

_WORDS = {"alt", "title", "aria-label", "data-name"}  # attributes that are read, and do nothing
_PLACES = {
    "x",
    "y",
    "width",
    "height",
    "viewbox",
    "d",
    "cx",
    "cy",
    "transform",
}  # in a chart, which has room for long words


class _Page(HTMLParser):
    """The elements of a page with what they do, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        doing = (name if name in _WORDS | _PLACES else f"{name}={value}" for name, value in attrs)
        self.elements.append(" ".join([tag, *doing]))
        self.text += " ".join(value or "" for name, value in attrs if name in _WORDS)

    def handle_endtag(self, tag: str) -> None:
        self.elements.append(f"/{tag}")

    def handle_comment(self, data: str) -> None:
        self.elements.append(f"comment {data}")

    def handle_data(self, data: str) -> None:
        self.text += data


def rendered(card: str) -> _Page:
    """A card as the Hub shows it."""
    body = card.split("\n---\n", maxsplit=1)[1]
    return _Page(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(body))


def hidden(text: str) -> list[str]:
    return sorted({for_terminal(c) for c in set(text) if is_hidden(c) and c != "\n"})


def in_svg(chart: str) -> list[str]:
    return [f"{element.tag} {sorted(element.attrib)}" for element in ET.fromstring(chart).iter()]  # noqa: S314


_COLOURS = re.compile(r"\x1b\[[\d;]*m")  # those of rich, which names no other sequence in a table


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system="truecolor")


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return _COLOURS.sub("", console.file.getvalue()) if console.is_terminal else console.file.getvalue()


# --- artefacts ----------------------------------------------------------------------------------------------


def record_kinds() -> set[type[Record]]:
    """Every record of the package."""
    modules = [import_module(f"{records.__name__}.{file.name}") for file in iter_modules(records.__path__)]
    found = (one for module in modules for one in vars(module).values())
    return {one for one in found if isinstance(one, type) and issubclass(one, Record)}


def test_every_record_can_be_filled_and_holds_the_text() -> None:
    kinds = record_kinds()
    assert len(kinds) > 40
    texts = {kind.__name__ for kind in kinds if "PWNED" in repr(filled(kind, "PWNED"))}
    assert {"Extraction", "Verification", "Outcome", "Audit", "Explained", "Merged", "CommitPlan"} <= texts


@every_payload
def test_a_card_shows_hostile_text_and_has_no_element_of_it(text: str) -> None:
    card, plain = files_of(text)["README.md"], files_of("plain words")["README.md"]
    assert hidden(card) == []
    assert card.split("\n---\n")[0] == plain.split("\n---\n")[0]
    assert len(card.splitlines()) == len(plain.splitlines())
    shown, expected = rendered(card), rendered(plain)
    assert shown.elements == expected.elements
    # the last of these stands in a code span, in a table, in a list and in running text
    assert shown.text.count(for_terminal(text).strip()) >= expected.text.count("plain words") / 2


@every_payload
def test_a_report_shows_hostile_text_and_has_no_element_of_it(text: str) -> None:
    page, plain = _Page(page_of(text)), _Page(page_of("plain words"))
    assert hidden(page_of(text)) == []
    assert set(page.elements) <= set(plain.elements)
    assert page.elements.count("script") == plain.elements.count("script")
    assert for_terminal(text, lines=True) in page.text


@every_payload
def test_a_chart_is_well_formed_and_has_no_element_of_hostile_text(text: str) -> None:
    charts, plain = files_of(text), files_of("plain words", experts=_names_a_tensor(text))
    assert len([name for name in charts if name.endswith(".svg")]) == 4
    for name in charts:
        if name.endswith(".svg"):
            assert hidden(charts[name]) == []
            assert in_svg(charts[name]) == in_svg(plain[name])


@every_payload
def test_a_terminal_and_a_pipe_get_nothing_that_steers_them(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\na: b\n---\n\n# &#27;]0;PWNED&#7;\n\n{text}\n", encoding="utf-8")
    verdict, outcome = a(LoaderVerdict, text), a(Outcome, text).model_copy(update={"staged": str(tmp_path)})
    assert outcome.push is not None
    rehearsed = outcome.push.model_copy(update={"hub": f"local Hub {text}"})
    failed = a(Audit, text).checks[0].model_copy(update={"status": "failed", "detail": f"{text}\n{text}"})
    for console in (terminal(), Console(file=io.StringIO())):
        show_outcome(outcome, console)
        show_outcome(outcome.model_copy(update={"push": rehearsed}), console)
        show_audit(a(Audit, text), console)
        show_audit(a(Audit, text).model_copy(update={"checks": (failed,)}), console)
        show_module(a(Explained, text), console)
        show_merged(a(Merged, text).model_copy(update={"released": False}), console)
        show_compat({text: (verdict,)}, console)
        show_repaired(Repaired(text, (text,), (text,), Judged({text: (verdict,)}, ())), console)
        with progress_on(console) as progress:
            progress(text, 1, 2)
        assert hidden(_without_progress(printed(console))) == []
        assert "".join(for_terminal(text)[:12].split()) in "".join(printed(console).split())


def _without_progress(out: str) -> str:
    """Without the sequences by which rich draws its own line of progress."""
    return re.sub(r"\x1b\[(\?25[lh]|[\d;]*[AK]|1A)|\r", "", out)


@every_payload
def test_what_is_known_of_a_module_is_found_and_told_by_a_hostile_name(text: str) -> None:
    _, evidence = evidence_of(text)
    found = explain(
        text, ReleaseEvidence(text, text, text, (Evidence(extraction=evidence[0].extraction, verification=None),))
    )
    console = Console(file=io.StringIO())
    show_module(found[0], console)
    assert hidden(printed(console)) == []


@pytest.mark.parametrize("export", [one for one in PAYLOADS.values() if one != "plain words"], ids=repr)
def test_an_export_of_an_unknown_kind_keeps_a_card_from_being_rendered(export: str) -> None:
    manifest, evidence = evidence_of("plain words")
    settings = evidence[0].extraction.settings.model_copy(update={"exports": (export,)})
    other = VariantEvidence(
        variant=evidence[0].variant,
        extraction=evidence[0].extraction.model_copy(update={"settings": settings}),
        verification=None,
    )
    with pytest.raises(CardError, match="cannot be rendered"):
        card_files(manifest, (other,), beside=packaged_folder("templates"))


# --- manifests ----------------------------------------------------------------------------------------------


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the texts of a document stand."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*place, key))
    if isinstance(value, str):
        yield place


def put(document: Any, place: tuple[str | int, ...], text: str) -> Any:
    """The document with this text at that place."""
    changed = json.loads(json.dumps(document))
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = text
    return changed


FIELDS = {".".join(map(str, place)): place for place in places(yaml.safe_load(MANIFEST))}


IN_FIELDS = (
    *("escape sequence", "C1 controls", "NUL", "lines", "bidi override", "zero width", "noncharacters", "long"),
    *("image in a cell", "heading", "link", "fence", "entity", "script", "shell"),
)


def card_of(manifest: Manifest, evidence: tuple[VariantEvidence, ...]) -> str:
    """The card of this manifest, with that evidence."""
    pairs = zip(manifest.variants, evidence, strict=True)
    items = tuple(
        VariantEvidence(
            variant=variant, extraction=item.extraction, verification=item.verification, loaders=item.loaders
        )
        for variant, item in pairs
    )
    return render_card(manifest, items, beside=packaged_folder("templates"))


@pytest.mark.parametrize("place", FIELDS.values(), ids=FIELDS.keys())
def test_hostile_text_in_a_field_of_a_manifest_is_refused_in_one_line_or_shown_as_text(
    place: tuple[str | int, ...],
) -> None:
    document = yaml.safe_load(MANIFEST)
    manifest, evidence = evidence_of("plain words")
    expected = rendered(card_of(manifest, evidence)).elements
    for text in map(PAYLOADS.__getitem__, IN_FIELDS):
        written = yaml.safe_dump(put(document, place, text))
        changed, problems = parse_manifest(Path("m.yaml"), written, templates=False)
        if changed is None:
            assert problems
            assert all(hidden(str(problem)) == [] and "\n" not in str(problem) for problem in problems)
            continue
        try:
            card = card_of(changed, evidence)
        except CardError:  # there is no template of that name
            assert place[-1] in {"template", "usage"}
            continue
        assert hidden(card) == []
        if re.search(r"[^\w./ -]", text):  # a plain one may be a path or a class, and stand in an address
            assert rendered(card).elements == expected, text


@pytest.mark.parametrize("field", ["title", "label", "summary"])
@pytest.mark.parametrize("name", ["escape sequence", "lines", "bidi override", "zero width", "long", "NUL"])
def test_the_authors_words_are_one_bounded_line_of_plain_text(field: str, name: str) -> None:
    place = next(place for place in FIELDS.values() if place[-1] == field)
    written = yaml.safe_dump(put(yaml.safe_load(MANIFEST), place, PAYLOADS[name]))
    manifest, problems = parse_manifest(Path("m.yaml"), written)
    assert manifest is None
    assert len(problems) == 1
    assert "write" in str(problems[0])


# --- commands -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What a command printed, stdout first, and its exit code."""

    output: str
    told: str
    code: int


def command(*words: str) -> Ran:
    """One command in this process, as its user has it: errors are told."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("sys.argv", ["publish", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return Ran(out.getvalue(), err.getvalue(), ended.value.code)


def require_harmless(ran: Ran) -> None:
    assert hidden(ran.output) == []
    assert hidden(ran.told) == []
    assert ran.code in {0, 1, 2}
    assert "Traceback" not in ran.told


@every_payload
def test_check_names_a_hostile_key_and_value_harmlessly(text: str, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    document = yaml.safe_load(MANIFEST)
    file.write_text(yaml.safe_dump(document | {text: text, "repo": text}), encoding="utf-8")
    result = command("check", str(file))
    require_harmless(result)
    assert result.code
    assert result.told.count("m.yaml: ") == 2


GROUPS: Mapping[str, tuple[str, ...]] = {
    "controls": ("escape sequence", "bell and backspace", "C1 controls", "carriage return", "lines"),
    "unseen": ("bidi override", "zero width", "separators"),
    "markup": ("image in a cell", "heading", "link", "fence", "comment", "entity", "template", "script", "backslash"),
}


@pytest.mark.usefixtures("own_tiny_run")
@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS.keys())
def test_hostile_names_of_tensors_become_no_markup_of_the_release(names: tuple[str, ...]) -> None:
    for side, value in (("base", 1.0), ("src", 2.0)):
        tensors = load_file(f"{side}/model.safetensors")
        first = next(iter(tensors.values()))
        alone = side == "base"
        tensors |= {f"alone {PAYLOADS[name]}": first.new_ones(4) for name in names if alone}
        tensors |= {f"other {PAYLOADS[name]}": first.new_full((4,), value) for name in names}
        save_file(tensors, f"{side}/model.safetensors", metadata={"format": "pt"})
    text = Path("m.yaml").read_text(encoding="utf-8")
    Path("m.yaml").write_text(text.replace("{method: svd,", '{method: svd, ignore: ["other *"],'), encoding="utf-8")
    before = rendered(Path("dist/m/README.md").read_text(encoding="utf-8"))
    result = command("--manifest", "m.yaml", "--dry-run")
    require_harmless(result)
    if result.code:
        return
    card = Path("dist/m/README.md").read_text(encoding="utf-8")
    assert hidden(card) == []
    after = rendered(card)
    assert set(after.elements) == set(before.elements) | {"li", "/li", "code", "/code"}
    assert [one for one in after.elements if one[0] in "ah"] == [one for one in before.elements if one[0] in "ah"]
    for words in (
        ("report", "-m", "m.yaml"),
        ("audit", "dist/m"),
        ("compat", "-m", "m.yaml"),
        ("audit", "dist/m", "--json"),
    ):
        require_harmless(command(*words))


@every_payload
def test_commands_print_a_hostile_folder_of_evidence_harmlessly(text: str, own_tiny_run: Path) -> None:
    file = own_tiny_run / "dist/m/extraction.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    for place in places(document):
        if place[-1] in {"name", "label", "reason", "what", "remedy", "version", "device", "revision"}:
            document = put(document, place, text)
    file.write_text(json.dumps(document), encoding="utf-8")
    (own_tiny_run / "dist/m/manifest.yaml").unlink()
    for words in (("explain", text[:40], "--folder", "dist/m"), ("audit", "dist/m"), ("audit", "dist/m", "--json")):
        require_harmless(command(*words))
    told = command("explain", text, "--folder", "dist/m", "--json")
    require_harmless(told)
    if told.code == 0:
        assert {one["module"] for one in json.loads(told.output)} == {text}


def test_a_card_that_was_changed_is_compared_harmlessly(own_tiny_run: Path) -> None:
    card = own_tiny_run / "dist/m/README.md"
    lines = "".join(f"{text}\n" for text in PAYLOADS.values())
    card.write_text(card.read_text(encoding="utf-8").replace("## Usage", f"{lines}\n## Usage"), encoding="utf-8")
    for words in (("card", "-m", "m.yaml", "--check"), ("audit", "dist/m"), ("audit", "dist/m", "--json")):
        result = command(*words)
        require_harmless(result)
        assert result.code == 1
    assert "PWNED" in command("card", "-m", "m.yaml", "--check").output


@pytest.mark.parametrize("name", ["escape sequence", "C1 controls", "lines", "bidi override", "image in a cell"])
def test_folders_and_files_of_hostile_names_are_told_harmlessly(name: str, own_tiny_run: Path) -> None:
    hostile = PAYLOADS[name].replace("/", "_")
    (own_tiny_run / "dist/m").rename(own_tiny_run / hostile)
    (own_tiny_run / hostile / hostile).write_text("", encoding="utf-8")
    for words in (
        ("audit", hostile),
        ("compat", hostile),
        ("explain", "q_proj", "--folder", hostile),
        ("check", hostile),
    ):
        require_harmless(command(*words))
    require_harmless(command("report", "--folder", hostile, "--output", "page.html"))
    assert hidden(Path("page.html").read_text(encoding="utf-8")) == []


@every_payload
def test_a_config_of_hostile_values_is_told_harmlessly(text: str, own_tiny_run: Path) -> None:
    for field in ("architectures", "model_type", "torch_dtype"):
        config = json.loads((own_tiny_run / "src/config.json").read_text(encoding="utf-8"))
        config[field] = [text] if field == "architectures" else text
        (own_tiny_run / "src/config.json").write_text(json.dumps(config), encoding="utf-8")
        require_harmless(command("new", "--source", "src", "--base", "base"))
