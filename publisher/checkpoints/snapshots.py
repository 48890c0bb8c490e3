"""The weights of a snapshot, wherever they are: in its folder, or on the Hub.

The stages ask here for headers and readers and need not know which it is. A local checkpoint that is not on this
machine is refused.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from publisher.checkpoints.converting_reader import ConvertingReader, parts_of
from publisher.checkpoints.files import read_config
from publisher.checkpoints.fp8_reader import DequantisingReader, dequantised_headers, stored_headers
from publisher.checkpoints.headers import TensorHeader, read_headers
from publisher.checkpoints.mxfp4_reader import UnpackingReader, packed_headers, unpacked_headers
from publisher.checkpoints.nf4_reader import QuantisedReader, unquantised_headers
from publisher.checkpoints.reading import Reader, TensorReader
from publisher.checkpoints.remote_headers import streamed_headers
from publisher.checkpoints.streaming import StreamReader
from publisher.errors import FetchError
from publisher.records.checkpoint import Snapshot


def headers_of(snapshot: Snapshot) -> dict[str, TensorHeader]:
    """Return the header of every tensor, with the digest of its file, sorted by name.

    FP8 weights with scales, and experts in MXFP4, have the headers of the bfloat16 weights that they are read as.

    Raises:
        FetchError: missing or damaged files, no tensors, one that the index names and no shard holds, or scales of FP8
            weights that do not fit.
        HubError: a streamed file cannot be read.
    """
    headers = streamed_headers(snapshot) if snapshot.streamed else _local_headers(snapshot)
    headers = unpacked_headers(headers)
    return dequantised_headers(headers, lambda: read_config(snapshot.folder), where=snapshot.checkpoint.short)


def _local_headers(snapshot: Snapshot) -> dict[str, TensorHeader]:
    digests = {file.name: file.sha256 for file in snapshot.checkpoint.files}
    headers = read_headers(snapshot.folder)
    return {name: replace(header, sha256=digests.get(header.file.name)) for name, header in headers.items()}


@contextmanager
def reader_of(snapshot: Snapshot, headers: Mapping[str, TensorHeader]) -> Iterator[Reader]:
    """Open a reader of the snapshot's tensors for as long as the block runs.

    A machine without the snapshot's folder reads a checkpoint of the Hub from there.

    Args:
        snapshot: the checkpoint.
        headers: as from `headers_of`, of all its tensors or of some, made on this or another machine.

    Yields:
        The reader.

    Raises:
        FetchError: a local checkpoint is not on this machine.
    """
    remote = _is_remote(snapshot)
    unquantised = unquantised_headers(headers)
    dequantised = parts_of(unquantised)
    unpacked = stored_headers(dequantised)
    files = {
        name: replace(header, file=snapshot.folder / header.file.name)
        for name, header in packed_headers(unpacked).items()
    }
    with nullcontext(StreamReader(snapshot, files)) if remote else TensorReader(files) as plain:
        reader: Reader = UnpackingReader(plain, unpacked) if len(files) > len(unpacked) else plain
        reader = DequantisingReader(reader, dequantised) if len(unpacked) > len(dequantised) else reader
        reader = ConvertingReader(reader, unquantised) if dequantised.keys() != headers.keys() else reader
        yield QuantisedReader(reader, headers) if any(header.quantised for header in headers.values()) else reader


def _is_remote(snapshot: Snapshot) -> bool:
    if snapshot.streamed or snapshot.folder.is_dir():
        return snapshot.streamed
    if snapshot.checkpoint.kind == "hub":
        return True
    raise not_here(snapshot)


def not_here(snapshot: Snapshot) -> FetchError:
    """Return the error that a local checkpoint is not on this machine, which is one of several."""
    return FetchError(
        f"there is no {snapshot.folder} on {socket.gethostname()}",
        expected="a local checkpoint at the same path on every machine of the cluster",
        next_step="mount it there, or name a checkpoint of the Hub in the manifest",
    )


def absolute(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with an absolute path, for a process that works in another folder."""
    return snapshot.model_copy(update={"folder": snapshot.folder.absolute()})
