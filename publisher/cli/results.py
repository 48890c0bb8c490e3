"""How every command with a result runs and prints it: progress on stderr, the result on stdout, as text or as JSON.

Begin with `prints_result`, which makes a command of a function that returns a result.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

from publisher.border.echo import document_alone, echo, echo_json
from publisher.cli import options
from publisher.cli.endings import report_interruption
from publisher.cli.interruption import interruptible

if TYPE_CHECKING:
    from publisher.records.audit import Audit
    from publisher.records.explained import Explained
    from publisher.records.loaders import Judged, Repaired
    from publisher.records.merged import Merged
    from publisher.records.outcome import Outcome
    from publisher.records.progress import Progress

    Result = Audit | Judged | Merged | Outcome | Repaired | tuple[Explained, ...]


def prints_result(work: "Callable[..., Result]") -> Callable[..., None]:
    """Make a command of a function: it gets `--json` and `-v`, and prints what the function returns.

    Args:
        work: called with the command's options and `progress`; what it returns is printed.

    Returns:
        A function for `click.command`. It exits with 1 where the result says that something does not hold.
    """

    @options.as_json
    @options.verbose
    @wraps(work)
    def command(*, as_json: bool, verbose: bool, **given: Any) -> None:
        with working(as_json=as_json, verbose=verbose) as progress:
            found = work(progress=progress, **given)
        print_result(found, as_json=as_json)

    return command


@contextmanager
def working(*, as_json: bool, verbose: bool) -> "Iterator[Progress]":
    """Show progress on stderr for as long as the block runs, and let Ctrl-C end it.

    Args:
        as_json: keep stdout for the one document.
        verbose: let libraries say what they would say.

    Yields:
        The function that is told of each piece of work.
    """
    from rich.console import Console

    from publisher.cli.console import progress_on

    if not verbose:
        quiet_libraries()
    last_words = partial(report_interruption, as_json=as_json)
    stdout = document_alone() if as_json else nullcontext()
    with stdout, interruptible(last_words), progress_on(Console(stderr=True)) as progress:
        yield progress


def quiet_libraries() -> None:
    """Keep libraries' own notes for -v: what matters of them is said by an error or in the result."""
    for name in ("huggingface_hub", "transformers", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def print_result(found: "Result", *, as_json: bool) -> None:
    """Print a result on stdout.

    Args:
        found: the result.
        as_json: print its JSON document instead of text.

    Raises:
        click.exceptions.Exit: with code 1, where the result says that something does not hold.
    """
    if as_json:
        echo_json(_document(found))
    else:
        _show(found)
    if complaint := _complaint(found):
        echo(f"error: {complaint}.", err=True)
        raise click.exceptions.Exit(1)


def _document(found: "Result") -> str:
    from publisher.records.files import canonical_json

    if isinstance(found, tuple):
        return canonical_json([one.model_dump(mode="json") for one in found])
    return found.to_json()


def _show(found: "Result") -> None:
    from rich.console import Console

    from publisher.cli import console
    from publisher.records.audit import Audit
    from publisher.records.loaders import Repaired
    from publisher.records.merged import Merged
    from publisher.records.outcome import Outcome

    match found:
        case Outcome():
            console.show_outcome(found, Console())
        case Audit():
            console.show_audit(found, Console())
        case Merged():
            console.show_merged(found, Console())
        case Repaired():
            console.show_repaired(found, Console())
        case tuple():
            for module in found:
                console.show_module(module, Console())
        case _:
            console.show_compat(found.verdicts, Console())


def _complaint(found: "Result") -> str:
    """Return why the command fails although it has a result; empty where it does not."""
    from publisher.records.audit import Audit
    from publisher.records.loaders import Judged, Repaired

    match found:
        case Audit() if found.failed:
            names = ", ".join(f"{check.name} {check.variant}".rstrip() for check in found.failed)
            return f"{len(found.failed)} of {len(found.checks)} checks failed: {names}"
        case Judged() | Repaired():
            return "; ".join(found.complaints)
    return ""
