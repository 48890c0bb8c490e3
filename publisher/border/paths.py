"""Names of files inside a repository, as somebody else has written them."""

from typing import Final

from publisher.border.limits import LIMITS
from publisher.border.names import has_control_character

_PART_BYTES: Final = 255  # of one folder's or file's name, which is what file systems take


def repository_path(text: str) -> str:
    """Return `text` if it is a plain relative path inside a repository.

    Raises:
        ValueError: it is not; the message says why, and does not repeat the text.
    """
    parts = text.split("/")
    reasons = {
        "it is empty": not text,
        f"it is longer than {LIMITS.path_characters} characters": len(text) > LIMITS.path_characters,
        "it is absolute": text.startswith("/"),
        "it holds a backslash": "\\" in text,
        "it holds a control character": has_control_character(text),
        "one of its parts is empty, '.' or '..'": not {"", ".", ".."}.isdisjoint(parts),
        "one of its parts is .git": any(part.lower() == ".git" for part in parts),
        "one of its parts is longer than 255 bytes": any(
            len(part.encode(errors="replace")) > _PART_BYTES for part in parts
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)
    return text
