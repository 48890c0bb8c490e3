"""Files as this project writes and names them: digests, canonical JSON, atomic writes, packaged folders.

Whatever is written appears whole or not at all. JSON is canonical (sorted keys, one trailing newline), so that
equal content means equal bytes.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent


def packaged_folder(name: str) -> Path:
    """`templates` or `manifests`: inside the installed package, or beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def sha256_of(path: Path) -> str:
    """The file's SHA-256 as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, two spaces, no NaN, and one newline at the end."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value's canonical text: equal values, equal digests."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, newlines as given."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")
