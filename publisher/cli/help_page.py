"""The page that `publish --help` shows: commands by what a person wants, a whole line each, and the exit codes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import click

GROUPS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "Publish, stage by stage": {
            "extract": "Take the adapters out of the checkpoints.",
            "validate": "Check that PEFT loads the written adapters.",
            "verify": "Hold base + adapter against the released model.",
            "card": "Render README.md from the JSON artefacts alone.",
            "push": "Publish the staged tree and read it back.",
        },
        "Manifests": {
            "new": "Write a manifest from two checkpoints.",
            "check": "List every problem of every manifest.",
            "pin": "Replace branches and tags by full commit ids.",
        },
        "Look at a release, or use it": {
            "report": "Write one HTML page with all that is known.",
            "explain": "Show all that is known of one module.",
            "compat": "Say which loaders take the adapter.",
            "merge": "Write base + adapter as one whole checkpoint.",
        },
        "Do not believe it": {
            "audit": "Check a published adapter, or a folder of one.",
        },
        "Try it here": {
            "demo": "Do the whole job on two small pairs.",
            "hub": "Serve a local Hub on this machine.",
        },
    }
)
ABOUT: Final = """Take the LoRA adapters out of merged fine-tunes, prove them equal, and publish them.

\b
publish demo                               the whole job on two small pairs
publish new --source A --base B -o m.yaml  a first manifest
publish --manifest m.yaml --dry-run        everything but the write to the Hub
publish audit owner/name                   check what somebody published
"""
EXIT_CODES: Final = (
    ("0", "done"),
    ("1", "a check did not hold, or a stage failed"),
    ("2", "the command line or the manifest is wrong"),
    ("130", "interrupted; the same command goes on from there"),
)


class Commands(click.Group):
    """The group of all commands, whose help page is by purpose. A command that stands in no group is a mistake."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, one line each, under what a person wants."""
        for purpose, commands in GROUPS.items():
            with formatter.section(purpose):
                formatter.write_dl([(name, line) for name, line in commands.items() if self.get_command(ctx, name)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the exit codes mean, and where more is said."""
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES))
        formatter.write_paragraph()
        formatter.write_text(f"{ctx.info_name} COMMAND --help says more of each.")
