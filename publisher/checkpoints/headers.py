"""Checkpoints on disk: which files they are made of, their headers, and one tensor at a time.

Only safetensors are read, single or sharded, found by the names transformers looks for. A shard that is missing
or cut short, an index that names a tensor no shard holds, and a repository of pickled weights are refused, each
with one clear error. Headers are read without torch; tensors are read one at a time, never the whole model.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from publisher.border.files import open_regular, read_regular
from publisher.border.json_text import parse_json_object
from publisher.border.limits import LIMITS
from publisher.border.safetensors_header import DTYPES, LENGTH_BYTES, Entry, header_length, parse_header
from publisher.errors import FetchError
from publisher.records.files import digest_of, sha256_of

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
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


class Reader(Protocol):
    """Reads tensors of one checkpoint by name, on the CPU and in their stored dtype, wherever they are."""

    def read(self, name: str) -> "torch.Tensor":
        """The tensor."""

    def blocks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """The tensor flat, in blocks of so many elements, the last one shorter; whoever has seen enough stops.

        A block is good until the next one is asked for, which may take its place in memory.
        """


def weight_entry(names: Collection[str], *, where: str) -> str:
    """The file that leads to the weights: `model.safetensors`, or the index of its shards.

    Raises:
        FetchError: where neither is there, saying what is there instead.
    """
    for entry in (SINGLE, INDEX):
        if entry in names:
            return entry
    pickled = sorted(name for name in names if name.endswith(_PICKLED))
    found = f"only {', '.join(pickled[:3])}" if pickled else "no weights"
    raise FetchError(
        f"{where} holds {found}",
        expected=f"{SINGLE} or {INDEX}",
        next_step="save the model as safetensors (save_pretrained does), and name that checkpoint",
    )


def shards_of(index: Path) -> tuple[str, ...]:
    """The shard files that an index names, sorted.

    Raises:
        FetchError: where the file is not such an index.
    """
    return tuple(sorted(set(_weight_map(index).values())))


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return read_json(folder / CONFIG)


def checkpoint_files(folder: Path) -> tuple[str, ...]:
    """Names of the files the checkpoint in this folder is made of: config, weights, and the index if sharded.

    Raises:
        FetchError: no such folder, no safetensors weights, or an index that cannot be read.
    """
    if not folder.is_dir():
        raise FetchError(
            f"there is no checkpoint folder {folder}",
            expected="a folder with config.json and model.safetensors or its shards",
            next_step="correct the path in the manifest (it is relative to the folder you run publish in)",
        )
    read_config(folder)
    entry = weight_entry({file.name for file in folder.iterdir()}, where=str(folder))
    shards = shards_of(folder / INDEX) if entry == INDEX else ()
    return tuple(sorted({CONFIG, entry, *shards}))


def companions(folder: Path, checkpoint: Collection[str]) -> list[Path]:
    """What a folder holds beside these files, those of the checkpoint, sorted: head, code, tokenizer, processor."""
    return sorted(path for path in folder.iterdir() if path.name not in checkpoint)


def companions_digest(folder: Path, checkpoint: Collection[str]) -> str:
    """Of the files among them, by name and content: no commit fixes those of a local folder."""
    return digest_of([[file.name, sha256_of(file)] for file in companions(folder, checkpoint) if file.is_file()])


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
    lost = sorted(name for name, shard in _weight_map(index).items() if name not in shards[shard])
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


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FetchError(
            f"{index} has no weight_map of tensor names to shards",
            expected="an index as save_pretrained writes it",
            next_step="download or save the checkpoint again",
        )
    return weight_map


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in this file.

    Raises:
        FetchError: it is missing, or holds something else.
    """
    try:
        return parse_json_object(read_regular(file, limit=LIMITS.json_bytes))
    except FileNotFoundError:
        raise FetchError(f"{file} is missing", next_step="name a folder that save_pretrained wrote") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FetchError(f"{file} is not readable JSON ({why})", next_step="download or save it again") from None


class TensorReader:
    """Reads tensors of one checkpoint by name, each file opened once.

    They are read, not memory-mapped: mapped pages would stay resident, until in the end the whole model were.
    """

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        """`headers` as from `read_headers`."""
        self._headers = headers
        self._stack = ExitStack()
        self._files: dict[Path, BufferedReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def read(self, name: str) -> "torch.Tensor":
        """The tensor on the CPU, in its stored dtype."""
        import torch

        header = self._headers[name]
        octets = torch.empty(header.stop - header.start, dtype=torch.uint8)
        return self._filled(octets, name, start=header.start).reshape(header.shape)

    def blocks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """The tensor flat, in blocks of so many elements, the last one shorter; whoever has seen enough stops.

        All of them in the same memory: fresh pages for each would take longer than reading and comparing them.
        """
        import torch

        header = self._headers[name]
        step = elements * torch_dtype(header).itemsize
        octets = torch.empty(min(step, header.stop - header.start), dtype=torch.uint8)
        for start in range(header.start, header.stop, step):
            yield self._filled(octets[: header.stop - start], name, start=start)

    def _filled(self, octets: "torch.Tensor", name: str, *, start: int) -> "torch.Tensor":
        """As many octets of the file as fit, in the tensor's dtype."""
        header = self._headers[name]
        if header.file not in self._files:
            self._files[header.file] = self._stack.enter_context(_opened_raw(header.file))
        self._files[header.file].seek(start)
        if self._files[header.file].readinto(octets.numpy().data) != octets.numel():
            raise FetchError(
                f"{header.file} ends within {name}",
                expected="a file as long as its header says",
                next_step="download or save that file again",
            )
        return octets.view(torch_dtype(header))


def torch_dtype(header: TensorHeader) -> "torch.dtype":
    """The dtype of a tensor in memory.

    Raises:
        FetchError: torch has none for it.
    """
    import torch

    found = getattr(torch, DTYPES.get(header.dtype, ("", 0))[0], None)
    if not isinstance(found, torch.dtype):
        raise FetchError(
            f"{header.file} holds tensors of dtype {header.dtype}, which torch {torch.__version__} cannot read",
            expected=f"one of {', '.join(DTYPES)}",
            next_step="name a checkpoint in another format, or update torch",
        )
    return found


def _opened_raw(file: Path) -> BufferedReader:
    try:
        return open_regular(file)
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise FetchError(f"{file} {why}", next_step="download or save it again") from None


def in_blocks(tensor: "torch.Tensor", elements: int) -> "Iterator[torch.Tensor]":
    """The tensor flat, in blocks of so many elements, the last one shorter."""
    flat = tensor.reshape(-1)
    return (flat[start : start + elements] for start in range(0, flat.numel(), elements))
