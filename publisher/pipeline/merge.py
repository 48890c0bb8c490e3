"""`publish merge`: base + adapter of a run as one complete checkpoint, for engines that cannot load an adapter.

The base is fetched at its pin; `adapters.merged_checkpoint` writes the folder. It refuses a folder that holds
something, an adapter that is not the one of extraction.json, and a base that is not the one it was made for, before any
work.
"""

from dataclasses import dataclass
from pathlib import Path

from publisher.adapters.merged_checkpoint import open_inputs, require_free, write_merged
from publisher.checkpoints.downloads import fetch_companions
from publisher.errors import ManifestError, MergeError
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Manifest, Variant
from publisher.pipeline.stages.fetch import fetch, hashed_here
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import ADAPTER, EXTRACTION, RESIDUAL
from publisher.records.files import sha256_of
from publisher.records.lock import locked
from publisher.records.merged import Merged
from publisher.records.progress import Progress
from publisher.release.evidence import load_extraction


@dataclass(frozen=True, slots=True)
class Request:
    """What is merged, and where to.

    Attributes:
        manifest_file: the manifest.
        dist: where the staged tree is.
        variant: the variant's path; none where there is but one.
        out: the folder that becomes the checkpoint.
        fp8: quantise the weights again that the base has in FP8.
    """

    manifest_file: Path
    dist: Path
    variant: str | None
    out: Path
    fp8: bool = False


def merge(request: Request, progress: Progress) -> Merged:
    """Write base + adapter as one complete checkpoint.

    Args:
        request: what is merged, and where to.
        progress: told of each piece of work.

    Returns:
        What the checkpoint is, and how near to the released one.

    Raises:
        ManifestError: the manifest has no such variant, or several and none was named.
        MergeError: the folder is taken, or the adapter or base is not what it should be.
        CardError, FetchError, HubError: the extraction or the base cannot be had.
        NoRoomError: the disk is too small.
        BusyError: another run works on the same output.
    """
    variant = _chosen(load_manifest(request.manifest_file), request.variant)
    require_free(request.out)
    name = request.manifest_file.stem
    staged, work = request.dist / name / variant.folder, request.dist / f"{name}.work"
    extraction = load_extraction(variant, staged / EXTRACTION)
    with locked(work):
        _require_recorded(extraction, staged, progress)
        memo, hashed = work / "digests.json", set[Path]()
        base = fetch(variant.base, memo=memo, progress=progress, hashed=hashed)
        base = hashed_here(base, memo=memo, progress=progress, hashed=hashed)
        _require_base(extraction, base)
        fetch_companions(base, progress)
        with open_inputs(extraction, base, staged=staged) as inputs:
            return write_merged(inputs, base, out=request.out, again_fp8=request.fp8, progress=progress)


def _chosen(manifest: Manifest, path: str | None) -> Variant:
    known = {variant.path: variant for variant in manifest.variants}
    wanted = path
    if wanted is None and len(known) == 1:
        wanted = next(iter(known))
    if wanted is None:
        raise ManifestError("the manifest has several variants", expected=f"--variant, one of {', '.join(known)}")
    if not wanted.endswith("/"):
        wanted = f"{wanted}/"
    if wanted not in known:
        raise ManifestError(f"the manifest has no variant at {wanted}", expected=f"one of {', '.join(known)}")
    return known[wanted]


def _require_recorded(extraction: Extraction, staged: Path, progress: Progress) -> None:
    """Raise an error if the files that are merged are not those of extraction.json."""
    for name in (ADAPTER, RESIDUAL):
        recorded = extraction.summary.written.get(name)
        if recorded is None:
            continue
        progress(f"hashing {staged / name}")
        if not (staged / name).is_file() or sha256_of(staged / name) != recorded.sha256:
            raise MergeError(
                f"{staged / name} is not the file that {EXTRACTION} records",
                expected=f"SHA-256 {recorded.sha256[:12]}…",
                next_step="publish extract --manifest MANIFEST",
            )


def _require_base(extraction: Extraction, base: Snapshot) -> None:
    if base.checkpoint.revision != extraction.base.revision:
        raise MergeError(
            f"the base is {base.checkpoint.short}, and the adapter was made for {extraction.base.short}",
            expected="the very same files",
            next_step="publish extract --manifest MANIFEST",
        )
