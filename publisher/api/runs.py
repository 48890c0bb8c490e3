"""The whole job from a manifest, or one stage of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from publisher.api.border import called_with
from publisher.errors import ManifestError
from publisher.pipeline.options import Run
from publisher.pipeline.run import run as run_stages
from publisher.pipeline.table import NAMES
from publisher.records.outcome import Outcome
from publisher.records.progress import Progress, silent


class StageOptions(TypedDict, total=False):
    """The options of a single stage; they mean what they mean for `run`, and have the same defaults.

    Attributes:
        variants: path of the variant to work on, or several.
        dist: folder of the staged tree and the work folder.
        device: `auto`, `cpu`, `cuda` or, with the local engine, `cuda:N`.
        engine: where the work is done: `local`, `ray` or `ray://HOST:PORT`.
        model_gpus: number of GPUs that each model of the verification is spread over.
        stream: read the weights from the Hub as they are needed.
        progress: a function that is called before each piece of work.
    """

    variants: str | Sequence[str]
    dist: str | Path
    device: str
    engine: str
    model_gpus: int
    stream: bool
    progress: Progress


def run(  # noqa: PLR0913 - the options of the command line, each a keyword with a default
    manifest: str | Path,
    *,
    dry_run: bool = False,
    rehearse: bool = False,
    tag: str | None = None,
    pull_request: bool = False,
    signing_key: str | Path | None = None,
    first: str = NAMES[0],
    last: str = NAMES[-1],
    variants: str | Sequence[str] = (),
    dist: str | Path = "dist",
    device: str = "auto",
    engine: str = "local",
    model_gpus: int = 1,
    stream: bool = False,
    progress: Progress = silent,
) -> Outcome:
    """Run the stages on a manifest, as `publish --manifest MANIFEST` does.

    A finished stage is reused as long as its inputs are the same. Without `dry_run` or `rehearse` this ends with a
    commit to the Hub.

    Args:
        manifest: the YAML file; checkpoints that it names by path are relative to the working folder.
        dry_run: run every stage, and stop before the first write to a Hub.
        rehearse: push to an embedded local Hub instead of the real one.
        tag: name of the tag to set on the commit, such as `v1.2.0`.
        pull_request: open a pull request instead of committing to the branch.
        signing_key: file of the private key, for a manifest with `sign.key`.
        first: name of the first stage; it runs again even if nothing changed, on the results of those before it.
        last: name of the last stage.
        variants: path of the variant to work on, or several; empty for all.
        dist: folder for the staged tree and the work folder.
        device: `auto`, `cpu`, `cuda` or, with the local engine, `cuda:N`.
        engine: where the work is done: `local`, `ray` or `ray://HOST:PORT`.
        model_gpus: number of GPUs that each model of the verification is spread over.
        stream: read the weights from the Hub as they are needed, and store none of them.
        progress: a function that is called before each piece of work; the default tells nobody.

    Returns:
        What was done: the figures of each variant, and the commit or its plan.

    Raises:
        ManifestError: the manifest or an option is wrong.
        PublisherError: a stage failed; what was finished is kept, and the same call goes on from there.

    Example:
        >>> outcome = publisher.run("manifests/demo.yaml", dry_run=True)
        >>> [variant.summary.rank for variant in outcome.variants]
        [16, 16]
    """
    _require_order(first, last)
    options = Run(
        Path(manifest),
        Path(dist),
        device=device,
        engine=engine,
        model_gpus=model_gpus,
        variants=(variants,) if isinstance(variants, str) else tuple(variants),
        first=first,
        last=last,
        dry_run=dry_run,
        rehearse=rehearse,
        tag=tag,
        pull_request=pull_request,
        stream=stream,
        signing_key=None if signing_key is None else Path(signing_key),
    )
    with called_with(progress) as report:
        return run_stages(options, report)


def validate(manifest: str | Path, **options: Unpack[StageOptions]) -> Outcome:
    """Check again that PEFT loads the adapters of an earlier run, and that they do what extraction.json says.

    Args:
        manifest: the YAML file.
        options: see `StageOptions`.

    Returns:
        What was done; `outcome.variants[0].validation` has what PEFT made of the first adapter.

    Raises:
        ManifestError: the manifest or an option is wrong.
        FetchError: there is no extraction to start from.
        ValidationError: an adapter is not what its evidence says.
        PublisherError: something else failed.

    Example:
        >>> [variant.path for variant in publisher.validate("manifests/demo.yaml").variants]
        ['/', 'clef-flash/']
    """
    return run(manifest, **options, first="validate", last="loaders")


def verify(manifest: str | Path, **options: Unpack[StageOptions]) -> Outcome:
    """Compare again how base + adapter and the released model answer the test sets of the manifest.

    Args:
        manifest: the YAML file; a variant without `verification` is passed over.
        options: see `StageOptions`.

    Returns:
        What was done; `outcome.variants[0].verification` has the metrics of the first variant.

    Raises:
        ManifestError: the manifest or an option is wrong.
        FetchError: there is no extraction to start from.
        VerificationError: the answers differ by more than the manifest allows.
        PublisherError: something else failed.

    Example:
        >>> publisher.verify("manifests/demo.yaml").variants[0].verification.sets[0].requests
        24
    """
    return run(manifest, **options, first="verify", last="verify")


def _require_order(first: str, last: str) -> None:
    order = f"the order {', '.join(NAMES)}"
    for name in (first, last):
        if name not in NAMES:
            raise ManifestError(f"there is no stage {name!r}", expected=order)
    if NAMES.index(first) > NAMES.index(last):
        raise ManifestError(f"the first stage, {first}, comes after the last, {last}", expected=order)
