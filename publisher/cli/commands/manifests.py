"""Manifests: `new`, `check`, `pin`."""

from pathlib import Path
from typing import Final

import click

from publisher.border.echo import echo
from publisher.cli import options
from publisher.cli.results import quiet_libraries
from publisher.errors import ManifestError


@click.command()
@click.option("--source", required=True, metavar="DIR_OR_REPO", help="The merged fine-tune.")
@click.option("--base", required=True, metavar="DIR_OR_REPO", help="The model it was made from.")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it [stdout].")
@options.traceback
def new(source: str, base: str, output: Path | None) -> None:
    """Write a manifest after reading both checkpoints' headers."""
    from publisher.manifest.new import new_manifest
    from publisher.records.files import write_text

    if output is not None and output.exists():
        raise ManifestError(f"{output} exists", next_step="name another file with --output")
    quiet_libraries()
    text = new_manifest(tuned=source, base=base)
    if output is None:
        echo(text, nl=False)
        return
    write_text(output, text)
    echo(f"{output}: written; edit what it marks, then: publish check {output}")


@click.command()
@click.argument("manifests", nargs=-1, required=True, type=click.Path(path_type=Path))
@options.traceback
def check(manifests: tuple[Path, ...]) -> None:
    """Every problem of every manifest at once; no network, no torch."""
    from publisher.manifest.reading import read_manifest

    problems = {path: read_manifest(path)[1] for path in manifests}
    for path, found in problems.items():
        for problem in found:
            echo(problem, err=True)
        if not found:
            echo(f"{path}: ok")
    broken = sum(bool(found) for found in problems.values())
    if broken:
        raise ManifestError(f"{broken} of {len(manifests)} manifests have problems", next_step="correct them as said")


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@options.traceback
def pin(manifest: Path) -> None:
    """Resolve names to full commit ids and rewrite the manifest, comments kept."""
    from publisher.hub.client import resolve_revision
    from publisher.manifest.pin import pin as pin_manifest

    quiet_libraries()
    pinned = pin_manifest(manifest, resolve_revision)
    for entry in pinned:
        echo(f"{manifest}: {entry.field}: {entry.repo}@{entry.name} is {entry.commit}")
    if not pinned:
        echo(f"{manifest}: nothing to pin")


COMMANDS: Final = (new, check, pin)
