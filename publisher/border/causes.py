"""What an exception of any origin comes to, in words: one error with its cause and the next step.

An exception of the system (no permission, no such folder, no memory) is told as such. One that was raised inside a
library, or inside code that a release brings, is told as theirs. Whatever is left is a fault of this tool, and says so.
"""

import errno
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from publisher.border.installing import install_command
from publisher.errors import FaultError, LibraryError, NoRoomError, PublisherError, SystemTroubleError

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_EXTRAS: Final = {
    "ray": "ray",
    "gguf": "gguf",
    "pygit2": "localhub",
    "starlette": "localhub",
    "uvicorn": "localhub",
    "model_signing": "sign",
    "torchvision": "vision",
}
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_WIDTH: Final = 400  # characters of another's message
REPORT: Final = "run the same command with -v, and report it to the publisher project with what it prints"


def explained(error: BaseException) -> PublisherError:
    """Return the error that tells a person what happened; one of this project's own is told as it is."""
    if isinstance(error, PublisherError):
        return error
    for kind, explain in _KINDS:
        if isinstance(error, kind):
            return explain(error)
    return _by_origin(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that holds anything, else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _system(error: OSError) -> PublisherError:
    place = f"{error.filename}: " if error.filename else ""
    why = error.strerror or _one_line(error) or type(error).__name__
    if error.errno in _NO_ROOM:
        return NoRoomError(f"{place}{why}", next_step="make room, then give the same command again")
    if not error.filename and (origin := _origin(error)) not in {"", "publisher"}:
        return _of_library(error, origin)
    return SystemTroubleError(
        f"{place}{why}",
        expected="files that can be read, and an output folder that can be written to",
        next_step="correct the path (--dist and --output name other places), or who may use it",
    )


def _encoding(error: UnicodeError) -> PublisherError:
    return SystemTroubleError(
        f"a name, a path or a variable of the environment holds a character that has no place there ({_reason(error)})",
        expected="HF_TOKEN, HF_ENDPOINT and header values in plain ASCII; paths in UTF-8",
        next_step="look at HF_TOKEN first: copy the token again",
    )


def _reason(error: UnicodeError) -> str:
    """Return why, without the text itself, which may be a token."""
    return str(getattr(error, "reason", "") or type(error).__name__)


def _memory(_: BaseException) -> PublisherError:
    return SystemTroubleError(
        "the machine has no more memory to give",
        expected="room for the largest tensor that differs, several times (docs/running.md)",
        next_step="end other programs, or use a larger machine; the same command goes on from what is finished",
    )


def _depth(_: BaseException) -> PublisherError:
    return SystemTroubleError(
        "a file is nested too deep to be read", next_step="name another checkpoint or release: -v shows which was read"
    )


def _missing(error: ImportError) -> PublisherError:
    name = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(name)
    command = install_command(extra) if extra else f"pip install {name}" if name else "install what it names"
    return LibraryError(
        f"a package is missing: {_one_line(error)}", expected="it to be installed beside this tool", next_step=command
    )


_KINDS: Final[tuple[tuple[type[BaseException], Callable[[Any], PublisherError]], ...]] = (
    (MemoryError, _memory),
    (RecursionError, _depth),
    (UnicodeError, _encoding),
    (ImportError, _missing),
    (OSError, _system),
)


def _by_origin(error: BaseException) -> PublisherError:
    origin = _origin(error)
    if origin in {"", "publisher"}:
        return FaultError(
            f"this is a fault of publisher itself: {type(error).__name__}: {_one_line(error)}", next_step=REPORT
        )
    return _of_library(error, origin)


def _of_library(error: BaseException, origin: str) -> LibraryError:
    return LibraryError(
        f"{origin} failed: {type(error).__name__}: {_one_line(error)}",
        next_step="correct what it names; -v shows where it happened, and if that is no help, " + REPORT,
    )


def _origin(error: BaseException) -> str:
    """Return the owner of the innermost frame whose file belongs neither to Python itself nor to nobody."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    owners = (_owner(Path(frame.filename)) for frame in frames)
    return next(filter(None, owners), "")


def _owner(file: Path) -> str:
    if file.is_relative_to(_PACKAGE):
        return "publisher"
    parts = file.parts
    for installed in ("site-packages", "dist-packages"):
        if installed in parts:
            return Path(parts[parts.index(installed) + 1]).stem
    is_python = any(part.startswith("python3") for part in parts) or file.name.startswith("<")
    return "" if is_python else f"code of the release ({file.name})"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_WIDTH]
