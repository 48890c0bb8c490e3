"""The metadata of a model card: the YAML between two lines of `---` at the beginning of a README.md."""

import re
from collections.abc import Mapping
from typing import Any

from publisher.border.yaml_text import parse_yaml


def card_fields(text: str) -> Mapping[str, Any]:
    """Return the fields of a card; none where it has no metadata, or some that nobody can read."""
    front = re.match(r"---\s*\n(.*?\n)---\s*(?:\n|$)", text, re.DOTALL)
    try:
        fields = parse_yaml(front[1]) if front else None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
