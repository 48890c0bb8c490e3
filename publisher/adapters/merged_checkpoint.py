"""A base with an adapter merged into it, written as one complete checkpoint.

The base's files are written one after the other: the same shards, index and headers. What the adapter changes is merged
as the release was (`merging`), everything else is copied. Where there is a residual it is set, and the adapted weights
are the released ones in every bit. The folder appears whole or not at all.

It refuses a folder that holds something, a base without FP8 weights where they are to be quantised again, and a disk
that is too small, before anything is written.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from publisher.adapters.class_names import ClassNames
from publisher.adapters.loading import configuration, empty_model
from publisher.adapters.merging import MergeInputs, replacements
from publisher.border.files import regular_files
from publisher.checkpoints.companion_files import MODULES, going_along, module_folders
from publisher.checkpoints.files import INDEX, MODEL_CONFIG, read_config, read_json
from publisher.checkpoints.headers import file_headers, read_headers
from publisher.checkpoints.nf4_reader import quantised_headers
from publisher.checkpoints.reading import TensorReader
from publisher.checkpoints.rewriting import RewrittenFile, rewritten
from publisher.checkpoints.snapshots import headers_of, reader_of
from publisher.errors import MergeError
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import ADAPTER, CARD, RESIDUAL
from publisher.records.files import canonical_json, flush, write_text
from publisher.records.merged import Merged
from publisher.records.new_folder import becoming, is_free
from publisher.records.progress import Progress

_QUANTISATION = "quantization_config"


@contextmanager
def open_inputs(extraction: Extraction, base: Snapshot, *, staged: Path) -> Iterator[MergeInputs]:
    """Open base and adapter for a merge, for as long as the block runs.

    Args:
        extraction: of the adapter.
        base: the very checkpoint that the adapter was made for.
        staged: the folder of the adapter's files.

    Yields:
        What is merged.
    """
    model = empty_model(extraction.settings.model_class, configuration(base.folder))
    headers, adapter = ClassNames.of(model).applied(headers_of(base)), file_headers(staged / ADAPTER)
    headers = quantised_headers(headers, extraction.summary.base_quantisation)
    if RESIDUAL in extraction.summary.written:
        adapter |= file_headers(staged / RESIDUAL)
    with reader_of(base, headers) as bases, TensorReader(adapter) as adapters:
        yield MergeInputs(extraction, headers, bases, adapter=adapter, adapter_reader=adapters)


def require_free(out: Path) -> None:
    """Raise an error if the folder of the new checkpoint holds something.

    Raises:
        MergeError: it is a file, or a folder that is not empty.
    """
    if not is_free(out):
        raise MergeError(
            f"{out} is there already, and what it holds is not touched",
            expected="a folder that does not exist yet, or is empty",
            next_step="name another one with --out",
        )


def write_merged(inputs: MergeInputs, base: Snapshot, *, out: Path, again_fp8: bool, progress: Progress) -> Merged:
    """Write base + adapter as a complete checkpoint.

    Args:
        inputs: what is merged.
        base: the base's files on this machine, with those that go along: configuration, tokenizer, licence.
        out: the folder that becomes the checkpoint.
        again_fp8: quantise the weights again that the base has in FP8; without it they become bfloat16.
        progress: told of each tensor.

    Returns:
        What the checkpoint is, and how near to the released one.

    Raises:
        MergeError: the base has no FP8 weights to quantise again, or no place for the adapter.
        NoRoomError: the disk is too small.
        BusyError: another merge writes to the same folder.
    """
    if again_fp8 and not any(header.in_fp8 for header in inputs.base.values()):
        raise MergeError(
            f"--fp8, and {base.checkpoint.short} is not in FP8 with block scales", next_step="leave --fp8 out"
        )
    replaced = replacements(inputs, again_fp8=again_fp8)
    names = sorted({header.file.name for header in read_headers(base.folder).values()})
    shards = {name: rewritten(base.folder / name, replaced) for name in names}
    shards = {name: shard for name, shard in shards.items() if shard.pieces}
    _write(shards, base.folder, out=out, progress=progress)
    summary = inputs.extraction.summary
    share = _restored_share(inputs, again_fp8=again_fp8)
    return Merged(
        folder=str(out),
        shards=len(shards),
        size=sum(shard.size for shard in shards.values()),
        linears=summary.linears,
        experts=len(inputs.extraction.experts),
        carried=len(summary.carried),
        released=share == 1,
        share=share,
        left_out=tuple(tensor.name for tensor in summary.left_out),
    )


def _restored_share(inputs: MergeInputs, *, again_fp8: bool) -> float | None:
    """Return which share of the adapted weights is the released one bit for bit; None where nobody has measured it."""
    modules = inputs.extraction.modules
    names = [*(f"{module.name}.weight" for module in modules)]
    names += [tensor.name for tensor in inputs.extraction.experts]
    if again_fp8 or any(inputs.base[name].dtype == "F32" for name in names):
        return None
    if any(module.arithmetic and module.arithmetic.merged_in != module.arithmetic.rounded_to for module in modules):
        return None
    if inputs.sets_residual:
        return 1.0
    summary = inputs.extraction.summary
    return summary.recovery.share if summary.recovery else summary.exact_share


# --- the folder ---------------------------------------------------------------------------------------------


def _write(shards: Mapping[str, RewrittenFile], base: Path, *, out: Path, progress: Progress) -> None:
    """Write every file into a folder beside `out`, which takes its name when all of them are on disk."""
    links = (file for file in base.iterdir() if file.is_symlink() and file.is_file())  # the publisher's own
    paths = {file.relative_to(base).as_posix() for file in (*regular_files(base), *links)}
    others = [path for path in going_along(paths, module_folders(base / MODULES)) if path != CARD]
    size = sum(shard.size for shard in shards.values()) + sum((base / path).stat().st_size for path in others)
    with becoming(out, size=size) as folder:
        for path in others:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / path, folder / path)
        _write_json(shards, base, folder=folder)
        for name, shard in shards.items():
            for done, tensor in enumerate(shard.write(folder / name)):
                progress(f"writing {name}: {tensor}", done, len(shard.pieces))
        read_headers(folder)
        for place in sorted(folder.rglob("*"), reverse=True):  # a folder after what it holds
            flush(place)
        flush(folder)


def _write_json(shards: Mapping[str, RewrittenFile], base: Path, *, folder: Path) -> None:
    """Write the index and config.json anew where the tensors are not those of before; otherwise they are copies."""
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
