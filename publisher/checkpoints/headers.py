"""What the headers of a checkpoint in a folder say of its tensors; they are read without torch.

A shard that is missing or cut short, and an index that names a tensor no shard holds, are refused, each with one
clear error.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from publisher.border.files import open_regular
from publisher.border.safetensors_header import LENGTH_BYTES, Header, header_length, parse_header
from publisher.checkpoints.files import (
    INDEX,
    SINGLE,
    checkpoint_files,
    read_config,
    shards_of,
    text_beside,
    weight_map,
)
from publisher.checkpoints.tensor_formats import require_plain
from publisher.errors import FetchError
from publisher.records.checkpoint import Quantisation

if TYPE_CHECKING:
    from publisher.checkpoints.converting_reader import Conversion

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class Scale:
    """The scales of a weight in FP8.

    Attributes:
        weight: header of the weight as it is stored.
        name: of the tensor with the scales.
        header: of that tensor, which has one scale for each block.
        block: rows and columns of a block.
    """

    weight: "TensorHeader"
    name: str
    header: "TensorHeader"
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The two tensors in which experts in MXFP4 are stored.

    Attributes:
        blocks: header of the codes, two in each byte.
        scales: header of the exponents, one for each block of 32 codes.
    """

    blocks: "TensorHeader"
    scales: "TensorHeader"


@dataclass(frozen=True, slots=True)
class Quantised:
    """How a base's weight is read that a QLoRA was trained on: quantised and dequantised.

    Attributes:
        stored: header of the weight as it is stored.
        how: the quantisation.
    """

    stored: "TensorHeader"
    how: Quantisation


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor.

    Attributes:
        dtype: in safetensors' spelling (`BF16`, `F32`, `F8_E4M3`).
        shape: of the tensor.
        file: that holds it.
        sha256: of the file, where it is known: a tensor is the same in two files of one digest.
        start: offset of its first byte in the file.
        stop: offset of the byte after its last.
        scale: of a weight in FP8 that is read dequantised (`fp8_reader`); None of any other tensor.
        quantised: of a base's weight that is read as its quantisation leaves it (`nf4_reader`); None of any other.
        mxfp4: the parts of experts that are read dequantised (`mxfp4_reader`); None of any other tensor.
        conversion: how it is made of the tensors that are stored (`converting_reader`); None of any other tensor.
        stored: its name in the file, where the model class has another one; None where that is the same.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    sha256: str | None = None
    start: int = 0
    stop: int = 0
    scale: Scale | None = field(default=None, kw_only=True)
    quantised: Quantised | None = field(default=None, kw_only=True)
    mxfp4: Mxfp4 | None = field(default=None, kw_only=True)
    conversion: "Conversion | None" = field(default=None, kw_only=True)
    stored: str | None = field(default=None, kw_only=True)

    @property
    def in_fp8(self) -> bool:
        """Whether it is stored in FP8 with scales, or any of the tensors is that it is made of."""
        parts = self.conversion.parts if self.conversion else ()
        return self.scale is not None or any(part.header.scale is not None for part in parts)


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the header of every tensor of the checkpoint in this folder, sorted by name.

    Raises:
        FetchError: no such folder, missing or damaged files, no tensors, one the index names and no shard holds, or
            weights of a format that is not read.
    """
    if INDEX in checkpoint_files(folder):
        entry = folder / INDEX
        shards = {name: file_headers(_shard(entry, name)) for name in shards_of(entry)}
        require_held(entry, shards)
    else:
        entry = folder / SINGLE
        shards = {SINGLE: file_headers(entry)}
    headers = {name: header for shard in shards.values() for name, header in shard.items()}
    if not headers:
        raise FetchError(
            f"{entry} holds no tensor",
            expected="the model's weights",
            next_step="download or save the checkpoint again",
        )
    require_plain(headers, read_config(folder), where=str(folder), beside=text_beside(folder))
    return dict(sorted(headers.items()))


def require_held(index: Path, shards: Mapping[str, Collection[str]]) -> None:
    """Raise an error unless each tensor that the index names is in the shard it gives.

    Args:
        index: the file of the index.
        shards: the names of the tensors in each shard.

    Raises:
        FetchError: a shard lacks one.
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
    """Return the header of every tensor of one safetensors file, in the order of the file's header.

    Raises:
        FetchError: it is missing, cut short or no safetensors file.
    """
    entries = read_header(file)[1].entries
    return {name: TensorHeader(one.dtype, one.shape, file, None, one.start, one.stop) for name, one in entries.items()}


def read_header(file: Path) -> tuple[bytes, Header]:
    """Return the bytes of a safetensors file before its first tensor, and what they say.

    Raises:
        FetchError: it is missing, cut short or no safetensors file.
    """
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            first = opened.read(LENGTH_BYTES)
            text = opened.read(header_length(first, file_size=size))
            return first + text, parse_header(text, file_size=size)
    except FileNotFoundError:
        raise FetchError(f"{file} is missing", next_step="download or save it again") from None
    except (OSError, ValueError) as error:
        raise _not_whole(file, error) from None


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
    """Return whether the file is what a git clone without Git LFS puts in the place of the weights."""
    with open_regular(file) as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
