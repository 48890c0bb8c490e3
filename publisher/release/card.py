"""The card: README.md and its charts, rendered from the manifest and the JSON artefacts alone.

The body is a Jinja template, the header huggingface_hub's own `ModelCardData`. A variable that a template names and
nothing provides is an error, never a blank. The evidence was read and held against the manifest by `evidence`, and the
forms of figures are those of `filters`. No network, no torch.
"""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import TemplateError

from publisher import __version__
from publisher.errors import CardError
from publisher.manifest.schema import Manifest, Variant
from publisher.records.filenames import CARD, CHARTS
from publisher.records.files import packaged_folder
from publisher.records.provenance import code_digest
from publisher.release.charts import card_charts
from publisher.release.evidence import VariantEvidence
from publisher.release.filters import FILTERS, chart_paths
from publisher.release.templating import card_environment

_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
}
_SPOKEN = {"WhisperForConditionalGeneration": "automatic-speech-recognition"}
_ON_TEXT = ("text-classification", "token-classification", "question-answering")  # where PEFT has a task type for it


def card_files(manifest: Manifest, evidence: Sequence[VariantEvidence], *, beside: Path) -> dict[str, str]:
    """Return README.md and the charts beside it, as they follow from the evidence.

    Args:
        manifest: the release's.
        evidence: of each variant, in the manifest's order.
        beside: the folder whose templates come first, as for `render_card`.

    Returns:
        The text of each file, by its path in the release.

    Raises:
        CardError: a template is missing, is not Jinja, or names a variable that is not there.
    """
    charts: dict[str, str] = {}
    for item in evidence:
        charts |= charts_by_path(item)
    return {CARD: render_card(manifest, evidence, beside=beside), **charts}


def charts_by_path(evidence: VariantEvidence) -> dict[str, str]:
    """Return the SVG files of a variant's card, by path in the release."""
    drawn = card_charts(evidence.extraction).values()
    return dict(zip(chart_paths(evidence), drawn, strict=True))


def stale_charts(manifest: Manifest, files: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """Return the charts below `root` that are not these files', are missing, or should not be there.

    Args:
        manifest: the release's.
        files: what the evidence gives now, by path in the release.
        root: the folder of the release.

    Returns:
        Paths in the release, sorted.
    """
    possible = {(Path(variant.folder) / name).as_posix() for variant in manifest.variants for name in CHARTS}
    there = {path: (root / path).read_bytes() for path in possible if (root / path).is_file()}
    wanted = {path: files[path].encode() for path in possible if path in files}
    return tuple(sorted(path for path in possible if there.get(path) != wanted.get(path)))


def render_card(manifest: Manifest, evidence: Sequence[VariantEvidence], *, beside: Path) -> str:
    """Return README.md: header, body and stamp, with one newline at its end and no space at the end of a line.

    Args:
        manifest: the release's.
        evidence: of each variant, in the manifest's order.
        beside: the folder in which the manifest's templates are looked for first, its own; those that come with this
            tool are next, which is the order of `find_template`.

    Returns:
        The card's text.

    Raises:
        CardError: a template is missing, is not Jinja, or names a variable that is not there.
    """
    header = _header(manifest)
    body = _body(manifest, evidence, folders=(beside, packaged_folder("templates")))
    text = f"---\n{header.to_yaml()}\n---\n\n{body}"
    text = "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n") + f"\n\n{stamp()}\n"
    if ModelCard(text).data.to_yaml() != header.to_yaml():
        raise CardError("the card's header does not read back as it was written", next_step="report this as a bug")
    return text


def stamp() -> str:
    """Return the card's last line, a comment: which version of this tool, and which card of it, rendered the card.

    An audit by the same version and card compares every byte; any other compares what the card says. The card is a
    digest of the templates that come with this tool and of all the code that this module can run.
    """
    digest = hashlib.sha256(code_digest(__name__).encode())
    for file in sorted(packaged_folder("templates").glob("*.j2")):
        if not file.name.startswith("report."):
            digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return f"<!-- Rendered by publisher {__version__}, card {digest.hexdigest()[:12]}. -->"


def check_card(text: str, path: Path) -> str:
    """Return the unified diff from the card at `path` to this text; it is empty where they are the same."""
    there = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = (there.splitlines(keepends=True), text.splitlines(keepends=True))
    return "".join(difflib.unified_diff(*lines, fromfile=f"{path}", tofile="rendered now"))


def _header(manifest: Manifest) -> ModelCardData:
    # The Hub refuses a card whose base_model is no repository, so local folders stay out of the header.
    bases = [variant.base.repo for variant in manifest.variants if variant.base.repo]
    return ModelCardData(
        license=manifest.license,
        library_name="peft",
        base_model=list(dict.fromkeys(bases)) or None,
        base_model_relation="adapter" if bases else None,
        pipeline_tag=_pipeline_tag(manifest),
        tags=["lora", "peft", "transformers"],
    )


def _pipeline_tag(manifest: Manifest) -> str | None:
    tags = {_tag_of(variant) for variant in manifest.variants}
    return tags.pop() if len(tags) == 1 else None


def _tag_of(variant: Variant) -> str | None:
    """Return the Hub's name of what a class is for; None where its name does not tell.

    A class for conditional generation has images beside its text, unless its task type says that it is another.
    """
    name, task = variant.model_class, variant.adapter.task_type
    if name.endswith("ForConditionalGeneration"):
        return "image-text-to-text" if task == "FEATURE_EXTRACTION" else _SPOKEN.get(name)
    tag = next((tag for end, tag in _PIPELINES.items() if name.endswith(end)), None)
    return None if tag in _ON_TEXT and task is None else tag


def _body(manifest: Manifest, evidence: Sequence[VariantEvidence], *, folders: tuple[Path, ...]) -> str:
    environment = card_environment(folders)
    environment.filters.update(FILTERS)
    try:
        return environment.get_template(manifest.card.template).render(manifest=manifest, evidence=evidence)
    except TemplateError as error:
        raise CardError(
            f"the template {manifest.card.template} cannot be rendered: {_complaint(error)}",
            expected="the variables and filters of docs/card.md",
            next_step="correct the template, then publish card --manifest MANIFEST",
        ) from error


def _complaint(error: TemplateError) -> str:
    place = getattr(error, "name", None), getattr(error, "lineno", None)
    return f"{error.message} ({place[0]}, line {place[1]})" if all(place) else f"{error.message}"
