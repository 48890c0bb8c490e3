"""Artefacts of other versions: of a newer one, which this one cannot read, and of an older one, which lacks fields.

A version that adds a field to an artefact gives it a default, so that older artefacts can be read for ever; one that
changes what a field means, or takes one away, raises `records.SCHEMA_VERSION`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from publisher import __version__
from publisher.audits.checks import UncheckedError
from publisher.checkpoints.files import read_json
from publisher.errors import AuditError, FetchError
from publisher.records.files import canonical_json
from publisher.records.record import SCHEMA_VERSION, Record

_T = TypeVar("_T")
_NUMBERS = re.compile(r"\d{1,9}")


def read_or_newer(file: Path, read: Callable[[Path], _T]) -> _T:
    """Return what `read` makes of an artefact.

    Raises:
        UncheckedError: it cannot be read, and a newer version of this tool made it.
        FetchError: it cannot be read.
    """
    try:
        return read(file)
    except FetchError:
        if found := _newer(file):
            raise UncheckedError(
                f"{file.name} was made by a newer version ({found}; this is {__version__}, which reads schema "
                f"{SCHEMA_VERSION}): update this tool, then audit again"
            ) from None
        raise


def _newer(file: Path) -> str:
    """Return what in a file says that a newer version made it; it is empty where nothing does."""
    try:
        data = read_json(file)
    except FetchError:
        return ""
    schema, tools = data.get("schema_version"), data.get("tools")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA_VERSION:
        return f"schema {schema}"
    version = tools.get("publisher") if isinstance(tools, dict) else None
    if isinstance(version, str) and later(version, __version__):
        return f"publisher {version[:40]}"
    return ""


def later(version: str, other: str) -> bool:
    """Return whether a version of this tool is later than another, by their first three numbers."""
    return _numbers(version) > _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBERS.findall(version)[:3])


def require_as_written(file: Path, found: Record) -> str:
    """Return a remark on the fields that an older artefact lacks; empty where it has all.

    Raises:
        AuditError: the file is not in the form in which this tool writes it, the fields that it lacks aside.
    """
    raw = file.read_bytes()
    if raw == found.to_json().encode():
        return ""
    lacking: list[str] = []
    known = _of(found.model_dump(mode="json"), read_json(file), lacking=lacking)
    if not lacking or canonical_json(known).encode() != raw:
        raise AuditError(f"{file.name} is not in the form in which it is written: it was edited")
    return f"; of before there was {', '.join(dict.fromkeys(lacking))}, which it lacks"


def _of(known: Any, there: Any, *, lacking: list[str]) -> Any:
    """Return the part of `known` that `there` has too; the names of other fields are added to `lacking`."""
    if isinstance(known, dict) and isinstance(there, dict):
        lacking += [name for name in known if name not in there]
        return {name: _of(value, there[name], lacking=lacking) for name, value in known.items() if name in there}
    if isinstance(known, list) and isinstance(there, list) and len(known) == len(there):
        return [_of(one, other, lacking=lacking) for one, other in zip(known, there, strict=True)]
    return known
