"""Do not believe it: `audit`."""

from typing import TYPE_CHECKING, Any, Final

import click

from publisher.cli import options
from publisher.cli.results import prints_result

if TYPE_CHECKING:
    import publisher


@click.command()
@click.argument("target", metavar="REPO[@REVISION]")
@click.option("--deep", is_flag=True, help="Fetch source and base too, and work the figures out again.")
@options.device
@prints_result
def audit(target: str, **given: Any) -> "publisher.Audit":
    """Check a published adapter, or a local folder of one; exit 1 if a check fails."""
    import publisher

    return publisher.audit(target, **given)


COMMANDS: Final = (audit,)
