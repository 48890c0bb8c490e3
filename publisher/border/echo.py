"""Whatever a command prints goes through here, and is escaped on the way."""

import click

from publisher.border.escape import for_json, for_terminal


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print lines of text, of any origin.

    Args:
        text: what is printed; its line feeds stay.
        err: whether it goes to stderr.
        nl: whether a line feed follows.
    """
    click.echo(for_terminal(str(text), lines=True), err=err, nl=nl)


def echo_json(document: str) -> None:
    """Print a JSON document that ends with a line feed; nothing in it steers a terminal, and it means the same."""
    click.echo(for_json(document), nl=False)
