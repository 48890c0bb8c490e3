"""What the headers of a checkpoint on the Hub say of its tensors; they are read there by ranges, without torch.

A file of weights whose header does not describe its bytes exactly is refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from publisher.border.files import read_text
from publisher.border.safetensors_header import LENGTH_BYTES, Entry, Header, header_length, parse_header
from publisher.checkpoints.card_fields import Beside
from publisher.checkpoints.files import INDEX, read_config
from publisher.checkpoints.headers import TensorHeader, require_held
from publisher.checkpoints.tensor_formats import Described, require_plain
from publisher.errors import FetchError, HubError
from publisher.hub import client as hub
from publisher.records.checkpoint import Checkpoint, FileDigest, Snapshot

_WEIGHTS = ".safetensors"
_known: dict[str, Header] = {}  # by the file's digest: a file that both repositories have is asked for once


def streamed_headers(snapshot: Snapshot) -> dict[str, TensorHeader]:
    """Return the header of every tensor of a streamed snapshot, sorted by name.

    Raises:
        FetchError: a damaged file, no tensors, or one that the index names and no shard holds.
        HubError: a file cannot be read.
    """
    files = [file for file in snapshot.checkpoint.files if file.name.endswith(_WEIGHTS)]
    shards = {file.name: _file_headers(snapshot, file) for file in files}
    if any(file.name == INDEX for file in snapshot.checkpoint.files):
        require_held(snapshot.folder / INDEX, shards)
    headers = {name: header for shard in shards.values() for name, header in shard.items()}
    if not headers:
        raise FetchError(
            f"{snapshot.checkpoint.short} holds no tensor", expected="the model's weights", next_step="correct the pin"
        )
    _require_plain(headers, snapshot.checkpoint, config=read_config(snapshot.folder))
    return dict(sorted(headers.items()))


def remote_entries(
    checkpoint: Checkpoint, shards: Iterable[str], *, sizes: Mapping[str, int], config: Mapping[str, Any]
) -> dict[str, Entry]:
    """Return what the headers of a repository say of its tensors, which must be plain.

    Args:
        checkpoint: of the Hub.
        shards: its files of weights.
        sizes: bytes of each file of the repository.
        config: its config.json.

    Returns:
        Dtype, shape and place of each tensor in its file, by name.

    Raises:
        FetchError: a file is missing, cut short or no safetensors file, or the weights are of a format that is not
            read.
        HubError: a file cannot be read.
    """
    entries: dict[str, Entry] = {}
    for shard in shards:
        if shard not in sizes:
            raise FetchError(
                f"{INDEX} of {checkpoint.short} names the shard {shard}, which is missing",
                expected="every shard beside its index",
                next_step="name a commit whose weights are whole",
            )
        entries |= read_remote_header(checkpoint, shard, size=sizes[shard]).entries
    _require_plain(entries, checkpoint, config=config)
    return entries


def _require_plain(tensors: Mapping[str, Described], checkpoint: Checkpoint, *, config: Mapping[str, Any]) -> None:
    beside = text_on_hub(checkpoint.name, checkpoint.revision)
    require_plain(tensors, config, where=checkpoint.short, beside=beside)


def text_on_hub(repo: str, revision: str) -> Beside:
    """Return a function that gives the text of a file of this repository, or None where there is none to be read."""

    def text(name: str) -> str | None:
        try:
            return read_text(hub.download(repo, revision, filename=name))
        except (HubError, OSError):
            return None

    return text


def _file_headers(snapshot: Snapshot, file: FileDigest) -> dict[str, TensorHeader]:
    if file.sha256 not in _known:
        _known[file.sha256] = read_remote_header(snapshot.checkpoint, file.name, size=file.size)
    place = snapshot.folder / file.name
    return {
        name: TensorHeader(entry.dtype, entry.shape, place, file.sha256, entry.start, entry.stop)
        for name, entry in _known[file.sha256].entries.items()
    }


def read_remote_header(checkpoint: Checkpoint, filename: str, *, size: int) -> Header:
    """Return what the header of a remote safetensors file says; it is read by two requests.

    Args:
        checkpoint: of the Hub.
        filename: one of its files of weights.
        size: bytes of that file.

    Returns:
        The file's header.

    Raises:
        FetchError: the file is cut short or no safetensors file.
        HubError: it cannot be read.
    """

    def taken(start: int, stop: int) -> bytes:
        stop = min(stop, size)
        return bytes(RemoteRange(checkpoint, filename, start=start, stop=stop).take(max(stop - start, 0)))

    try:
        length = header_length(taken(0, LENGTH_BYTES), file_size=size)
        return parse_header(taken(LENGTH_BYTES, LENGTH_BYTES + length), file_size=size)
    except ValueError as error:
        raise FetchError(
            f"{filename} of {checkpoint.short} ({size:,} bytes) is not a whole safetensors file: {error}",
            expected="a file as long as its header says",
            next_step="name a commit whose weights are whole",
        ) from None


class RemoteRange:
    """Part of a remote file, from front to back; asked for when something is taken from it."""

    def __init__(self, checkpoint: Checkpoint, filename: str, *, start: int, stop: int) -> None:
        """Prepare to take the bytes from `start` up to `stop`.

        Args:
            checkpoint: of the Hub.
            filename: one of its files.
            start: first byte of the part.
            stop: the byte after its last.
        """
        self._pieces = hub.stream(checkpoint.name, checkpoint.revision, filename=filename, start=start, stop=stop)
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytearray:
        """Return the next bytes, in a buffer of their own."""
        block, filled = bytearray(size), 0
        while filled < size:
            self._rest = self._rest or memoryview(next(self._pieces))
            part = self._rest[: size - filled]
            block[filled : filled + len(part)] = part
            filled += len(part)
            self._rest = self._rest[len(part) :]
        return block
