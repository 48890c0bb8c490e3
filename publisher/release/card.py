"""The card: README.md and its pictures, rendered from the manifest and the JSON artefacts alone.

The body is a Jinja template, the header huggingface_hub's own `ModelCardData`. A variable that a template names
and nothing provides is an error, never a blank. Refused is evidence that is not the manifest's: another path,
checkpoint or setting, or a verification of another adapter. No network, no torch.
"""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import TemplateError

from publisher import __version__
from publisher.errors import CardError
from publisher.manifest.schema import Bounds, Manifest, Reference, Variant
from publisher.records.checkpoint import Checkpoint
from publisher.records.extraction import Extraction
from publisher.records.filenames import CARD, EXTRACTION, LOADERS, PICTURES, VERIFICATION
from publisher.records.files import packaged_folder
from publisher.records.loaders import Loaders, LoaderVerdict
from publisher.records.provenance import digest_of_sources
from publisher.records.verification import Limits, Verification, VerificationSet
from publisher.release.charts import card_pictures
from publisher.release.filters import FILTERS
from publisher.release.templating import card_environment

_RENDERING = (
    "release/card.py",
    "release/filters.py",
    "records/formats.py",
    "release/charts.py",
    "release/svg.py",
    "release/verdict.py",
    "release/templating.py",
    "border/escape.py",
)
_PIPELINES = {"ForConditionalGeneration": "image-text-to-text", "ForCausalLM": "text-generation"}


@dataclass(frozen=True)
class Evidence:
    """What the card may say about one variant.

    Attributes:
        variant: the manifest's entry.
        extraction: its extraction.json.
        verification: its verification.json; without one, the card says that none was run.
        loaders: the verdicts of its loaders.json; without any, the variant is not in the card's table of loaders.
    """

    variant: Variant
    extraction: Extraction
    verification: Verification | None
    loaders: tuple[LoaderVerdict, ...] = ()

    @property
    def sets(self) -> tuple[VerificationSet, ...]:
        """The test sets of the verification."""
        return self.verification.sets if self.verification else ()

    @property
    def fp8_sets(self) -> tuple[VerificationSet, ...]:
        """Those on the FP8 base."""
        return self.verification.fp8.sets if self.verification and self.verification.fp8 else ()

    @property
    def pictures(self) -> dict[str, str]:
        """The SVG files of its card, by path in the release."""
        folder = f"{self.variant.folder}/" if self.variant.folder else ""
        return {f"{folder}{name}": text for name, text in card_pictures(self.extraction).items()}


# --- reading the evidence -----------------------------------------------------------------------------------


def load_evidence(manifest: Manifest, staged: Path) -> tuple[Evidence, ...]:
    """The JSON artefacts of every variant, in the manifest's order, from the staged tree.

    Raises:
        CardError: an extraction.json is missing, or an artefact is not of this manifest or of this adapter.
        FetchError: an artefact is damaged or of another schema.
    """
    return tuple(_evidence(variant, staged / variant.folder) for variant in manifest.variants)


def _evidence(variant: Variant, folder: Path) -> Evidence:
    extraction = load_extraction(variant, folder / EXTRACTION)
    verification = load_verification(variant, extraction, file=folder / VERIFICATION)
    return Evidence(variant, extraction, verification, load_loaders(extraction, folder / LOADERS))


def load_extraction(variant: Variant, file: Path) -> Extraction:
    """The variant's extraction.json.

    Raises:
        CardError: it is missing, or of another path, checkpoint or setting than the manifest's.
        FetchError: it is damaged or of another schema.
    """
    if not file.is_file():
        raise CardError(f"{file} does not exist", next_step="publish extract --manifest MANIFEST")
    extraction = Extraction.read(file)
    _agree(file, _found(extraction), expected=_wanted(variant), command="extract")
    return extraction


def load_verification(variant: Variant | None, extraction: Extraction, *, file: Path) -> Verification | None:
    """The variant's verification.json, if there is one; without a variant it is held against extraction.json alone.

    Raises:
        CardError: it is of another path or adapter than extraction.json, or not as the manifest asks for.
        FetchError: it is damaged or of another schema.
    """
    if not file.is_file():
        return None
    verification = Verification.read(file)
    expected = {"path": extraction.path, "adapter_sha256": extraction.summary.adapter.sha256}
    if variant is not None and variant.verification is None:
        raise CardError(
            f"{file} is there, and the manifest asks for no verification",
            next_step="delete it, or write the section verification into the manifest",
        )
    _agree(file, _tried(verification), expected=expected | (_asked(variant) if variant else {}), command="verify")
    return verification


def load_loaders(extraction: Extraction, file: Path) -> tuple[LoaderVerdict, ...]:
    """Return the verdicts of loaders.json; where there is none, those that an earlier version put in extraction.json.

    Raises:
        CardError: it is of another path or adapter than extraction.json.
        FetchError: it is damaged or of another schema.
    """
    if not file.is_file():
        return extraction.loaders
    found, summary = Loaders.read(file), extraction.summary
    expected = {
        "path": extraction.path,
        "adapter_sha256": summary.adapter.sha256,
        "config_sha256": summary.config.sha256,
    }
    _agree(file, found.model_dump(include={*expected}), expected=expected, command="validate")
    return found.verdicts


def _agree(file: Path, found: dict[str, Any], *, expected: dict[str, Any], command: str) -> None:
    for field, value in expected.items():
        if found.get(field) != value:
            raise CardError(
                f"{file}: {field} is {found.get(field)}",
                expected=f"{value}",
                next_step=f"publish {command} --manifest MANIFEST, then publish card --manifest MANIFEST",
            )


def _wanted(variant: Variant) -> dict[str, Any]:
    return {
        "path": variant.path,
        "source": _pin(variant.source),
        "base": _pin(variant.base),
        "settings.model_class": variant.model_class,
        **{f"settings.{name}": value for name, value in variant.adapter.model_dump().items()},
    }


def _found(extraction: Extraction) -> dict[str, Any]:
    return {
        "path": extraction.path,
        "source": _identity(extraction.source),
        "base": _identity(extraction.base),
        **{f"settings.{name}": value for name, value in extraction.settings.model_dump().items()},
    }


def _asked(variant: Variant) -> dict[str, Any]:
    """What the manifest says of its verification, by field."""
    settings, fp8 = variant.verification, variant.fp8
    if settings is None:
        return {}
    return {
        "runner": settings.runner,
        "dtype": settings.dtype,
        "sets": [one.name for one in settings.sets],
        **{f"sets.{one.name}.file": one.file for one in settings.sets},
        **{f"sets.{one.name}.{bound}": value for one in settings.sets for bound, value in _bounds(one).items()},
        "fp8": _pin(fp8) if fp8 else None,
        **({"fp8.against": fp8.against} if fp8 else {}),
        **({f"fp8.{bound}": [value] * len(settings.sets) for bound, value in _bounds(fp8).items()} if fp8 else {}),
    }


def _tried(verification: Verification) -> dict[str, Any]:
    """The same of a verification that was run."""
    fp8 = verification.fp8
    limits = {one.name: one.limits.model_dump() for one in verification.sets}
    of_fp8 = [one.limits.model_dump() for one in (fp8.sets if fp8 else ())]
    return {
        **verification.model_dump(include={"path", "adapter_sha256", "runner", "dtype"}),
        "sets": [one.name for one in verification.sets],
        **{f"sets.{one.name}.file": one.file.name for one in verification.sets if one.file},
        **{f"sets.{name}.{bound}": value for name, given in limits.items() for bound, value in given.items()},
        "fp8": _identity(fp8.base) if fp8 else None,
        **({"fp8.against": fp8.against} if fp8 else {}),
        **{f"fp8.{bound}": [given[bound] for given in of_fp8] for bound in Limits.model_fields},
    }


def _bounds(given: Bounds) -> dict[str, float | None]:
    return {bound: getattr(given, bound) for bound in Limits.model_fields}


def _pin(reference: Reference) -> str:
    return f"{reference.repo}@{reference.revision}" if reference.repo else "a local folder"


def _identity(checkpoint: Checkpoint) -> str:
    # A local folder's revision is the digest of its files, which the manifest does not know.
    return f"{checkpoint.name}@{checkpoint.revision}" if checkpoint.kind == "hub" else "a local folder"


# --- rendering ----------------------------------------------------------------------------------------------


def card_files(manifest: Manifest, evidence: Sequence[Evidence], *, beside: Path) -> dict[str, str]:
    """README.md and its pictures, by path in the release; templates are found as `render_card` says.

    Raises:
        CardError: as `render_card` does.
    """
    pictures = {path: text for item in evidence for path, text in item.pictures.items()}
    return {CARD: render_card(manifest, evidence, beside=beside), **pictures}


def other_pictures(manifest: Manifest, files: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """The pictures below `root` that are not these files', are missing, or should not be there."""
    possible = {(Path(variant.folder) / name).as_posix() for variant in manifest.variants for name in PICTURES}
    there = {path: (root / path).read_bytes() for path in possible if (root / path).is_file()}
    wanted = {path: files[path].encode() for path in possible if path in files}
    return tuple(sorted(path for path in possible if there.get(path) != wanted.get(path)))


def render_card(manifest: Manifest, evidence: Sequence[Evidence], *, beside: Path) -> str:
    """README.md: header, body and stamp, one newline at the end, no space at the end of a line.

    The templates that the manifest names are looked for in the folder `beside` (the manifest's own), then among
    those that come with this tool: the order of `find_template`.

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
    digest of the templates that come with this tool and of the code that fills them in.
    """
    digest = hashlib.sha256(digest_of_sources(_RENDERING).encode())
    for file in sorted(packaged_folder("templates").glob("*.j2")):
        if not file.name.startswith("report."):
            digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return f"<!-- Rendered by publisher {__version__}, card {digest.hexdigest()[:12]}. -->"


def check_card(text: str, path: Path) -> str:
    """Unified diff from the card at `path` to this text; empty where they are the same."""
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
    classes = {variant.model_class for variant in manifest.variants}
    tags = {next((tag for end, tag in _PIPELINES.items() if name.endswith(end)), None) for name in classes}
    return tags.pop() if len(tags) == 1 else None


def _body(manifest: Manifest, evidence: Sequence[Evidence], *, folders: tuple[Path, ...]) -> str:
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
