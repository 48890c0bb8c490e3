"""Jinja for cards and for pages: whatever a template puts out is escaped, without a filter that could be forgotten.

In a card a text is escaped unless it is `Markdown`: a filter that knows its place made it (`code`, `quoted`), or a
macro did. In HTML and SVG it is escaped unless a macro made it. Joining a text and Markdown with `~` gives text, which
is escaped as a whole: a mistake there shows, and lets nothing through.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined, pass_environment
from jinja2.bccache import Bucket
from jinja2.filters import make_attrgetter
from markupsafe import Markup

from publisher.border.escape import (
    Markdown,
    for_address,
    for_code,
    for_fence,
    for_html,
    for_markdown,
    for_python,
    for_shell,
    for_terminal,
)
from publisher.records.files import packaged_folder


def _as_markdown(parts: Iterable[str]) -> Markdown:
    """Return what a macro or a block gives: its parts were escaped one by one."""
    return Markdown("".join(parts))


class _CardEnvironment(Environment):
    concat = staticmethod(_as_markdown)


class _Compiled(BytecodeCache):
    """What templates were compiled to in this process: it holds as long as their text is the same."""

    def __init__(self) -> None:
        self._kept = dict[str, bytes]()

    def load_bytecode(self, bucket: Bucket) -> None:
        """Give Jinja what is kept of a template; it compares the digest of the text."""
        if bucket.key in self._kept:
            bucket.bytecode_from_string(self._kept[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep what Jinja has compiled, in the place of what there was of that file."""
        self._kept[bucket.key] = bucket.bytecode_to_string()


_OF_CARDS, _OF_PAGES = _Compiled(), _Compiled()  # the same text is compiled to another program by each


def card_environment(folders: Sequence[Path]) -> Environment:
    """Return Jinja for cards; templates are looked for in these folders, in this order."""
    made = _CardEnvironment(
        loader=FileSystemLoader(folders),
        bytecode_cache=_OF_CARDS,
        undefined=StrictUndefined,
        finalize=_on_a_card,
        autoescape=False,  # which is for HTML: finalize escapes for Markdown
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"code": for_code, "verbatim": for_fence, "quoted": for_python, "shell": for_shell}
    made.filters |= {"address": for_address, "html": _in_html, "inline": inline, "join": _joined}
    return made


def html_environment() -> Environment:
    """Return Jinja for SVG and HTML."""
    return Environment(
        loader=FileSystemLoader(packaged_folder("templates")),
        bytecode_cache=_OF_PAGES,
        undefined=StrictUndefined,
        finalize=_on_a_page,
        autoescape=True,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def inline(text: str) -> Markdown:
    """Return text on one line, each run of spaces and line feeds as one space."""
    return for_markdown(" ".join(text.split()))


def _on_a_card(value: object) -> str:
    if isinstance(value, Markdown):
        return value
    return str(value) if isinstance(value, int | float) else for_markdown(str(value))


def _on_a_page(value: object) -> Markup:
    # what a macro made has its entities, and may still hold what it joined with `~`
    made = for_terminal(value, lines=True) if isinstance(value, Markup) else for_html(str(value), lines=True)
    return Markup(made)  # noqa: S704 - escaped above


def _in_html(text: str) -> Markdown:
    return Markdown(for_html(text))


@pass_environment
def _joined(
    environment: Environment, values: Iterable[Any], separator: str = "", *, attribute: str | int | None = None
) -> str:
    """Join values as Jinja's own filter does: to Markdown where one is Markdown, else to text, escaped later."""
    chosen = list(values if attribute is None else map(make_attrgetter(environment, attribute), values))
    if any(isinstance(value, Markdown) for value in chosen):
        return Markdown(_on_a_card(separator).join(map(_on_a_card, chosen)))
    return separator.join(map(str, chosen))
