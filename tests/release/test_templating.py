"""A template that forgets every filter still puts out text as text."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from publisher.release.templating import card_environment, html_environment

HOSTILE = "<b>[a](x)</b> | *c*"
AS_TEXT = r"&lt;b&gt;\[a\](x)&lt;/b&gt; \| \*c\*"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "part.md.j2").write_text("{{ text }}", encoding="utf-8")
    (tmp_path / "macros.md.j2").write_text("{% macro bold(text) %}**{{ text }}**{% endmacro %}", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ text }}", AS_TEXT),
        ("{{ text if text else '' }}", AS_TEXT),
        ("{{ 'a ' ~ text }}", f"a {AS_TEXT}"),
        ("{{ [text, text] | join(', ') }}", f"{AS_TEXT}, {AS_TEXT}"),
        ("{{ [text | code, text] | join(', ') }}", f"<code>{AS_TEXT}</code>, {AS_TEXT}"),
        ("{{ records | join(', ', attribute='name') }}", AS_TEXT),
        ("{{ text | upper }}", AS_TEXT.upper().replace("&LT;", "&lt;").replace("&GT;", "&gt;")),
        ("{{ text | safe }}", AS_TEXT),
        ("{{ {'a': text}['a'] }}", AS_TEXT),
        ("{{ (text,) }}", rf"('{AS_TEXT}',)"),
        ("{% include 'part.md.j2' %}", AS_TEXT),
        ("{% from 'macros.md.j2' import bold %}{{ bold(text) }}", f"**{AS_TEXT}**"),
        ("{% from 'macros.md.j2' import bold %}{{ bold(text) | trim }}", f"**{AS_TEXT}**"),
        ("{% set there %}_{{ text }}_{% endset %}{{ there }}", f"_{AS_TEXT}_"),
        ("{% macro m() %}{{ caller(text) }}{% endmacro %}{% call(a) m() %}**{{ a }}**{% endcall %}", f"**{AS_TEXT}**"),
        ("{% for one in [text] %}{{ one }}{% endfor %}", AS_TEXT),
        ("{{ '**a**' }}", r"\*\*a\*\*"),
        ("**a** {{ 3 }} {{ -0.5 }}", "**a** 3 -0.5"),
        ("{{ name | code }}", "`model.layers.0.mlp.down_proj`"),
        ("{{ text | quoted }}", f'"{HOSTILE}"'),
    ],
)
def test_a_card_escapes_what_a_template_puts_out(folder: Path, template: str, expected: str) -> None:
    made = card_environment([folder]).from_string(template)
    name = "model.layers.0.mlp.down_proj"
    assert made.render(text=HOSTILE, name=name, records=[{"name": HOSTILE}]) == expected


def test_text_joined_with_markdown_is_text_so_that_the_slip_shows(folder: Path) -> None:
    made = card_environment([folder]).from_string("{{ name | code ~ text }}")
    assert made.render(name="a", text="<b>") == r"\`a\`&lt;b&gt;"


def test_a_card_and_a_page_know_every_name_they_use(folder: Path) -> None:
    for environment in (card_environment([folder]), html_environment()):
        with pytest.raises(UndefinedError):
            environment.from_string("{{ nowhere }}").render()


@pytest.mark.parametrize(
    "template", ["{{ text }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(text) }}", "{{ mark ~ text }}"]
)
def test_a_page_escapes_elements_and_control_characters_what_a_macro_joined_too(template: str) -> None:
    mark = html_environment().from_string("{% macro m() %}{% endmacro %}{{ m() }}").module
    made = html_environment().from_string(template).render(text="<b>\x1b\u202e\uffff", mark=mark)
    assert made == r"&lt;b&gt;\x1b\u202e\uffff"
