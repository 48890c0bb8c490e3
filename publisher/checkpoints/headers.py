"""What the headers of a checkpoint in a folder say of its tensors; they are read without torch.

A shard that is missing or cut short, and an index that names a tensor no shard holds, are refused, each with one
clear error.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from publisher.border.files import open_regular
from publisher.border.safetensors_header import LENGTH_BYTES, Entry, header_length, parse_header
from publisher.checkpoints.files import INDEX, SINGLE, checkpoint_files, shards_of, weight_map
from publisher.errors import FetchError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class Scale:
    """Of a weight in FP8: its own header, and the tensor with one scale for each block of (rows, columns)."""

    weight: "TensorHeader"
    name: str
    header: "TensorHeader"
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor; `dtype` in safetensors' spelling (`BF16`, `F32`, `F8_E4M3`).

    `sha256` is that of the file, where it is known: a tensor is the same in two files of one digest.
    `start` and `stop` are offsets in that file. `scale` is set of a weight in FP8 that is read dequantised
    (`dequantised`).
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    sha256: str | None = None
    start: int = 0
    stop: int = 0
    scale: Scale | None = field(default=None, kw_only=True)


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Name, dtype and shape of every tensor of the checkpoint in this folder, sorted by name.

    Raises:
        FetchError: no such folder, missing or damaged files, no tensors, or one the index names and no shard holds.
    """
    sharded = INDEX in checkpoint_files(folder)
    headers = _sharded_headers(folder) if sharded else file_headers(folder / SINGLE)
    if not headers:
        raise FetchError(
            f"{folder / (INDEX if sharded else SINGLE)} holds no tensor",
            expected="the model's weights",
            next_step="download or save the checkpoint again",
        )
    return dict(sorted(headers.items()))


def _sharded_headers(folder: Path) -> dict[str, TensorHeader]:
    index = folder / INDEX
    shards = {name: file_headers(_shard(index, name)) for name in shards_of(index)}
    require_held(index, shards)
    return {name: header for shard in shards.values() for name, header in shard.items()}


def require_held(index: Path, shards: Mapping[str, Collection[str]]) -> None:
    """Each tensor that the index names is in the shard it gives; `shards` has each one's tensors.

    Raises:
        FetchError: where one is not.
    """
    lost = sorted(name for name, shard in weight_map(index).items() if name not in shards[shard])
    if lost:
        raise FetchError(
            f"{index} names {len(lost)} tensors that its shards do not hold, the first {lost[0]}",
            expected="each tensor in the shard the index gives",
            next_step="download or save the checkpoint again",
        )


def _shard(index: Path, name: str) -> Path:
    shard, inside = index.parent / name, Path(name).name == name
    if not inside or not shard.is_file():
        raise FetchError(
            f"{index} names the shard {name}, which {'is missing' if inside else 'is outside the folder'}",
            expected="every shard beside its index",
            next_step="download the missing shard, or save the checkpoint again",
        )
    return shard


def file_headers(file: Path) -> dict[str, TensorHeader]:
    """Name, dtype and shape of every tensor of one safetensors file.

    Raises:
        FetchError: it is missing, cut short or no safetensors file.
    """
    try:
        entries = _entries(file)
    except FileNotFoundError:
        raise FetchError(f"{file} is missing", next_step="download or save it again") from None
    except (OSError, ValueError) as error:
        raise _not_whole(file, error) from None
    return {name: TensorHeader(one.dtype, one.shape, file, None, one.start, one.stop) for name, one in entries.items()}


def _entries(file: Path) -> dict[str, Entry]:
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = header_length(opened.read(LENGTH_BYTES), file_size=size)
        return parse_header(opened.read(length), file_size=size)


def _not_whole(file: Path, error: OSError | ValueError) -> FetchError:
    size = f" ({file.stat().st_size:,} bytes)" if file.is_file() else ""
    pointer = file.is_file() and _is_lfs_pointer(file)
    why = error.strerror if isinstance(error, OSError) else str(error)
    return FetchError(
        f"{file}{size} is not a whole safetensors file: " + ("it is a Git LFS pointer" if pointer else str(why)),
        expected="a file as long as its header says",
        next_step="git lfs pull" if pointer else "download or save that file again",
    )


def _is_lfs_pointer(file: Path) -> bool:
    """What a git clone without Git LFS puts in the place of the weights."""
    with open_regular(file) as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
