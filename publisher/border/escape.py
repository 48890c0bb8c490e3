"""The one way out: each place that text is shown in has one function that makes foreign text harmless there.

Control characters, invisible ones, and those that change the direction of writing are shown by their escape, as in
Python: a reader sees that they are there, and they do nothing.
"""

import html
import re
import unicodedata
from typing import Final

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # Unicode's general categories
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()#+\-.!|<>~&:@$^=])")


def for_terminal(text: str, *, lines: bool = False) -> str:
    """Return `text` as it may be printed on a terminal or written to a log.

    Args:
        text: text of any origin.
        lines: whether line feeds stay as they are; otherwise they are escaped too.

    Returns:
        The text without any character that a terminal would act upon.
    """
    return "".join(c if (c == "\n" and lines) or not is_hidden(c) else _escaped(c) for c in text)


def for_markdown(text: str) -> str:
    """Return one line of Markdown that is shown as `text`, and never as markup, a link, a heading or a table cell."""
    return _MARKDOWN.sub(r"\\\1", for_terminal(text))


def for_html(text: str) -> str:
    """Return `text` as it may stand between HTML tags or inside a quoted attribute."""
    return html.escape(for_terminal(text), quote=True)


def is_hidden(character: str) -> bool:
    """Return whether a character is a control, a format or a direction mark, or no character at all."""
    return unicodedata.category(character) in _HIDDEN


def _escaped(character: str) -> str:
    return repr(character)[1:-1] if not character.isprintable() else f"\\u{ord(character):04x}"
