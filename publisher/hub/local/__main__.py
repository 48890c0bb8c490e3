"""`python -m publisher.hub.local --root DIR [--port N]`: a local Hub until Ctrl-C."""

from pathlib import Path

import click

from publisher.hub.local import serve


@click.command(name="python -m publisher.hub.local")
@click.option(
    "--root", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where it keeps its data."
)
@click.option("--port", default=0, show_default="a free one", help="Port on 127.0.0.1.")
def main(root: Path, port: int) -> None:
    """Serve a local Hub, and print how to point the Hub's client at it."""
    serve(root, port)


if __name__ == "__main__":
    main()
