"""JSON as it comes in: bounded in bytes, depth, entries and digits before it is parsed, every key once, finite numbers.

The text is looked through once, without recursion, before the parser sees it: so no document, however deep, reaches
the parser's own limits.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

from publisher.border.limits import LIMITS

_PIECE: Final = 1 << 20  # bytes that are looked at together, so that memory is a copy or two of the text
_DIGITS: Final = re.compile(rb"[0-9]{%d}" % (LIMITS.number_digits + 1))
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_OPENING: Final = b"[{"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(content: bytes, *, limit: int = LIMITS.json_bytes) -> Any:
    """Return the value that a JSON text stands for.

    Args:
        content: the text, in UTF-8.
        limit: the most bytes that it may have.

    Returns:
        A dict, list, str, int, float, bool or None.

    Raises:
        ValueError: it is not JSON, or passes a limit; the message says which.
    """
    require_bounded(content, limit=limit)
    try:
        value = json.loads(
            content.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    if _SURROGATE.search(content):
        _require_unicode(value)
    return value


def parse_json_object(content: bytes, *, limit: int = LIMITS.json_bytes) -> dict[str, Any]:
    """Return the JSON object in a text.

    Args:
        content: the text, in UTF-8.
        limit: the most bytes that it may have.

    Returns:
        The object as a dict.

    Raises:
        ValueError: it is not JSON, is something else than an object, or passes a limit.
    """
    value = parse_json(content, limit=limit)
    if isinstance(value, dict):
        return value
    raise ValueError("it is not a JSON object")


def require_bounded(content: bytes, *, limit: int = LIMITS.json_bytes) -> None:
    """Raise an error if a JSON text is larger, deeper or has more entries or longer numbers than any real one.

    Args:
        content: the text; whether it is JSON is not looked at.
        limit: the most bytes that it may have.

    Raises:
        ValueError: a limit is passed; the message says which.
    """
    if len(content) > limit:
        raise ValueError(f"it has {len(content):,} bytes; at most {limit:,} are read")
    depth = entries = 0
    before = b""
    for bare in _outside_strings(content):
        entries += bare.count(b",") + bare.count(b"[") + bare.count(b"{")
        if entries > LIMITS.entries:
            raise ValueError(f"it has more than {LIMITS.entries:,} entries")
        joined = before + bare  # a number may go on from the piece before
        if _DIGITS.search(joined):
            raise ValueError(f"it holds a number of more than {LIMITS.number_digits} digits")
        before = joined[-LIMITS.number_digits :]
        for bracket in bare.translate(None, _NOT_BRACKETS):
            depth += 1 if bracket in _OPENING else -1
            if depth > LIMITS.json_depth:
                raise ValueError(f"it is nested more than {LIMITS.json_depth} levels deep")


def _outside_strings(content: bytes) -> Iterator[bytes]:
    """Yield what stands outside the strings of a JSON text, piece by piece, a quote in the place of each string."""
    # escapes go first, pair by pair: the quotes that are left are those around strings
    plain = content.replace(rb"\\", b"").replace(rb"\"", b"")
    inside = 0
    for start in range(0, len(plain), _PIECE):
        parts = plain[start : start + _PIECE].split(b'"')
        yield b'"'.join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _require_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a Unicode character (a lone surrogate)") from None
