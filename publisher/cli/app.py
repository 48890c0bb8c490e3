"""The `publish` command: a thin layer over the Python API that reads the command line, prints, and gives the exit code.

The only place that catches this project's errors. 0 done, 1 a stage failed, 2 usage or manifest, 130 interrupted.
The commands are in `commands/`, a file for each group of the help page. Whatever needs torch, transformers, peft or
the Hub is imported by the command that needs it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from publisher import __version__
from publisher.border.causes import explained
from publisher.border.echo import DOCUMENT_PRINTED, echo, guard_libraries
from publisher.cli import options
from publisher.cli.commands import auditing, manifests, publishing, reading, trying
from publisher.cli.endings import report_error, report_interruption, report_usage
from publisher.cli.help_page import ABOUT, Commands
from publisher.cli.interruption import EXIT_CODE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. No exception leaves here: each becomes one error and an exit code.

    Args:
        arguments: the words after `publish`; those of this process where none are given.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over our own
    guard_libraries()
    DOCUMENT_PRINTED.clear()
    sys.exit(_exit_code(words))


def _exit_code(words: list[str]) -> int:
    """Run the command, and return its exit code, whatever it ends with."""
    as_json = "--json" in words  # also where the line is wrong, so that it was never parsed
    try:
        code = cli(words, prog_name="publish", standalone_mode=False)
    except click.ClickException as error:
        return report_usage(error, as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        report_interruption(as_json=as_json)
        sys.stdout.flush()
        os._exit(EXIT_CODE)  # at once: what torch and others do on the way out can take seconds
    except Exception as error:  # noqa: BLE001 - whatever a library or a release raises is told in words
        return report_error(explained(error), as_json=as_json, verbose=not {"-v", "--verbose"}.isdisjoint(words))
    return code if isinstance(code, int) else 0


@click.group(
    cls=Commands, help=ABOUT, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="publish")
@options.manifest
@click.option("--dry-run", is_flag=True, help="Run every stage, and stop before the first write to the Hub.")
@options.hub
@options.tag
@options.pull_request
@options.signing_key
@options.variants
@options.first
@options.last
@options.dist
@options.device
@options.engine
@options.model_gpus
@options.stream
@options.as_json
@options.verbose
@click.pass_context
def cli(context: click.Context, /, manifest: Path | None, **given: Any) -> None:
    """Run every stage, or show the help page."""
    if context.invoked_subcommand is not None:
        return
    if manifest is None:
        echo(context.get_help())
        return
    publishing.publish(manifest=manifest, **given)


for group in (publishing, manifests, reading, auditing, trying):
    for each in group.COMMANDS:
        cli.add_command(each)
