"""The two checkpoints of a variant in a run: when they are fetched, and whether they are still what was read.

A pin tells whether earlier results hold: of the Hub, a commit id; of a local folder, the digest of its files, which the
memo of earlier runs may vouch for. Whatever reads tensors goes by digests that this run has made itself.
"""

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from publisher.checkpoints.downloads import fetch_companions
from publisher.errors import FetchError, VerificationError
from publisher.manifest.schema import Reference
from publisher.pipeline.sites import VariantSite
from publisher.pipeline.stages.fetch import changed_since_hashed, fetch, hashed_here
from publisher.records.checkpoint import Checkpoint, Snapshot
from publisher.records.extraction import Extraction


@dataclass(frozen=True, slots=True)
class Pair:
    """The two checkpoints of a variant, and the FP8 release of the base where that is tried too."""

    base: Snapshot
    tuned: Snapshot
    fp8: Snapshot | None = None

    @property
    def pins(self) -> list[tuple[str, str, str]]:
        """The pins of the merged fine-tune and the base."""
        return [_pin(self.tuned.checkpoint), _pin(self.base.checkpoint)]


def _pin(checkpoint: Checkpoint) -> tuple[str, str, str]:
    return checkpoint.kind, checkpoint.name, checkpoint.revision


def pins(site: VariantSite) -> list[tuple[str, str, str]]:
    """Return kind, name and revision of the merged fine-tune and the base; nothing is fetched from the Hub for it.

    Raises:
        FetchError: a local folder holds no checkpoint.
    """
    if pair := site.given("fetch", Pair):
        return pair.pins
    return [_pin_of(site, reference) for reference in (site.variant.source, site.variant.base)]


def _pin_of(site: VariantSite, reference: Reference) -> tuple[str, str, str]:
    if reference.path is None:
        return "hub", reference.repo or "", reference.revision or ""
    return _pin(_by_memo(site, reference).checkpoint)


def local_revision(site: VariantSite, reference: Reference) -> str:
    """Return the digest of all files of a local folder.

    Raises:
        FetchError: the folder holds no checkpoint.
    """
    return _by_memo(site, reference).checkpoint.revision


def _by_memo(site: VariantSite, reference: Reference) -> Snapshot:
    return fetch(reference, memo=site.memo, progress=site.progress, hashed=site.hashed)


def fetched_pair(site: VariantSite) -> Pair:
    """Fetch all that the variant's stages read, so that nothing is found missing after hours.

    Args:
        site: the variant.

    Returns:
        Both checkpoints, with digests that this run has made where a later stage of it reads tensors.

    Raises:
        FetchError: weights are missing or damaged.
        HubError: the Hub cannot be reached, or refuses.
        VerificationError: the weights are to be streamed, and models to be run; or what the release brings to answer
            requests is missing or does not load.
    """
    variant, options = site.variant, site.options
    if site.verifies and options.stream and options.engine == "local":
        raise VerificationError(
            "the weights are streamed, and verification runs the models on this machine",
            next_step="run without --stream, or stop with --until loaders",
        )
    known = partial(fetch, memo=site.memo, progress=site.progress, stream=options.stream, hashed=site.hashed)
    tuned, base, fp8 = known(variant.source), known(variant.base), None
    if site.verifies:
        fetch_companions(tuned, site.progress)
        _require_answering(site, tuned.folder)
        fp8 = known(variant.fp8) if variant.fp8 else None
    if options.last == "fetch":
        return Pair(base, tuned, fp8)
    anew = partial(hashed_here, memo=site.memo, progress=site.progress, hashed=site.hashed)
    return Pair(anew(base), anew(tuned), anew(fp8) if fp8 else None)


def _require_answering(site: VariantSite, release: Path) -> None:
    """Raise unless the release's code and processor load; where a cluster runs them, the file alone is looked for."""
    settings = site.variant.verification
    if settings and settings.runner == "decision" and not (release / settings.module).is_file():
        raise VerificationError(
            f"{site.variant.source.where} has no {settings.module}",
            expected="the decision module of the source repository, at its root",
            next_step="correct module in the manifest's verification",
        )
    if site.options.engine == "local":
        from publisher.verification.release_code import require_answering

        site.progress(f"trying what {site.variant.label} brings to answer requests")
        require_answering(site.variant, release)


def require_unchanged(site: VariantSite, pair: Pair) -> None:
    """Raise if a checkpoint was changed while an extraction read it: which bytes it read is not known.

    Raises:
        FetchError: naming each file; what was kept of that extraction is gone.
    """
    changed = [file for side in (pair.base, pair.tuned) for file in changed_since_hashed(side, site.memo)]
    if changed:
        for folder in site.kept("").glob("modules-*"):
            shutil.rmtree(folder)
        raise FetchError(
            f"{', '.join(changed)} changed while this run was reading from it",
            expected="checkpoints that stay as they are until the run has ended",
            next_step="run the same command again: it reads the files as they are now",
        )


def extraction_of(site: VariantSite, pair: Pair) -> Extraction:
    """Return the extraction that a later stage starts from; one of an earlier run must be of these checkpoints.

    Raises:
        FetchError: it is of other checkpoints than these, or damaged.
    """
    extraction = site.result("extract", Extraction)
    here = (pair.base.checkpoint, pair.tuned.checkpoint)
    if not site.options.includes("extract") and (extraction.base, extraction.source) != here:
        raise FetchError(
            f"{site.staged} is an extraction of other files of source and base than those that are there",
            expected="the files that its extraction.json names",
            next_step=f"publish extract --manifest {site.options.manifest_file}",
        )
    return extraction
