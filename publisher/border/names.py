"""Names as they come in: of tensors and modules. A name is never a path, a pattern or markup; here it becomes one line.

Names of files inside a repository are in `paths`.
"""

import unicodedata
from typing import Final

from publisher.border.limits import LIMITS

_REFUSED: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})  # Unicode's general categories: controls, surrogates, breaks


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
    if any(unicodedata.category(character) in _REFUSED for character in name):
        raise ValueError(f"the name of a tensor holds a control character: {shortened(name)}")
    return name


def shortened(name: str, *, width: int = 60) -> str:
    """Return the beginning of a name of any origin for a message, control characters by their escapes."""
    return ascii(name[:width])
