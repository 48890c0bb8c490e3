"""The options that several commands take, each written once."""

from pathlib import Path
from typing import Final

import click

from publisher.pipeline.table import NAMES

manifest: Final = click.option(
    "--manifest", "-m", type=click.Path(path_type=Path), metavar="M", help="The manifest to publish."
)
manifest_required: Final = click.option(
    "--manifest", "-m", type=click.Path(path_type=Path), required=True, metavar="M", help="The manifest."
)
dist: Final = click.option(
    "--dist", type=click.Path(path_type=Path), default=Path("dist"), metavar="DIR", help="Output folder [dist]."
)
folder: Final = click.option(
    "--folder", type=click.Path(path_type=Path), metavar="DIR", help="Any folder with an extraction.json, instead."
)
output: Final = click.option(
    "--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it."
)
_STAGES: Final = click.Choice(NAMES)
first: Final = click.option(
    "--from", "first", type=_STAGES, default=NAMES[0], help="Start with this stage, on earlier results."
)
last: Final = click.option("--until", "last", type=_STAGES, default=NAMES[-1], help="Stop after this stage.")
variants: Final = click.option(
    "--variant", "variants", multiple=True, metavar="PATH", help="Only this variant; may be repeated."
)
device: Final = click.option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N.")
engine: Final = click.option(
    "--engine", default="local", metavar="NAME", help="local, ray, or ray://HOST:PORT: where the work is done."
)
model_gpus: Final = click.option(
    "--model-gpus",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="GPUs that a model of verification is spread over [1].",
)
stream: Final = click.option(
    "--stream", is_flag=True, help="Read the weights from the Hub as needed; store none of them."
)
hub: Final = click.option(
    "--hub", type=click.Choice(["local"]), help="local: rehearse the push on an embedded local Hub."
)
tag: Final = click.option("--tag", metavar="NAME", help="Tag the commit, as v1.2.0.")
pull_request: Final = click.option(
    "--pr", "pull_request", is_flag=True, help="Open a pull request instead of committing to main."
)
signing_key: Final = click.option(
    "--signing-key",
    type=click.Path(path_type=Path),
    envvar="PUBLISH_SIGNING_KEY",
    show_envvar=True,
    metavar="FILE",
    help="Private key for a manifest with sign.key.",
)
as_json: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
verbose: Final = click.option("-v", "--verbose", is_flag=True, help="Say more; show the traceback of an error.")
traceback: Final = click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, help="Show the traceback of an error."
)
