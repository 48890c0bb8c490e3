"""Look at a release, or use it: `report`, `explain`, `compat`, `merge`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from publisher.border.echo import echo
from publisher.border.escape import for_terminal
from publisher.cli import options
from publisher.cli.results import print_result, prints_result
from publisher.errors import PublisherError

if TYPE_CHECKING:
    from publisher.records.loaders import Judged, Repaired
    from publisher.records.merged import Merged
    from publisher.records.progress import Progress
    from publisher.release.evidence import ReleaseEvidence


@click.command()
@options.manifest
@options.folder
@options.dist
@options.output
@options.traceback
def report(*, manifest: Path | None, folder: Path | None, dist: Path, output: Path | None) -> None:
    """Write one HTML page with everything that is known of a release [DIST/NAME.html]."""
    echo(f"report: {write_report(manifest, folder, dist=dist, output=output)}")


def write_report(manifest: Path | None, folder: Path | None, *, dist: Path, output: Path | None = None) -> Path:
    """Write the report of a release.

    Args:
        manifest: the release's manifest; or none.
        folder: a folder with an extraction.json, instead.
        dist: where the staged tree of the manifest is.
        output: the page; `DIST/NAME.html` where none is named.

    Returns:
        The page.

    Raises:
        ManifestError: neither manifest nor folder is given, or both are.
        FetchError: there is no evidence.
        CardError: the evidence is not the manifest's.
    """
    from publisher.records.files import write_text
    from publisher.release.report import render_report

    known = manifest or folder or dist
    target = output or dist / f"{known.resolve().name.removesuffix('.yaml')}.html"
    write_text(target, render_report(_evidence(manifest, folder, dist=dist)))
    return target


def _evidence(manifest: Path | None, folder: Path | None, *, dist: Path) -> "ReleaseEvidence":
    from publisher.release.evidence import read_release

    return read_release(manifest, folder, staged=dist / manifest.stem if manifest else None)


def _complete_module(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return names for the shell, where the command line says of which release; none where that cannot be read."""
    from publisher.release.explain import module_names

    given = context.params
    try:
        evidence = _evidence(given.get("manifest"), given.get("folder"), dist=given.get("dist") or Path("dist"))
        names = module_names(evidence)
    except PublisherError:
        return []
    return [name for name in names if incomplete in name and name == for_terminal(name)]


@click.command()
@click.argument("module", shell_complete=_complete_module)
@options.manifest
@options.folder
@options.dist
@options.as_json
@options.traceback
def explain(*, module: str, manifest: Path | None, folder: Path | None, dist: Path, as_json: bool) -> None:
    """Show all that is known of one module, by its full name or the end of it."""
    from publisher.release.explain import explain as explain_module

    print_result(explain_module(module, _evidence(manifest, folder, dist=dist)), as_json=as_json)


@click.command()
@click.argument("adapter", required=False, type=click.Path(path_type=Path), metavar="[ADAPTER_DIR]")
@options.manifest
@options.variants
@options.dist
@click.option("--base", type=click.Path(path_type=Path), metavar="DIR", help="The folder of the base's config.json.")
@click.option("--source", type=click.Path(path_type=Path), metavar="DIR", help="The merged fine-tune, with --base.")
@click.option("--repair", type=click.Path(path_type=Path), metavar="OUT", help="Write a sound copy into this folder.")
@click.option(
    "--require", "required", multiple=True, metavar="LOADER", help="Exit 1 unless this one loads it; may be repeated."
)
@prints_result
def compat(
    *, adapter: Path | None, base: Path | None, source: Path | None, repair: Path | None, **given: Any
) -> "Judged | Repaired":
    """Show which loaders take the staged adapters, or the one in a folder; exit 1 if one would take it wrongly."""
    from publisher.cli.loaders import Beside, judged, repaired

    beside, staged = Beside(base, source), {name: given.pop(name) for name in ("variants", "dist")}
    if repair is not None:
        return repaired(adapter, repair, beside=beside, **given)
    return judged(adapter=adapter, beside=beside, **staged, **given)


@click.command()
@options.manifest_required
@click.option("--variant", metavar="PATH", help="The variant, where the manifest has several.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The folder to write.")
@click.option("--fp8", is_flag=True, help="Quantise again what the base has in FP8; without it that becomes bf16.")
@options.dist
@prints_result
def merge(*, manifest: Path, progress: "Progress", **given: Any) -> "Merged":
    """Write base + adapter as one complete checkpoint, for engines that cannot load an adapter."""
    from publisher.pipeline.merge import Request
    from publisher.pipeline.merge import merge as write_merged

    return write_merged(Request(manifest, **given), progress)


COMMANDS: Final = (report, explain, compat, merge)
