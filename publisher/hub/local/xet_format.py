"""The two binary formats of Xet storage, as far as a server must read them.

A xorb is a run of compressed chunks. A shard says of which chunks of which xorbs a file consists. Both are described
in Hugging Face's Xet protocol specification; what is read here was checked against hf_xet 1.8. Anything
that does not parse is refused with a ValueError.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import lz4.frame

_CHUNK_HEADER = 8  # version u8, compressed length u24, scheme u8, length u24
_XORB_FOOTER = b"XETBLOB"
_SHARD_HEADER = 48
_RECORD = struct.Struct("<32sIIQ")  # a file: hash, flags, count of segments, unused
_SEGMENT = struct.Struct("<32sIIII")  # a segment: xorb hash, flags, length, first chunk, chunk after the last
_HAS_VERIFICATION = 1 << 31
_HAS_METADATA = 1 << 30
_END = b"\xff" * 32


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of chunks `first` to `end` (excluded) of a xorb; `length` bytes of the file."""

    xorb: str
    length: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class XetFile:
    """A file of a shard: its Xet hash, its segments in order, and its SHA-256 if the shard tells it."""

    hash: str
    segments: tuple[Segment, ...]
    sha256: str | None


def files_in_shard(shard: bytes) -> tuple[XetFile, ...]:
    """Return the files that a shard describes."""
    try:
        return tuple(_files(shard))
    except struct.error as error:
        raise ValueError(f"the shard ends too early: {error}") from error


def chunk_offsets(xorb: bytes) -> tuple[int, ...]:
    """Return where each chunk of a xorb begins and, last, where the last one ends."""
    offsets = [0]
    while len(xorb) - offsets[-1] >= _CHUNK_HEADER and not xorb.startswith(_XORB_FOOTER, offsets[-1]):
        start = offsets[-1]
        offsets.append(start + _CHUNK_HEADER + int.from_bytes(xorb[start + 1 : start + 4], "little"))
    if offsets[-1] > len(xorb):
        raise ValueError("the last chunk of the xorb is cut short")
    return tuple(offsets)


def chunk_content(chunk: bytes) -> bytes:
    """Return the bytes that one chunk, header included, holds."""
    scheme, length = chunk[4], int.from_bytes(chunk[5:8], "little")
    payload = chunk[_CHUNK_HEADER:]
    if scheme not in {0, 1, 2}:
        raise ValueError(f"compression scheme {scheme} is not known")
    content = payload if scheme == 0 else _unpacked(payload, length)
    if scheme == 2:  # noqa: PLR2004 - the number that the format gives to "bytes in four groups, then LZ4"
        content = regrouped(content)
    if len(content) != length:
        raise ValueError("a chunk does not have the length that its header says")
    return content


def _unpacked(payload: bytes, length: int) -> bytes:
    """Decode an LZ4 frame, to no more than one byte more than it should have."""
    return bytes(lz4.frame.LZ4FrameDecompressor().decompress(payload, max_length=length + 1))


def regrouped(content: bytes) -> bytes:
    """Return bytes in their own order, out of groups by four: bytes 0, 4, 8 ... came first, then 1, 5, 9 ..."""
    result = bytearray(len(content))
    taken = 0
    for group in range(4):
        count = len(result[group::4])
        result[group::4] = content[taken : taken + count]
        taken += count
    return bytes(result)


def _files(shard: bytes) -> Iterator[XetFile]:
    at = _SHARD_HEADER
    while True:
        file_hash, flags, count, _ = _RECORD.unpack_from(shard, at)
        at += _RECORD.size
        if file_hash == _END:
            return
        segments = tuple(_segment(shard, at + i * _SEGMENT.size) for i in range(count))
        at += count * _SEGMENT.size
        if flags & _HAS_VERIFICATION:
            at += count * _RECORD.size
        sha256 = None
        if flags & _HAS_METADATA:
            sha256 = _hex(_RECORD.unpack_from(shard, at)[0])
            at += _RECORD.size
        yield XetFile(_hex(file_hash), segments, sha256)


def _segment(shard: bytes, at: int) -> Segment:
    xorb, _, length, first, end = _SEGMENT.unpack_from(shard, at)
    return Segment(_hex(xorb), length, first, end)


def _hex(raw: bytes) -> str:
    """Return a hash as hex digits; Xet writes it as four little-endian 64-bit words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))
