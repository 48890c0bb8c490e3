r"""The one way out: each place that text is shown in has one function that makes foreign text harmless there.

Control characters, invisible ones, and those that change the direction of writing are shown by their escape, as in
Python (`\x1b`, `\u202e`): a reader sees that they are there, and they do nothing. Which characters these are does not
depend on the version of Python, so that a card has the same bytes everywhere.
"""

import html
import json
import re
import shlex
import unicodedata
from functools import lru_cache
from typing import Final
from urllib.parse import quote

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})  # Unicode's general categories
_UNSEEN: Final = (  # letters and marks that are shown as nothing (Default_Ignorable_Code_Point), and noncharacters
    *(range(0x034F, 0x0350), range(0x115F, 0x1161), range(0x17B4, 0x17B6), range(0x180B, 0x1810)),
    *(range(0x2065, 0x2066), range(0x2800, 0x2801), range(0x3164, 0x3165), range(0xFE00, 0xFE10)),
    *(range(0xFFA0, 0xFFA1), range(0xFFF0, 0xFFF9), range(0xFDD0, 0xFDF0), range(0xE0000, 0xE1000)),
)
_UNUSUAL: Final = re.compile(r"[^\x20-\x7e]")
_MARKDOWN: Final = re.compile(
    r"""
    [\\`*\[\]|~$\#]                               # may open or close something anywhere
    | (?<![^\W_])_ | _(?![^\W_])                  # emphasis; not within a word
    | ^\ ?[-+=:](?=[-+=:\s]|$) | ^\ ?\d+[.)](?=\s|$)  # a list, a line under a heading or a row of headings
    | !$                                          # an image, with what follows
    | :(?=/|$) | /(?=/) | @(?=[\w-]+\.|localhost) # addresses that some renderers turn into links by themselves
    | (?<=www)\.
    | \.(?=(?:[a-z]{2}|com|net|org|info|biz|edu|gov|pro|web|xxx|name|shop|aero|asia|coop|museum|рф|xn--)_*\b)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_ENTITY: Final = re.compile(r"[<>]|&(?=[#\w]|$)")
_ENDS: Final = re.compile(r"^\s\s+|\s\s+$|^[^\S ]|[^\S ]$|^ $")  # one space beside other text does nothing
_NO_PLAIN_CODE: Final = re.compile(r"^$|[`|]|^\s|\s$")


class Markdown(str):
    """Text that is Markdown already: a template puts it on the card as it is, and escapes any other text."""

    __slots__ = ()

    def strip(self, chars: str | None = None, /) -> "Markdown":
        """Return the same without characters at its ends; Jinja's `trim` calls it."""
        return Markdown(super().strip(chars))


def for_terminal(text: str, *, lines: bool = False) -> str:
    """Return `text` as it may be printed on a terminal or written to a log.

    Args:
        text: text of any origin.
        lines: whether line feeds stay as they are; otherwise they are escaped too.

    Returns:
        The text without any character that a terminal would act upon, or that a reader would not see.
    """
    return _UNUSUAL.sub(lambda found: found[0] if lines and found[0] == "\n" else _seen(found[0]), text)


def for_json(text: str) -> str:
    r"""Return a JSON document with each hidden character of its strings as a `\u` escape; it means the same."""
    return _UNUSUAL.sub(lambda found: found[0] if found[0] == "\n" else _seen_in_json(found[0]), text)


def for_markdown(text: str) -> Markdown:
    """Return one line of Markdown that is shown as `text`, and never as markup, a link, a heading or a table cell.

    It may stand in a paragraph, a heading, a list, a cell of a table or the text of a link. `<`, `>` and `&` become
    entities, so that the text adds no element in a block of HTML either. Markdown does not show a single space at the
    beginning or the end of a paragraph or a cell.
    """
    plain = for_terminal(text)
    inert = _MARKDOWN.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", plain)
    shown = _ENTITY.sub(lambda found: html.escape(found[0]), inert)
    return Markdown(_ENDS.sub(lambda found: "".join(f"&#{ord(space)};" for space in found[0]), shown))


def for_code(text: str) -> Markdown:
    """Return Markdown that is shown as `text` in the type of code, in a cell of a table too."""
    plain = for_terminal(text)
    if _NO_PLAIN_CODE.search(plain):
        return Markdown(f"<code>{for_markdown(plain)}</code>")
    return Markdown(f"`{plain}`")


def for_fence(text: str) -> Markdown:
    """Return `text` for a line of a fenced block of code; a fence cannot be closed within a line that has begun."""
    return Markdown(for_terminal(text))


def for_python(text: str) -> Markdown:
    """Return `text` as a Python string literal, for a fenced block of code."""
    return Markdown(for_terminal(json.dumps(text, ensure_ascii=False)))


def for_shell(text: str) -> Markdown:
    """Return `text` as one word of a shell's command, for a fenced block of code."""
    return Markdown(shlex.quote(for_terminal(text)))


def for_address(path: str) -> Markdown:
    """Return a path as the target of a Markdown link."""
    return Markdown(quote(path, safe="/", errors="replace"))


def for_html(text: str, *, lines: bool = False) -> str:
    """Return `text` as it may stand between tags of HTML or SVG, or inside a quoted attribute.

    Args:
        text: text of any origin.
        lines: whether line feeds stay as they are; otherwise they are escaped too.

    Returns:
        The text with entities for what is markup, and without any character that XML forbids.
    """
    return html.escape(for_terminal(text, lines=lines), quote=True)


@lru_cache(maxsize=4096)
def is_hidden(character: str) -> bool:
    """Return whether a character is a control, a format or a direction mark, or is shown as nothing."""
    return unicodedata.category(character) in _HIDDEN or _is_unseen(ord(character))


def _is_unseen(code: int) -> bool:
    return code & 0xFFFE == 0xFFFE or any(code in span for span in _UNSEEN)  # noqa: PLR2004 - ends of the planes


def _seen(character: str) -> str:
    return _escaped(character) if is_hidden(character) else character


def _escaped(character: str) -> str:
    if not character.isprintable() and ord(character) < 0x100:  # noqa: PLR2004 - Latin-1
        return repr(character)[1:-1]
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"  # noqa: PLR2004


def _seen_in_json(character: str) -> str:
    return json.dumps(character)[1:-1] if is_hidden(character) else character
