"""Names of tensors and modules as they come in: here each becomes one line of text.

A name is never a path, a pattern or markup. `paths` has the names of files inside a repository.
"""

import unicodedata
from typing import Final

from publisher.border.limits import LIMITS

_CONTROLS: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})  # Unicode's general categories: controls, surrogates, breaks


def tensor_name(name: str) -> str:
    """Return `name` if a tensor of a real model could have it.

    Raises:
        ValueError: it is empty, too long, or holds a control character; the message does not repeat the name.
    """
    if not name:
        raise ValueError("a tensor has an empty name")
    if len(name) > LIMITS.name_characters:
        raise ValueError(
            f"the name of a tensor has {len(name):,} characters (at most {LIMITS.name_characters}): "
            f"{shortened(name)} and so on"
        )
    if has_control_character(name):
        raise ValueError(f"the name of a tensor holds a control character: {shortened(name)}")
    return name


def has_control_character(text: str) -> bool:
    """Return whether a text holds what no line of text can: a control character, half a character, a line break."""
    return any(unicodedata.category(character) in _CONTROLS for character in text)


def shortened(name: str, *, width: int = 60) -> str:
    """Return the beginning of a name of any origin for a message, with control characters as escapes."""
    return ascii(name[:width])
