"""Publish, stage by stage: the whole run, `extract`, `validate`, `verify`, `card`, `push`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from publisher.border.echo import echo
from publisher.cli import options
from publisher.cli.results import prints_result, quiet_libraries
from publisher.errors import CardError, ManifestError
from publisher.records.filenames import CARD

if TYPE_CHECKING:
    import publisher


def _run(*, hub: str | None = None, **given: Any) -> "publisher.Outcome":
    import publisher

    return publisher.run(rehearse=hub == "local", **given)


publish: Final = prints_result(_run)


def _one_stage(name: str, summary: str, *, last: str = "") -> click.Command:
    """Return `publish NAME --manifest M`: one stage, run again even if nothing changed, on the results before it.

    With `last`, the stages after it follow, up to that one.
    """

    @options.manifest_required
    @options.variants
    @options.dist
    @options.device
    @options.engine
    @options.model_gpus
    @options.stream
    @prints_result
    def command(**given: Any) -> "publisher.Outcome":
        return _run(first=name, last=last or name, **given)

    return click.command(name, help=summary)(command)


extract: Final = _one_stage("extract", "Take the adapters out of the checkpoints; write adapter and extraction.json.")
validate: Final = _one_stage(
    "validate", "Check that the written adapters load and do what extraction.json says.", last="loaders"
)
verify: Final = _one_stage("verify", "Hold the answers of base + adapter against the released model's.")


@click.command()
@options.manifest_required
@click.option("--dry-run", is_flag=True, help="Show the commit, and do not make it.")
@options.hub
@options.tag
@options.pull_request
@options.signing_key
@options.dist
@prints_result
def push(**given: Any) -> "publisher.Outcome":
    """Publish what the earlier stages left in the staged tree, and read it back."""
    return _run(first="push", last="read_back", **given)


@click.command()
@options.manifest_required
@click.option("--check", is_flag=True, help="Write nothing; exit 1 with a diff if the card is stale.")
@click.option("--from-hub", is_flag=True, help="Render from the published JSON; show the diff to the published card.")
@click.option("--push", "write", is_flag=True, help="With --from-hub: commit README.md and its charts alone.")
@options.pull_request
@options.dist
@options.traceback
def card(*, manifest: Path, dist: Path, check: bool, from_hub: bool, write: bool, pull_request: bool) -> None:
    """Render README.md and its charts from the JSON artefacts alone."""
    quiet_libraries()
    if from_hub:
        _card_from_hub(manifest, write=write, pull_request=pull_request)
    elif write:
        raise ManifestError("--push goes with --from-hub", next_step="publish push publishes the staged tree")
    elif check:
        _check_card(manifest, dist)
    else:
        _write_card(manifest, dist)


def _write_card(manifest: Path, dist: Path) -> None:
    import publisher

    outcome = publisher.run(manifest, dist=dist, first="card", last="card")
    echo(f"card {'written' if outcome.card_changed else 'unchanged'}: {Path(outcome.staged) / CARD}")


def _check_card(manifest: Path, dist: Path) -> None:
    from publisher.manifest.reading import load_manifest
    from publisher.pipeline.options import Run
    from publisher.release.card import card_files, check_card, stale_charts
    from publisher.release.evidence import load_evidence

    run = Run(manifest, dist)
    loaded = load_manifest(manifest)
    files = card_files(loaded, load_evidence(loaded, run.staged), beside=manifest.parent)
    readme = run.staged / CARD
    diff, charts = check_card(files[CARD], readme), stale_charts(loaded, files, run.staged)
    echo(diff, nl=False)
    stale = [readme] if diff else [run.staged / path for path in charts]
    if stale:
        raise CardError(f"{stale[0]} is stale", next_step=f"publish card --manifest {manifest}")
    echo(f"card is fresh: {readme}")


def _card_from_hub(manifest: Path, *, write: bool, pull_request: bool) -> None:
    from publisher.pipeline.republish import card_from_hub
    from publisher.pipeline.stages.push import Target

    done = card_from_hub(manifest, write=write, target=Target(pull_request=pull_request))
    echo(done.diff or "the published card is what its evidence gives\n", nl=False)
    if done.push is not None:
        echo(f"{done.push.hub}: {done.push.result}: {done.push.url}")


COMMANDS: Final = (extract, validate, verify, card, push)
