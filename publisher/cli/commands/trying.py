"""Try it here: `demo`, `hub`."""

from pathlib import Path
from typing import Any, Final

import click

from publisher.border.echo import echo
from publisher.cli import options
from publisher.cli.commands.reading import write_report
from publisher.cli.results import print_result, working


@click.command()
@click.option("--dry-run", is_flag=True, help="Stop before the rehearsal on the local Hub.")
@options.dist
@options.device
@options.as_json
@options.verbose
def demo(*, as_json: bool, verbose: bool, dist: Path, **given: Any) -> None:
    """Make the demo pairs in ./demo (if absent), run the whole job on them, and publish to a local Hub."""
    import publisher
    from publisher.cli.demo.checkpoints import make_demo
    from publisher.records.files import packaged_folder

    manifest = packaged_folder("manifests") / "demo.yaml"
    with working(as_json=as_json, verbose=verbose) as progress:
        make_demo(Path("demo"), progress=progress)
        outcome = publisher.run(manifest, rehearse=True, dist=dist, progress=progress, **given)
    print_result(outcome, as_json=as_json)
    page = write_report(manifest, None, dist=dist)
    echo(f"report: {page}", err=as_json)


@click.command(name="hub")
@click.option("--root", type=click.Path(path_type=Path), default=Path("local-hub"), metavar="DIR", help="Its data.")
@click.option("--port", type=int, default=0, metavar="N", help="A port of 127.0.0.1 [a free one].")
@options.traceback
def hub(root: Path, port: int) -> None:
    """Serve a local Hub on this machine, and print how to point the Hub's client at it."""
    from publisher.hub.local import serve

    serve(root, port)


COMMANDS: Final = (demo, hub)
