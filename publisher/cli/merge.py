"""`publish merge`: base + adapter as one complete checkpoint, for engines that cannot load an adapter.

The base's files one after the other: the same shards, index and headers; what the adapter changes is merged as the
release was (`merged`), everything else is copied. Where the manifest asked for the residual, it is set, and the
adapted weights are the released ones in every bit. The folder appears whole or not at all.

It refuses a folder that holds something, an adapter that is not the one of extraction.json, a base that is not the one
it was made for, and a disk that is too small, before any work.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from publisher.adapters.merging import Parts, replacements
from publisher.checkpoints.downloads import fetch_companions
from publisher.checkpoints.files import INDEX, MODEL_CONFIG, read_config, read_json
from publisher.checkpoints.headers import file_headers, read_headers
from publisher.checkpoints.reading import TensorReader
from publisher.checkpoints.rewriting import RewrittenFile, rewritten
from publisher.checkpoints.snapshots import headers_of, reader_of
from publisher.errors import ManifestError, MergeError
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Manifest, Variant
from publisher.pipeline.lock import locked
from publisher.pipeline.stages.fetch import fetch, hashed_here
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import ADAPTER, EXTRACTION, RESIDUAL
from publisher.records.files import canonical_json, flush, no_room, room_in, sha256_of, write_text
from publisher.records.merged import Merged
from publisher.records.progress import Progress
from publisher.release.evidence import load_extraction

_NOT_COPIED = frozenset({".safetensors", ".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".ckpt"})
_CARD = "README.md"  # says what the base is, which this is not
_QUANTISATION = "quantization_config"


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
    """Write the checkpoint.

    Raises:
        ManifestError: the manifest has no such variant, or several and none was named.
        MergeError: the folder is taken, or the adapter or base is not what it should be.
        CardError, FetchError, HubError: the extraction or the base cannot be had.
        NoRoomError: the disk is too small.
        BusyError: another run works on the same output.
    """
    variant = _chosen(load_manifest(request.manifest_file), request.variant)
    _require_free(request.out)
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
        return _merged(extraction, base, staged=staged, request=request, progress=progress)


def _merged(extraction: Extraction, base: Snapshot, *, staged: Path, request: Request, progress: Progress) -> Merged:
    with _parts(extraction, base, staged=staged) as parts:
        if request.fp8 and not any(header.scale for header in parts.base.values()):
            raise MergeError(
                f"--fp8, and {base.checkpoint.short} is not in FP8 with block scales", next_step="leave --fp8 out"
            )
        replaced = replacements(parts, again_fp8=request.fp8)
        names = sorted({header.file.name for header in read_headers(base.folder).values()})
        shards = {name: rewritten(base.folder / name, replaced) for name in names}
        shards = {name: shard for name, shard in shards.items() if shard.pieces}
        _write(shards, base.folder, out=request.out, progress=progress)
        return _told(parts, shards, request=request)


def _chosen(manifest: Manifest, path: str | None) -> Variant:
    known = {variant.path: variant for variant in manifest.variants}
    wanted = next(iter(known)) if path is None and len(known) == 1 else path
    wanted = wanted if wanted is None or wanted.endswith("/") else f"{wanted}/"
    if wanted is None:
        raise ManifestError("the manifest has several variants", expected=f"--variant, one of {', '.join(known)}")
    if wanted not in known:
        raise ManifestError(f"the manifest has no variant at {wanted}", expected=f"one of {', '.join(known)}")
    return known[wanted]


def _require_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise MergeError(
            f"{out} is there already, and what it holds is not touched",
            expected="a folder that does not exist yet, or is empty",
            next_step="name another one with --out",
        )


def _require_recorded(extraction: Extraction, staged: Path, progress: Progress) -> None:
    """The files that are merged are those of extraction.json."""
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


@contextmanager
def _parts(extraction: Extraction, base: Snapshot, *, staged: Path) -> Iterator[Parts]:
    headers, adapter = headers_of(base), file_headers(staged / ADAPTER)
    if RESIDUAL in extraction.summary.written:
        adapter |= file_headers(staged / RESIDUAL)
    with reader_of(base, headers) as bases, TensorReader(adapter) as adapters:
        yield Parts(extraction, headers, bases, adapter=adapter, adapters=adapters)


# --- the folder ---------------------------------------------------------------------------------------------


def _write(shards: Mapping[str, RewrittenFile], base: Path, *, out: Path, progress: Progress) -> None:
    """Every file into a folder beside `out`, which takes its name when all of them are on disk."""
    others = [file for file in sorted(base.iterdir()) if _is_copied(file)]
    size = sum(shard.size for shard in shards.values()) + sum(file.stat().st_size for file in others)
    with _becoming(out, size=size) as folder:
        for file in others:
            shutil.copyfile(file, folder / file.name)
        _write_json(shards, base, folder=folder)
        for name, shard in shards.items():
            for done, tensor in enumerate(shard.write(folder / name)):
                progress(f"writing {name}: {tensor}", done, len(shard.pieces))
        read_headers(folder)
        for file in folder.iterdir():
            flush(file)
        flush(folder)


def _is_copied(file: Path) -> bool:
    """Configuration, tokenizer, licence: not weights in another format, nor what says what the base is."""
    return file.is_file() and file.suffix not in _NOT_COPIED and not file.name.startswith(".") and file.name != _CARD


def _write_json(shards: Mapping[str, RewrittenFile], base: Path, *, folder: Path) -> None:
    """The index and config.json where the tensors are not those of before; otherwise they are copies."""
    before = {name: header.dtype for name, header in read_headers(base).items()}
    after = {name: shard_name for shard_name, shard in shards.items() for name in shard.pieces}
    if after.keys() == before.keys():
        return
    config = read_config(base)
    config.pop(_QUANTISATION, None)
    write_text(folder / MODEL_CONFIG, canonical_json(config))
    if (base / INDEX).is_file():
        index = read_json(base / INDEX)
        total = sum(shard.content for shard in shards.values())
        metadata = index.get("metadata") or {}
        found = index | {"metadata": metadata | {"total_size": total}, "weight_map": after}
        write_text(folder / INDEX, canonical_json(found))


@contextmanager
def _becoming(out: Path, *, size: int) -> Iterator[Path]:
    """A new folder that takes the place of `out` when the block ends well, and vanishes when it does not.

    What a merge that was killed had written is cleared away first.
    """
    place = out.resolve()
    work = place.with_name(f".{place.name}.partial")
    folder = work / "checkpoint"
    with room_in(place.parent, name=place.name, size=size):
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(work):
            try:
                shutil.rmtree(folder, ignore_errors=True)
                _require_room(place, size)
                folder.mkdir()
                yield folder
                if place.is_dir():
                    place.rmdir()  # empty
                folder.rename(place)
                flush(place.parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)


def _require_room(place: Path, size: int) -> None:
    if size > shutil.disk_usage(place.parent).free:
        raise no_room(place.parent, name=place.name, size=size, reason="seen beforehand")


def _told(parts: Parts, shards: Mapping[str, RewrittenFile], *, request: Request) -> Merged:
    summary = parts.extraction.summary
    restored = summary.recovery.share if summary.recovery else summary.exact_share
    wide = any(parts.base[f"{module.name}.weight"].dtype == "F32" for module in parts.extraction.modules)
    share = None if request.fp8 or wide else 1.0 if parts.sets_residual else restored
    return Merged(
        folder=str(request.out),
        shards=len(shards),
        size=sum(shard.size for shard in shards.values()),
        linears=summary.linears,
        carried=len(summary.carried),
        released=share == 1,
        share=share,
        left_out=tuple(tensor.name for tensor in summary.left_out),
    )
