"""Whether the staged tree may be published: it is of this manifest, and every proof of it holds as it is now."""

from pathlib import Path
from typing import TYPE_CHECKING

from publisher.errors import PushError
from publisher.pipeline.markers import lapse
from publisher.pipeline.table import OF_VARIANT, Stage
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import MANIFEST
from publisher.records.validation import Validation
from publisher.release.card import stale_charts

if TYPE_CHECKING:
    from publisher.pipeline.sites import ReleaseSite, VariantSite


def require_publishable(site: "ReleaseSite") -> None:
    """Raise unless card and manifest are those of the artefacts, and each variant passed what it has to pass.

    Raises:
        PushError: a file is stale, or a proof is missing, of other files, or of other settings.
        ValidationError: the packages installed here do not load an adapter that others validated.
    """
    _require_fresh(site)
    for variant in site.variants:
        for stage in OF_VARIANT:
            if stage.proof and stage.applies(variant):
                _require_proof(stage, variant)
        _require_loads_here(variant)


def _require_fresh(site: "ReleaseSite") -> None:
    """Raise unless the card and the manifest's copy are those of this manifest and these artefacts."""
    files, options = site.rendered_card(), site.options
    wanted = {**files, MANIFEST: options.manifest_file.read_text(encoding="utf-8")}
    stale = [name for name, text in wanted.items() if not _holds_text(site.staged / name, text)]
    stale += stale_charts(site.manifest, files, site.staged)
    if stale:
        raise PushError(
            f"{site.staged / stale[0]} is stale", next_step=f"publish card --manifest {options.manifest_file}"
        )


def _holds_text(file: Path, text: str) -> bool:
    return file.is_file() and file.read_bytes() == text.encode()


def _require_proof(stage: "Stage[VariantSite]", site: "VariantSite") -> None:
    if why := lapse(stage, site):
        raise PushError(
            f"{site.staged} has not passed {stage.proof} as it is now: {why}",
            expected=f"{stage.proof} of these very files, by this manifest",
            next_step=f"publish --manifest {site.options.manifest_file}",
        )


def _require_loads_here(site: "VariantSite") -> None:
    """Raise if other packages validated the adapter, and those installed here do not load it; no weights are read."""
    from publisher.adapters.base_config import base_config
    from publisher.adapters.structure_checks import judging_packages, require_structure

    if site.result("validate", Validation).packages == judging_packages():
        return
    site.progress(f"loading {site.staged} with the packages installed here")
    extraction = site.result("extract", Extraction)
    base = Snapshot(checkpoint=extraction.base, folder=base_config(site.variant))
    require_structure(site.variant, extraction, base=base, staged=site.staged)
