"""Records that only this machine keeps, each with a digest over all its bytes, and the names of kept files.

A file is canonical JSON: the record as `content`, and `sha256`, the digest of the content's canonical JSON. One that is
not exactly these bytes is as good as none, and what it stood for is made again: a flipped bit, a torn write, a record
of other code. What a file is about never becomes its name: names are digests.
"""

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from publisher.records.files import canonical_json, digest_of, write_text
from publisher.records.record import Record

Kept = TypeVar("Kept", bound=Record)


def write_sealed(path: Path, record: Record) -> None:
    """Write the record with its digest, atomically."""
    write_text(path, _sealed(record.model_dump(mode="json")))


def read_sealed(path: Path, kind: type[Kept]) -> Kept | None:
    """Return the record in this file; None where there is none, or where not every byte is as it was written."""
    try:
        octets = path.read_bytes()
        content = json.loads(octets)["content"]
        return kind.model_validate(content) if _sealed(content).encode() == octets else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError, ValidationError):
        return None


def kept_file(folder: Path, about: str, *, suffix: str) -> Path:
    """Return the file inside `folder` that is about a thing of this name; no two names have the same file.

    Args:
        folder: where it lies.
        about: any text, such as the name of a tensor.
        suffix: the end of the file's name, such as `.json`.

    Returns:
        The folder, and a name of 64 hex digits and the suffix, on every file system.
    """
    return folder / f"{hashlib.sha256(about.encode()).hexdigest()}{suffix}"


def _sealed(content: object) -> str:
    return canonical_json({"content": content, "sha256": digest_of(content)})
