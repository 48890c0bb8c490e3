"""How this tool is installed: the one place that knows the name of its distribution."""

DISTRIBUTION = "lora-publisher"
"""The name that pip knows. On the public index, `publisher` is another project's."""


def install_command(extra: str) -> str:
    """Return the command that adds the packages of an extra, such as `ray`, to an installation of this tool."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
