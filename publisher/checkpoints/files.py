"""Which files a checkpoint is made of: config.json, the weights, and their index where they are sharded.

Only safetensors are read, single or sharded, found by the names transformers looks for. A folder of anything else is
refused, by what it is (`folder_formats`), and so is JSON that cannot be read.
"""

from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Any

from publisher.border.files import read_regular, read_text
from publisher.border.json_text import parse_json_object
from publisher.border.limits import LIMITS
from publisher.border.names import shortened
from publisher.checkpoints.card_fields import Beside, base_in_card
from publisher.checkpoints.folder_formats import folder_format
from publisher.errors import FetchError
from publisher.records.files import digest_of, sha256_of

MODEL_CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_entry(names: Collection[str], *, where: str, beside: Beside) -> str:
    """Return the file that leads to the weights: `model.safetensors`, or the index of its shards.

    Args:
        names: paths of the files that are there.
        where: the checkpoint, for the message.
        beside: reads a small file of it; the card is asked for the base where there are no weights to be read.

    Returns:
        Its name.

    Raises:
        FetchError: neither is there; the message says what is there instead.
    """
    for entry in (SINGLE, INDEX):
        if entry in names:
            return entry
    found, next_step = "no weights", "save the model as safetensors (save_pretrained does), and name that checkpoint"
    if known := folder_format(names):
        kind, file = known
        base = base_in_card(beside)
        found = f"{kind.name} ({shortened(file)})"
        next_step = f"{kind.next_step}; its card names the base {base}" if base else kind.next_step
    raise FetchError(f"{where} holds {found}", expected=f"{SINGLE} or {INDEX}", next_step=next_step)


def shards_of(index: Path) -> tuple[str, ...]:
    """Return the shard files that an index names, sorted.

    Raises:
        FetchError: the file is missing, or is not such an index.
    """
    return tuple(sorted(set(weight_map(index).values())))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the checkpoint's config.json.

    Raises:
        FetchError: it is missing, or holds no JSON object.
    """
    return read_json(folder / MODEL_CONFIG)


def checkpoint_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of the checkpoint in this folder: config, weights, and the index if sharded.

    Raises:
        FetchError: no such folder, no safetensors weights, or an index that cannot be read.
    """
    if folder.is_file():
        raise FetchError(
            f"{folder} is a file",
            expected="the folder of a checkpoint",
            next_step="name the folder that it lies in",
        )
    if not folder.is_dir():
        raise FetchError(
            f"there is no checkpoint folder {folder}",
            expected="a folder with config.json and model.safetensors or its shards",
            next_step="correct the path in the manifest (it is relative to the folder you run publish in)",
        )
    entry = weight_entry(_names_in(folder), where=str(folder), beside=text_beside(folder))
    read_config(folder)
    shards = shards_of(folder / INDEX) if entry == INDEX else ()
    return tuple(sorted({MODEL_CONFIG, entry, *shards}))


def _names_in(folder: Path) -> tuple[str, ...]:
    """Return the paths of the files in a folder and in its own folders."""
    every = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    return tuple(path.relative_to(folder).as_posix() for path in islice(every, LIMITS.repository_files))


def text_beside(folder: Path) -> Beside:
    """Return a function that gives the text of a file in this folder, or None where there is none to be read."""

    def text(name: str) -> str | None:
        try:
            return read_text(folder / name)
        except OSError:
            return None

    return text


def companions(folder: Path, checkpoint: Collection[str]) -> list[Path]:
    """Return what a folder holds beside the files of its checkpoint, sorted: head, code, tokenizer, processor."""
    return sorted(path for path in folder.iterdir() if path.name not in checkpoint)


def companions_digest(folder: Path, checkpoint: Collection[str]) -> str:
    """Return a digest of the files among the companions, by name and content.

    No commit fixes those of a local folder.
    """
    return digest_of([[file.name, sha256_of(file)] for file in companions(folder, checkpoint) if file.is_file()])


def weight_map(index: Path) -> dict[str, str]:
    """Return the shard of each tensor, as an index gives it.

    Raises:
        FetchError: the file is missing, or is not such an index.
    """
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise FetchError(
            f"{index} has no weight_map of tensor names to shards",
            expected="an index as save_pretrained writes it",
            next_step="download or save the checkpoint again",
        )
    return shards


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in this file.

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
