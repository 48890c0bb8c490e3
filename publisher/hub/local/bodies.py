"""What a request carries, once it is known to be bounded and well formed; every fault in it is the caller's (4xx)."""

import json
from collections.abc import AsyncIterator
from typing import Any

import yaml
from starlette.requests import Request

from publisher.border.json_text import parse_json_object
from publisher.border.limits import LIMITS
from publisher.hub.local.refusals import bad_request, too_large
from publisher.hub.local.repositories import checked_path

_FENCE = "---\n"
_OPENING = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_CLOSING = (yaml.SequenceEndEvent, yaml.MappingEndEvent)
# not the border's loader: a card's dates stay text here, and libyaml keeps a large card from holding up the server
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML was built with it


async def pieces_of(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Give the body of a request in pieces; refused (413) at the headers, or as soon as it exceeds `limit` bytes."""
    require_size(request, limit)
    count = 0
    async for piece in request.stream():
        count += len(piece)
        if count > limit:
            raise too_large(limit)
        yield piece


async def body_of(request: Request, limit: int = LIMITS.request_bytes) -> bytes:
    """Return the whole body of a request of at most `limit` bytes."""
    return b"".join([piece async for piece in pieces_of(request, limit)])


def require_size(request: Request, limit: int) -> None:
    """Refuse a request whose Content-Length is no number (400) or above `limit` (413), before any of it is read."""
    stated = request.headers.get("content-length", "0")
    if not (stated.isascii() and stated.isdigit()):
        raise bad_request("Content-Length is not a number")
    if len(stated) > LIMITS.number_digits or int(stated) > limit:
        raise too_large(limit)


async def json_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty body is an empty object."""
    return object_in(await body_of(request) or b"{}")


def object_in(text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`; refused (400) if it is none, or passes a bound of the border."""
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise bad_request(f"the body cannot be read as a JSON object: {error}") from None


def text_in(body: dict[str, Any], name: str, default: str | None = None) -> str:
    """Return a text field of a JSON object.

    Args:
        body: the object.
        name: the field.
        default: what an absent field stands for; without it the field must be there.

    Returns:
        The text, which holds no NUL.

    Raises:
        Refusal: 400, the field is not there, or is no such text.
    """
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or "\0" in value:
        raise bad_request(f"the body has no text field {name!r}")
    return value


def objects_in(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that lists JSON objects; refused (400) if it is anything else."""
    value = body.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"the field {name!r} is not a list of JSON objects")
    return value


def count_in(body: dict[str, Any], name: str) -> int:
    """Return a field that counts bytes or numbers a part; refused (400) if it is no such integer."""
    value = body.get(name)
    if type(value) is not int or not 0 <= value <= LIMITS.file_bytes:
        raise bad_request(f"the field {name!r} is not an integer from 0 to {LIMITS.file_bytes}")
    return value


def path_in(body: dict[str, Any]) -> str:
    """Return the field `path`; refused (422) if it is no path that a repository of the Hub can hold."""
    path = body.get("path")
    if not isinstance(path, str):
        raise bad_request("the body has no text field 'path'")
    return checked_path(path.removesuffix("/"))  # the client writes a folder with one at its end


def number_in_query(request: Request, name: str, default: int) -> int:
    """Return a small number out of the query of a request.

    Args:
        request: the request.
        name: the parameter of the query.
        default: what an absent parameter stands for.

    Returns:
        The number, of up to six digits.

    Raises:
        Refusal: 400, the parameter is something else.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LIMITS.repository_files))):
        raise bad_request(f"the parameter {name!r} is not a number of up to 6 digits")
    return int(text)


def card_metadata(card: str) -> dict[str, Any]:
    """Return the YAML between the first two `---` lines; dates stay text, since JSON has none.

    Raises:
        ValueError: it is not YAML, is above the bounds, or holds what JSON cannot say.
    """
    card = card.lstrip()
    if not card.startswith(_FENCE):
        return {}
    text = card.removeprefix(_FENCE).partition(_FENCE)[0]
    if len(text.encode(errors="replace")) > LIMITS.card_yaml_bytes:
        raise ValueError(f"it is larger than {LIMITS.card_yaml_bytes} bytes")
    try:
        _require_plain(text)
        metadata = yaml.load(text, _TextDates)  # noqa: S506 - a SafeLoader
        json.dumps(metadata, allow_nan=False)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not YAML that JSON can hold: {type(error).__name__}") from None
    return metadata if isinstance(metadata, dict) else {}


def _require_plain(text: str) -> None:
    """Refuse depth and aliases before anything is built of them."""
    depth = 0
    for event in yaml.parse(text, _LOADER):
        depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
        if depth > LIMITS.yaml_depth:
            raise ValueError("it is too deep")
        if event.__class__ is yaml.AliasEvent:  # ten aliases, each ten times the last one, fill any memory
            raise ValueError("it holds an alias")


class _TextDates(_LOADER):  # type: ignore[misc]
    """SafeLoader, less its reading of dates and of long integers, whatever Python's own bound on digits is set to."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        if len(node.value) > LIMITS.number_digits:
            raise ValueError("it holds too long a number")
        return super().construct_yaml_int(node)


_TextDates.add_constructor("tag:yaml.org,2002:int", _TextDates.construct_yaml_int)
_TextDates.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))
