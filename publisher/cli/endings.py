"""How a command ends that does not end well: one error on stderr, the same in JSON where that was asked for."""

import io
import json
import traceback

import click

from publisher.border.echo import DOCUMENT_PRINTED, echo, echo_json
from publisher.errors import PublisherError


def report_interruption(*, as_json: bool) -> None:
    """Print that the command was interrupted, and that the work is kept."""
    found, next_step = "interrupted", "what was finished is kept, the same command goes on from there"
    echo(f"{found}; {next_step}", err=True)
    if as_json:
        _print_document("Interrupted", found, next_step=next_step)


def report_usage(error: click.ClickException, *, as_json: bool) -> int:
    """Print what is wrong with the command line, and return the exit code."""
    text = io.StringIO()
    error.show(text)
    echo(text.getvalue(), err=True, nl=False)
    if as_json:
        _print_document("UsageError", error.format_message(), next_step="publish --help")
    return error.exit_code


def report_error(error: PublisherError, *, as_json: bool, verbose: bool) -> int:
    """Print what failed, and return the exit code.

    Args:
        error: the error that ends the command; it is being handled.
        as_json: print it as JSON too.
        verbose: print the traceback before it.

    Returns:
        The exit code of this kind of error.
    """
    if verbose:
        echo(traceback.format_exc(), err=True, nl=False)
    echo(f"error: {error}", err=True)
    if as_json:
        _print_document(type(error).__name__, error.found, expected=error.expected, next_step=error.next_step)
    return error.exit_code


def _print_document(kind: str, found: str, *, expected: str = "", next_step: str) -> None:
    """Print the error as JSON, unless a document was printed already: stdout has one, however a command ends."""
    if not DOCUMENT_PRINTED.is_set():
        parts = {"kind": kind, "found": found, "expected": expected, "next": next_step}
        echo_json(json.dumps({"error": parts}, indent=2) + "\n")
