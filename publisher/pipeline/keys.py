"""What each stage's result rests on, but for the code: checkpoints, settings, and the files of the stages before.

A file that is missing has no digest: to say so is the business of the stage that reads it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, EXPORTS, EXTRACTION, RESIDUAL
from publisher.records.files import sha256_of

if TYPE_CHECKING:
    from publisher.pipeline.sites import VariantSite


def extraction(site: "VariantSite") -> object:
    """Return what an extraction rests on: both checkpoints, by their pins, and the settings."""
    from publisher.pipeline.checkpoints import pins

    return [pins(site), site.variant.model_dump(exclude={"source", "base", "verification", "fp8"})]


def validation(site: "VariantSite") -> object:
    """Return what a validation rests on: the adapter's files, of which extraction.json names the checkpoints."""
    exports = (name for names in EXPORTS.values() for name in names)
    return _digests(site.staged, EXTRACTION, ADAPTER_CONFIG, ADAPTER, RESIDUAL, *exports)


def loaders(site: "VariantSite") -> object:
    """Return what the loaders' verdicts rest on: the adapter, its exports, and who validated it."""
    judged = _digests(site.staged, EXTRACTION, ADAPTER_CONFIG, ADAPTER)
    return [judged, site.variant.adapter.exports, _digests(site.kept(""), "validation.json")]


def verification(site: "VariantSite") -> object:
    """Return what a verification rests on: the adapter's files, the request files, settings, both checkpoints."""
    from publisher.checkpoints.files import checkpoint_files, companions_digest
    from publisher.pipeline.checkpoints import local_revision

    variant = site.variant
    files = _digests(site.staged, EXTRACTION, ADAPTER_CONFIG, ADAPTER)
    settings = variant.model_dump(include={"verification", "fp8", "model_class", "source", "base"})
    folder = Path(variant.source.path) if variant.source.path else None
    companions = companions_digest(folder, checkpoint_files(folder)) if folder else ""
    fp8 = local_revision(site, variant.fp8) if variant.fp8 and variant.fp8.path else ""
    return [files, settings, companions, fp8, [file.content for file in site.request_files]]


def _digests(folder: Path, *names: str) -> list[str]:
    return [sha256_of(file) if file.is_file() else "" for file in map(folder.joinpath, names)]
