"""The header of a safetensors file: one reader, for files on disk and for ranges of remote ones, and one writer.

Format: 8 bytes little-endian length, then a JSON object of that length: `{name: {dtype, shape, data_offsets}}` and
optionally `__metadata__`; then the bytes of the tensors, without a gap
(https://huggingface.co/docs/safetensors/index#format). A header that does not describe its file exactly is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

from publisher.border.json_text import parse_json_object
from publisher.border.limits import LIMITS
from publisher.border.names import shortened, tensor_name

LENGTH_BYTES: Final = 8
METADATA: Final = "__metadata__"
_ALIGNMENT: Final = 8  # bytes; of the first tensor


class Dtype(NamedTuple):
    """A dtype of safetensors: its name in torch, and the bytes that an element takes."""

    torch: str
    size: int


DTYPES: Final = {
    "BOOL": Dtype("bool", 1),
    "U8": Dtype("uint8", 1),
    "I8": Dtype("int8", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E8M0": Dtype("float8_e8m0fnu", 1),
    "I16": Dtype("int16", 2),
    "U16": Dtype("uint16", 2),
    "F16": Dtype("float16", 2),
    "BF16": Dtype("bfloat16", 2),
    "I32": Dtype("int32", 4),
    "U32": Dtype("uint32", 4),
    "F32": Dtype("float32", 4),
    "C64": Dtype("complex64", 8),
    "F64": Dtype("float64", 8),
    "I64": Dtype("int64", 8),
    "U64": Dtype("uint64", 8),
}  # by safetensors' names, in the order in which its own writer sorts, from the last to the first
UNREAD_BITS: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
"""Bits of an element in further dtypes, whose tensors are known by their header and never read."""
LORA_DTYPES: Final = frozenset({"BF16", "F16", "F32"})  # of weights and factors that this tool computes with
PEFT_DTYPES: Final = LORA_DTYPES | {"F64"}  # of factors that PEFT computes with


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: dtype in safetensors' spelling, shape, and its bytes as offsets from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a file says.

    Attributes:
        entries: each tensor by name, in the order of the header.
        metadata: texts by name; None where the header has none.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] | None


def header_length(first: bytes, *, file_size: int) -> int:
    """Return the length of the JSON header in bytes.

    Args:
        first: the first eight bytes of the file.
        file_size: bytes of the whole file.

    Returns:
        The length that they state.

    Raises:
        ValueError: the file is too short for it, or the length passes the limit.
    """
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or length > file_size - LENGTH_BYTES:
        raise ValueError("it is shorter than its header says")
    if length > LIMITS.header_bytes:
        raise ValueError(f"its header has {length:,} bytes; at most {LIMITS.header_bytes:,} are read")
    return length


def parse_header(text: bytes, *, file_size: int) -> Header:
    """Return what a header says of each tensor.

    Args:
        text: the JSON header, without its length.
        file_size: bytes of the whole file.

    Returns:
        The header; the bytes of its entries fill the file after it without gap or overlap.

    Raises:
        ValueError: it does not describe such a file; the message names the tensor.
    """
    found, metadata = _parse_object(text)
    if len(found) > LIMITS.tensors:
        raise ValueError(f"it names {len(found):,} tensors; at most {LIMITS.tensors:,} are read")
    data = LENGTH_BYTES + len(text)
    entries = {tensor_name(name): _entry(name, value, data=data) for name, value in found.items()}
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"the bytes of {shortened(name)} do not begin where those before it end")
        end = entry.stop
    if end != file_size:
        raise ValueError(f"its tensors end at byte {end:,} of {file_size:,}")
    return Header(entries, metadata)


def _parse_object(text: bytes) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the header's JSON object without its metadata, and these."""
    try:
        found = parse_json_object(text, limit=LIMITS.header_bytes)
    except ValueError as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    if METADATA not in found:
        return found, None
    metadata = found.pop(METADATA)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} of its header is no mapping of names to texts")
    return found, metadata


def _entry(name: str, value: object, *, data: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop], **others} if not others:
            pass
        case _:
            raise ValueError(f"{shortened(name)} has no dtype, shape and two data_offsets, and nothing else")
    if dtype not in DTYPES and dtype not in UNREAD_BITS:
        raise ValueError(f"{shortened(name)} has the dtype {shortened(dtype)}, which is not known here")
    if len(shape) > LIMITS.dimensions or not all(map(_is_count, (*shape, start, stop))):
        raise ValueError(f"{shortened(name)} has a shape or offsets that are no whole numbers, or too many of them")
    bits = 8 * DTYPES[dtype].size if dtype in DTYPES else UNREAD_BITS[dtype]
    if 8 * (stop - start) != prod(shape) * bits:
        raise ValueError(f"{shortened(name)} has {stop - start:,} bytes, not those of its shape in {dtype}")
    return Entry(dtype, tuple(shape), data + start, data + stop)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, metadata: Mapping[str, str] | None) -> bytes:
    """Return the beginning of a file, up to its first tensor.

    Args:
        tensors: dtype in safetensors' spelling and shape of each tensor, by name, in the order of their bytes.
        metadata: texts by name; None for a header without metadata.

    Returns:
        The bytes that safetensors' own writer puts there.
    """
    found: dict[str, object] = {} if metadata is None else {METADATA: metadata}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + prod(shape) * DTYPES[dtype].size
        found[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    return frame_header(json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode())


def frame_header(text: bytes) -> bytes:
    """Return a header's text with its length in front, and spaces after it so that tensors begin at a whole word."""
    padded = text + b" " * (-len(text) % _ALIGNMENT)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded
