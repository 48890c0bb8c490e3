"""Whatever a command prints goes through here, and is escaped on the way; what libraries log and warn of too."""

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, Final, TextIO

import click

from publisher.border.escape import for_json, for_terminal

_KEPT: Final[list[TextIO]] = []  # stdout while it is kept for the document; for every thread
DOCUMENT_PRINTED: Final = threading.Event()
_FORMAT_WARNING: Final = warnings.formatwarning


class _HarmlessRecord(logging.LogRecord):
    """What a library logs."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        """Return the message as it may be printed."""
        return for_terminal(super().getMessage(), lines=True)


def guard_libraries() -> None:
    """Escape, from now on, what libraries log and warn of: it may quote a checkpoint or a repository."""
    logging.setLogRecordFactory(_HarmlessRecord)
    warnings.formatwarning = _harmless_warning


def _harmless_warning(*of: Any, **more: Any) -> str:
    return for_terminal(_FORMAT_WARNING(*of, **more), lines=True)


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print lines of text, of any origin.

    Args:
        text: what is printed; its line feeds stay.
        err: whether it goes to stderr.
        nl: whether a line feed follows.
    """
    click.echo(for_terminal(str(text), lines=True), err=err, nl=nl)


@contextmanager
def document_alone() -> Iterator[None]:
    """Keep stdout for the one JSON document: what a library or a release's code prints there goes to stderr."""
    _KEPT.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _KEPT.pop()


def echo_json(document: str) -> None:
    """Print a JSON document that ends with a line feed; nothing in it steers a terminal, and it means the same.

    `DOCUMENT_PRINTED` is set by it: a command prints one document, however it ends.
    """
    DOCUMENT_PRINTED.set()
    click.echo(for_json(document), file=_KEPT[-1] if _KEPT else None, nl=False)
