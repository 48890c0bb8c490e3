"""The metadata of a model card, which names the licence and the base: YAML between two lines of `---` in README.md.

It is others' text: what cannot be read, or is no name of a repository, counts as not stated.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from publisher.border.yaml_text import parse_yaml

Beside = Callable[[str], str | None]
"""Gives the text of a small file beside the weights by its name; None where there is none that can be read."""

CARD: Final = "README.md"
_REPOSITORY: Final = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)


def card_fields(text: str) -> Mapping[str, Any]:
    """Return the fields of a card; none where it has no metadata, or some that nobody can read."""
    front = re.match(r"---\s*\n(.*?\n)---\s*(?:\n|$)", text, re.DOTALL)
    try:
        fields = parse_yaml(front[1]) if front else None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def base_in_card(beside: Beside) -> str | None:
    """Return the repository that the card names as `base_model`, the first where there are several."""
    named = card_fields(beside(CARD) or "").get("base_model")
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) and is_repository(first) else None


def is_repository(text: str) -> bool:
    """Return whether the text has the form `owner/name`, so that a message may show it."""
    return _REPOSITORY.fullmatch(text) is not None
