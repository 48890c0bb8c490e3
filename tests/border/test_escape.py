"""Text that was escaped is shown as itself, and as nothing else, wherever it may stand."""

import ast
import json
import re
import shlex
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from publisher.border.escape import (
    for_address,
    for_code,
    for_fence,
    for_html,
    for_json,
    for_markdown,
    for_python,
    for_shell,
    for_terminal,
    is_hidden,
)

PIECES = (
    *"\\`*_{}[]()#+-.!|<>~&:@$^='\"/ 0123456789abA",
    *("é", "漢", "\u00a0", "\u3000", "https://evil.example/x", "www.evil.example", "me@evil.example", "1. ", "10) "),
    *("- ", "# ", "> ", "    ", "```", "~~~", "![a](b)", "[a](b)", "[a]: b", "<b>", "</code>", "<!--", "-->", "&lt;"),
    *(
        "&#27;",
        "\\|",
        "|---|",
        "***",
        "===",
        "{{7*7}}",
        "<script>",
        "javascript:alert(1)",
        "ftp://x",
        "mailto:a@b.c",
        "evil.com",
        "evil.io",
    ),
)
HIDDEN = (
    "\x1b",
    "\x07",
    "\x00",
    "\x9b",
    "\u202e",
    "\u2066",
    "\u200b",
    "\u2028",
    "\ufeff",
    "\U000e0041",
    "\n",
    "\r",
    "\t",
)
texts = st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=12).map("".join)
hostile = st.lists(st.sampled_from(PIECES + HIDDEN) | st.characters(), max_size=12).map("".join)
PLACES = ("{}", "# {}", "- {}", "1. {}", "> {}", "before {} after", "| a |\n|---|\n| {} |", "| {} |\n|---|", "[{}](x)")


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags += [tag, *(f"{name}={value}" for name, value in attrs)]

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> tuple[str, list[str]]:
    """The text of a page, without line feeds, which none of these texts has, and its tags."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return parser.text.replace("\n", ""), parser.tags


def rendered(markdown: str) -> tuple[str, list[str]]:
    return read(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))


@given(texts.filter(bool), st.sampled_from(PLACES))
@example("  1. a", "{}")
@example("a #", "# {}")
@example("a&", "before {}lt; after")
@example("\\|", PLACES[6])
@example("!", "{}[x](y)")
@example(" ", "{}")
def test_markdown_shows_the_text_as_it_is_wherever_it_stands(text: str, place: str) -> None:
    shown, tags = rendered(place.format(for_markdown(text)))
    plain, meant = rendered(place.format("PLAIN"))
    expected = plain.replace("PLAIN", for_terminal(text))
    one_space = {text[:1], text[-1:]} & {" "}  # which a paragraph or a cell does not show
    assert (shown.replace(" ", ""), tags) == (expected.replace(" ", ""), meant)
    assert shown == expected or one_space


@given(texts, st.sampled_from(PLACES))
def test_code_shows_the_text_as_it_is_wherever_it_stands(text: str, place: str) -> None:
    shown, tags = rendered(place.format(for_code(text)))
    plain, meant = rendered(place.format("`PLAIN`"))
    assert (shown, tags) == (plain.replace("PLAIN", for_terminal(text)), meant)


@example("evil.com_")
@example("evil.com__,")
@given(texts)
def test_an_address_in_a_text_becomes_no_link_by_itself(text: str) -> None:
    markdown = for_markdown(text)
    assert not re.search(r"(https?|ftp)://|www\.\w|\w@[\w-]+\.|(?<!\\)\.(com|org|io)\b", markdown, re.IGNORECASE)


@given(hostile)
def test_markdown_in_a_block_of_html_adds_no_element(text: str) -> None:
    _, tags = rendered(f"<details>\n<summary>{for_markdown(text)}</summary>\n\na\n\n</details>")
    assert tags == ["details", "summary", "p"]


@given(hostile)
def test_a_fence_is_not_closed_by_what_stands_in_a_line_of_it(text: str) -> None:
    for written in (f"x = {for_python(text)}", f"$ run {for_shell(text)}", f"x {for_fence(text)}"):
        shown, tags = rendered(f"```\n{written}\n```\n\nafter")
        assert (shown, tags) == (f"{written}after", ["pre", "code", "p"])


@given(hostile)
def test_python_and_a_shell_read_one_text(text: str) -> None:
    words = shlex.split(for_shell(text))
    assert words == [for_terminal(text)]
    value = ast.literal_eval(for_python(text))
    assert isinstance(value, str)
    assert value == text or not text.isprintable()


@given(hostile)
def test_the_target_of_a_link_is_one_address(text: str) -> None:
    _, tags = rendered(f"[a]({for_address(text)})")
    assert [tag for tag in tags if not tag.startswith("href=")] == ["p", "a"]


@given(texts)
def test_html_gives_back_the_text_between_tags_and_in_an_attribute(text: str) -> None:
    parser = _Text()
    parser.feed(f'<p title="{for_html(text)}">{for_html(text)}</p>')
    parser.close()
    assert parser.text == for_terminal(text)
    assert parser.tags == ["p", f"title={for_terminal(text)}"]


@given(hostile)
def test_a_terminal_gets_nothing_that_it_acts_upon_and_nothing_unseen(text: str) -> None:
    for lines in (False, True):
        shown = for_terminal(text, lines=lines)
        assert [c for c in shown if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and c != "\n"] == []
        assert lines or "\n" not in shown
        assert not any(is_hidden(c) for c in shown if c != "\n")


@given(texts.filter(lambda text: text.isprintable()))
def test_a_terminal_gets_other_text_as_it_is(text: str) -> None:
    if not any(map(is_hidden, text)):
        assert for_terminal(text) == text


@pytest.mark.parametrize(
    ("character", "shown"),
    [
        ("\x1b", r"\x1b"),
        ("\n", r"\n"),
        ("\x9b", r"\x9b"),
        ("\u202e", r"\u202e"),
        ("\u2800", r"\u2800"),
        ("\u3164", r"\u3164"),
        ("\ufe0f", r"\ufe0f"),
        ("\uffff", r"\uffff"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_is_hidden_is_shown_by_its_escape(character: str, shown: str) -> None:
    assert for_terminal(f"a{character}b") == f"a{shown}b"


@given(hostile)
def test_a_json_document_means_the_same_and_hides_nothing(text: str) -> None:
    document = json.dumps({"key": text, text: 1}, ensure_ascii=False, indent=2)
    assert json.loads(for_json(document)) == json.loads(document)
    assert not any(is_hidden(c) for c in for_json(document) if c != "\n")


@pytest.mark.parametrize(
    "text",
    [
        "Clef (27B)",
        "clef-lora",
        "Invented requests 0.4.2, 11 sets",
        "Qwen3.8-27B",
        "One sentence. And another.",
        "漢字",
    ],
)
def test_ordinary_words_stay_as_they_are(text: str) -> None:
    assert for_markdown(text) == text
    assert for_code("model.layers.0.mlp.down_proj") == "`model.layers.0.mlp.down_proj`"
