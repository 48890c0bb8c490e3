"""The `publish` command: reads the command line, calls the pipeline, prints, and gives the exit code.

The only place that catches this project's errors. 0 done, 1 a stage failed, 2 usage or manifest, 130 interrupted.
Whatever needs torch, transformers, peft or the Hub is imported by the command that needs it.
"""

import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from publisher import __version__
from publisher.border.causes import explained
from publisher.border.echo import DOCUMENT_PRINTED, document_alone, echo, echo_json, guard_libraries
from publisher.border.escape import for_terminal
from publisher.cli.help_page import ABOUT, Commands
from publisher.cli.interruption import EXIT_CODE, interruptible
from publisher.errors import CardError, ManifestError, PublisherError
from publisher.pipeline.table import NAMES
from publisher.records.filenames import CARD

if TYPE_CHECKING:
    from publisher.pipeline.run import Run
    from publisher.release.evidence import ReleaseEvidence

_STAGES = click.Choice(NAMES)
_manifest = click.option(
    "--manifest", "-m", type=click.Path(path_type=Path), metavar="M", help="The manifest to publish."
)
_dist = click.option(
    "--dist", type=click.Path(path_type=Path), default=Path("dist"), metavar="DIR", help="Output folder [dist]."
)
_device = click.option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N.")
_engine = click.option(
    "--engine", default="local", metavar="NAME", help="local, ray, or ray://HOST:PORT: where the work is done."
)
_model_gpus = click.option(
    "--model-gpus",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="GPUs that a model of verification is spread over [1].",
)
_variant = click.option(
    "--variant", "variants", multiple=True, metavar="PATH", help="Only this variant; may be repeated."
)
_stream = click.option("--stream", is_flag=True, help="Read the weights from the Hub as needed; store none of them.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
_verbose = click.option("-v", "--verbose", is_flag=True, help="Say more; show the traceback of an error.")

_traceback = click.option("-v", "--verbose", is_flag=True, expose_value=False, help="Show the traceback of an error.")

_hub = click.option("--hub", type=click.Choice(["local"]), help="local: rehearse the push on an embedded local Hub.")
_tag = click.option("--tag", metavar="NAME", help="Tag the commit, as v1.2.0.")
_signing_key = click.option(
    "--signing-key",
    type=click.Path(path_type=Path),
    envvar="PUBLISH_SIGNING_KEY",
    show_envvar=True,
    metavar="FILE",
    help="Private key for a manifest with sign.key.",
)
_pr = click.option("--pr", is_flag=True, help="Open a pull request instead of committing to main.")


def main() -> None:
    """Run the command line and exit. No exception leaves here: each becomes one error and an exit code."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would write over our own
    guard_libraries()
    DOCUMENT_PRINTED.clear()
    with document_alone() if _asked_for("--json") else nullcontext():
        code = _ended()
    sys.exit(code)


def _ended() -> int:
    """Run the command, and return its exit code, whatever it ends with."""
    try:
        code = cli(prog_name="publish", standalone_mode=False)
    except click.ClickException as error:
        return _tell_usage(error)
    except (KeyboardInterrupt, click.Abort):
        _tell_interrupted()
        sys.stdout.flush()
        os._exit(EXIT_CODE)  # at once: what torch and others do on the way out can take seconds
    except Exception as error:  # noqa: BLE001 - whatever a library or a release raises is told in words
        return _tell(explained(error))
    return code if isinstance(code, int) else 0


def _asked_for(*flags: str) -> bool:
    """Whether the command line holds one of these flags; it may not have been parsed, or be wrong."""
    return not {*flags}.isdisjoint(sys.argv[1:])


def _tell_interrupted() -> None:
    found, next_step = "interrupted", "what was finished is kept, the same command goes on from there"
    echo(f"{found}; {next_step}", err=True)
    _tell_as_json("Interrupted", found, next_step=next_step)


def _tell_usage(error: click.ClickException) -> int:
    told = io.StringIO()
    error.show(told)
    echo(told.getvalue(), err=True, nl=False)
    _tell_as_json("UsageError", error.format_message(), next_step="publish --help")
    return error.exit_code


def _tell(error: PublisherError) -> int:
    if _asked_for("-v", "--verbose"):
        echo(traceback.format_exc(), err=True, nl=False)
    echo(f"error: {error}", err=True)
    _tell_as_json(type(error).__name__, error.found, expected=error.expected, next_step=error.next_step)
    return error.exit_code


def _tell_as_json(kind: str, found: str, *, expected: str = "", next_step: str) -> None:
    """With --json, stdout is one document however a command ends; one that was printed already stays the only one."""
    if _asked_for("--json") and not DOCUMENT_PRINTED.is_set():
        parts = {"kind": kind, "found": found, "expected": expected, "next": next_step}
        echo_json(json.dumps({"error": parts}, indent=2) + "\n")


@click.group(
    cls=Commands, help=ABOUT, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="publish")
@_manifest
@click.option("--dry-run", is_flag=True, help="Run every stage, and stop before the first write to the Hub.")
@_hub
@_tag
@_pr
@_signing_key
@_variant
@click.option("--from", "first", type=_STAGES, default=NAMES[0], help="Start with this stage, on earlier results.")
@click.option("--until", "last", type=_STAGES, default=NAMES[-1], help="Stop after this stage.")
@_dist
@_device
@_engine
@_model_gpus
@_stream
@_json
@_verbose
@click.pass_context
def cli(context: click.Context, /, **options: Any) -> None:
    """Run every stage, or show the help page."""
    if context.invoked_subcommand is not None:
        return
    if options["manifest"] is None:
        echo(context.get_help())
        return
    _run(**options)


def _run(*, as_json: bool, verbose: bool, **options: Any) -> None:
    from rich.console import Console

    from publisher.cli.console import progress_on, show_outcome
    from publisher.pipeline.run import run

    _quiet_libraries(verbose=verbose)
    with interruptible(_tell_interrupted), progress_on(Console(stderr=True)) as progress:
        outcome = run(_options(**options), progress)
    if as_json:
        echo_json(outcome.to_json())
    else:
        show_outcome(outcome, Console())


def _options(*, manifest: Path, hub: str | None = None, pr: bool = False, **rest: Any) -> "Run":
    from publisher.pipeline.options import Run

    options = Run(manifest, rest.pop("dist"), rehearse=hub == "local", pull_request=pr, **rest)
    if NAMES.index(options.first) > NAMES.index(options.last):
        raise ManifestError(
            f"--from {options.first} comes after --until {options.last}", expected=f"the order {', '.join(NAMES)}"
        )
    return options


def _quiet_libraries(*, verbose: bool) -> None:
    """Libraries' own notes are for -v: what matters of them is said by an error or in the outcome."""
    if not verbose:
        for name in ("huggingface_hub", "transformers", "httpx"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _one_stage(name: str, summary: str, *, last: str = "") -> Callable[..., None]:
    """`publish NAME --manifest M`: one stage, run again even if nothing changed, on the results before it.

    With `last`, also what follows from it up to that stage.
    """

    @_manifest_required
    @_variant
    @_dist
    @_device
    @_engine
    @_model_gpus
    @_stream
    @_json
    @_verbose
    def command(**options: Any) -> None:
        _run(first=name, last=last or name, **options)

    return cli.command(name, help=summary)(command)


def _manifest_required(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--manifest", "-m", type=click.Path(path_type=Path), required=True, metavar="M", help="The manifest."
    )(command)


@cli.command()
@_manifest_required
@click.option("--dry-run", is_flag=True, help="Show the commit, and do not make it.")
@_hub
@_tag
@_pr
@_signing_key
@_dist
@_json
@_verbose
def push(**options: Any) -> None:
    """Publish what the earlier stages left in the staged tree, and read it back."""
    _run(first="push", last="read_back", **options)


@cli.command(name="hub")
@click.option("--root", type=click.Path(path_type=Path), default=Path("local-hub"), metavar="DIR", help="Its data.")
@click.option("--port", type=int, default=0, metavar="N", help="A port of 127.0.0.1 [a free one].")
@_traceback
def serve_hub(root: Path, port: int) -> None:
    """Serve a local Hub on this machine, and print how to point the Hub's client at it."""
    from publisher.hub.local import serve

    serve(root, port)


@cli.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@_traceback
def pin(manifest: Path) -> None:
    """Resolve names to full commit ids and rewrite the manifest, comments kept."""
    from publisher.hub.client import resolve_revision
    from publisher.manifest.pin import pin as pin_manifest

    _quiet_libraries(verbose=False)
    pinned = pin_manifest(manifest, resolve_revision)
    for entry in pinned:
        echo(f"{manifest}: {entry.field}: {entry.repo}@{entry.name} is {entry.commit}")
    if not pinned:
        echo(f"{manifest}: nothing to pin")


@cli.command()
@click.option("--source", required=True, metavar="DIR_OR_REPO", help="The merged fine-tune.")
@click.option("--base", required=True, metavar="DIR_OR_REPO", help="The model it was made from.")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it [stdout].")
@_traceback
def new(source: str, base: str, output: Path | None) -> None:
    """Write a manifest after reading both checkpoints' headers."""
    from publisher.manifest.new import new_manifest
    from publisher.records.files import write_text

    if output is not None and output.exists():
        raise ManifestError(f"{output} exists", next_step="name another file with --output")
    _quiet_libraries(verbose=False)
    text = new_manifest(tuned=source, base=base)
    if output is None:
        echo(text, nl=False)
        return
    write_text(output, text)
    echo(f"{output}: written; edit what it marks, then: publish check {output}")


extract = _one_stage("extract", "Take the adapters out of the checkpoints; write adapter and extraction.json.")
validate = _one_stage(
    "validate", "Check that the written adapters load and do what extraction.json says.", last="loaders"
)
verify = _one_stage("verify", "Hold the answers of base + adapter against the released model's.")


@cli.command()
@_manifest_required
@click.option("--check", is_flag=True, help="Write nothing; exit 1 with a diff if the card is stale.")
@click.option("--from-hub", is_flag=True, help="Render from the published JSON; show the diff to the published card.")
@click.option("--push", "write", is_flag=True, help="With --from-hub: commit README.md and its charts alone.")
@_pr
@_dist
@_traceback
def card(*, manifest: Path, dist: Path, check: bool, from_hub: bool, write: bool, pr: bool) -> None:
    """Render README.md and its charts from the JSON artefacts alone."""
    _quiet_libraries(verbose=False)
    if from_hub:
        _card_from_hub(manifest, write=write, pull_request=pr)
    elif write:
        raise ManifestError("--push goes with --from-hub", next_step="publish push publishes the staged tree")
    elif check:
        _check_card(manifest, dist)
    else:
        _write_card(manifest, dist)


def _write_card(manifest: Path, dist: Path) -> None:
    from publisher.pipeline.run import Run, run
    from publisher.records.progress import silent

    options = Run(manifest, dist, first="card", last="card")
    changed = run(options, silent).card_changed
    echo(f"card {'written' if changed else 'unchanged'}: {options.staged / CARD}")


def _check_card(manifest: Path, dist: Path) -> None:
    from publisher.manifest.reading import load_manifest
    from publisher.pipeline.options import Run
    from publisher.release.card import card_files, check_card, stale_charts
    from publisher.release.evidence import load_evidence

    options = Run(manifest, dist)
    loaded = load_manifest(manifest)
    files = card_files(loaded, load_evidence(loaded, options.staged), beside=manifest.parent)
    readme = options.staged / CARD
    diff, charts = check_card(files[CARD], readme), stale_charts(loaded, files, options.staged)
    echo(diff, nl=False)
    if stale := [readme] * bool(diff) or [options.staged / path for path in charts]:
        raise CardError(f"{stale[0]} is stale", next_step=f"publish card --manifest {manifest}")
    echo(f"card is fresh: {readme}")


def _card_from_hub(manifest: Path, *, write: bool, pull_request: bool) -> None:
    from publisher.cli.republish import card_from_hub
    from publisher.pipeline.stages.push import Target

    done = card_from_hub(manifest, write=write, target=Target(pull_request=pull_request))
    echo(done.diff or "the published card is what its evidence gives\n", nl=False)
    if done.push is not None:
        echo(f"{done.push.hub}: {done.push.result}: {done.push.url}")


_folder = click.option(
    "--folder", type=click.Path(path_type=Path), metavar="DIR", help="Any folder with an extraction.json, instead."
)


@cli.command()
@_manifest
@_folder
@_dist
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it.")
@_traceback
def report(*, manifest: Path | None, folder: Path | None, dist: Path, output: Path | None) -> None:
    """Write one HTML page with everything that is known of a release [DIST/NAME.html]."""
    echo(f"report: {_write_report(manifest, folder, dist=dist, output=output)}")


def _write_report(manifest: Path | None, folder: Path | None, *, dist: Path, output: Path | None) -> Path:
    from publisher.records.files import write_text
    from publisher.release.report import render_report

    known = manifest or folder or dist
    target = output or dist / f"{known.resolve().name.removesuffix('.yaml')}.html"
    write_text(target, render_report(_release_evidence(manifest, folder, dist=dist)))
    return target


def _release_evidence(manifest: Path | None, folder: Path | None, *, dist: Path) -> "ReleaseEvidence":
    from publisher.release.evidence import read_release

    return read_release(manifest, folder, staged=dist / manifest.stem if manifest else None)


def _complete_module(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Names for the shell, where the command line says of which release; silence where that cannot be read."""
    from publisher.release.explain import module_names

    given = context.params
    try:
        names = module_names(
            _release_evidence(given.get("manifest"), given.get("folder"), dist=given.get("dist") or Path("dist"))
        )
    except PublisherError:
        return []
    return [name for name in names if incomplete in name and name == for_terminal(name)]


@cli.command()
@click.argument("module", shell_complete=_complete_module)
@_manifest
@_folder
@_dist
@_json
@_traceback
def explain(*, module: str, manifest: Path | None, folder: Path | None, dist: Path, as_json: bool) -> None:
    """Show all that is known of one module, by its full name or the end of it."""
    from rich.console import Console

    from publisher.cli.console import show_module
    from publisher.records.files import canonical_json
    from publisher.release.explain import explain as explain_module

    found = explain_module(module, _release_evidence(manifest, folder, dist=dist))
    if as_json:
        echo_json(canonical_json([one.model_dump(mode="json") for one in found]))
        return
    for one in found:
        show_module(one, Console())


@cli.command()
@click.argument("manifests", nargs=-1, required=True, type=click.Path(path_type=Path))
@_traceback
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


@cli.command()
@click.option("--dry-run", is_flag=True, help="Stop before the rehearsal on the local Hub.")
@_dist
@_device
@_json
@_verbose
def demo(*, dry_run: bool, **options: Any) -> None:
    """Make the demo pairs in ./demo (if absent), run the whole job on them, and publish to a local Hub."""
    from rich.console import Console

    from publisher.cli.console import progress_on
    from publisher.cli.demo.checkpoints import make_demo
    from publisher.records.files import packaged_folder

    with progress_on(Console(stderr=True)) as progress:
        make_demo(Path("demo"), progress=progress)
    manifest = packaged_folder("manifests") / "demo.yaml"
    _run(manifest=manifest, dry_run=dry_run, hub="local", **options)
    page = _write_report(manifest, None, dist=options["dist"], output=None)
    echo(f"report: {page}", err=options["as_json"])


@cli.command()
@_manifest_required
@click.option("--variant", metavar="PATH", help="The variant, where the manifest has several.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The folder to write.")
@click.option("--fp8", is_flag=True, help="Quantise again what the base has in FP8; without it that becomes bf16.")
@_dist
@_json
@_verbose
def merge(*, as_json: bool, verbose: bool, manifest: Path, **options: Any) -> None:
    """Write base + adapter as one complete checkpoint, for engines that cannot load an adapter."""
    from rich.console import Console

    from publisher.cli.console import progress_on, show_merged
    from publisher.cli.merge import Request
    from publisher.cli.merge import merge as run_merge

    _quiet_libraries(verbose=verbose)
    with interruptible(_tell_interrupted), progress_on(Console(stderr=True)) as progress:
        done = run_merge(Request(manifest, **options), progress)
    if as_json:
        echo_json(done.to_json())
    else:
        show_merged(done, Console())


@cli.command()
@click.argument("adapter", required=False, type=click.Path(path_type=Path), metavar="[ADAPTER_DIR]")
@_manifest
@_variant
@_dist
@click.option("--base", type=click.Path(path_type=Path), metavar="DIR", help="The folder of the base's config.json.")
@click.option("--require", multiple=True, metavar="LOADER", help="Exit 1 unless this one loads it; may be repeated.")
@_json
@_verbose
@click.pass_context
def compat(context: click.Context, /, *, as_json: bool, verbose: bool, require: tuple[str, ...], **where: Any) -> None:
    """Which loaders take the staged adapters, or the one in a folder; exit 1 if one would take it wrongly."""
    from rich.console import Console

    from publisher.cli.console import progress_on, show_compat
    from publisher.cli.loaders import complaints, judged, to_json

    _quiet_libraries(verbose=verbose)
    with progress_on(Console(stderr=True)) as progress:
        found = judged(**where, progress=progress)
    problems = complaints(found, require)
    if as_json:
        echo_json(to_json(found))
    else:
        show_compat(found, Console())
    if problems:
        echo(f"error: {'; '.join(problems)}.", err=True)
        context.exit(1)


@cli.command()
@click.argument("target", metavar="REPO[@REVISION]")
@click.option("--deep", is_flag=True, help="Fetch source and base too, and work the figures out again.")
@_device
@_json
@_verbose
@click.pass_context
def audit(context: click.Context, /, target: str, *, deep: bool, device: str, as_json: bool, verbose: bool) -> None:
    """Check a published adapter, or a local folder of one; exit 1 if a check fails."""
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from publisher.audits import audit as run_audit
    from publisher.cli.console import progress_on, show_audit

    _quiet_libraries(verbose=verbose)
    with TemporaryDirectory() as work, progress_on(Console(stderr=True)) as progress:
        found = run_audit(target, deep=deep, work=Path(work), device=device, progress=progress)
    if as_json:
        echo_json(found.to_json())
    else:
        show_audit(found, Console())
    if found.failed:
        names = ", ".join(f"{check.name} {check.variant}".rstrip() for check in found.failed)
        echo(f"error: {len(found.failed)} of {len(found.checks)} checks failed: {names}.", err=True)
        context.exit(1)
