"""The header of a safetensors file as it comes in: one reader for files on disk and for ranges of remote ones.

Format: 8 bytes little-endian length, then a JSON object of that length: `{name: {dtype, shape, data_offsets}}` and
optionally `__metadata__`; then the bytes of the tensors, without a gap
(https://huggingface.co/docs/safetensors/index#format). Whatever does not describe the file exactly is refused.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Final

from publisher.border.json_text import parse_json_object
from publisher.border.limits import LIMITS
from publisher.border.names import shortened, tensor_name

LENGTH_BYTES: Final = 8
METADATA: Final = "__metadata__"
DTYPES: Final = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}  # safetensors' names: torch's, and bytes per element


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: dtype in safetensors' spelling, shape, and its bytes as offsets from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


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


def parse_header(text: bytes, *, file_size: int) -> dict[str, Entry]:
    """Return what a header says of each tensor, by name, in the order of the header.

    Args:
        text: the JSON header, without its length.
        file_size: bytes of the whole file.

    Returns:
        The entries; their bytes fill the file after the header without gap or overlap.

    Raises:
        ValueError: it does not describe such a file; the message names the tensor.
    """
    found = parse_header_object(text)
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
    return entries


def parse_header_object(text: bytes) -> dict[str, Any]:
    """Return the header's JSON object without its metadata.

    Raises:
        ValueError: it is no JSON object, or its metadata are no texts by name.
    """
    try:
        found = parse_json_object(text, limit=LIMITS.header_bytes)
    except ValueError as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    metadata = found.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} of its header is no mapping of names to texts")
    return found


def _entry(name: str, value: object, *, data: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop], **others} if not others:
            pass
        case _:
            raise ValueError(f"{shortened(name)} has no dtype, shape and two data_offsets, and nothing else")
    if dtype not in DTYPES:
        raise ValueError(f"{shortened(name)} has the dtype {shortened(dtype)}, which is not known here")
    if len(shape) > LIMITS.dimensions or not all(map(_is_count, (*shape, start, stop))):
        raise ValueError(f"{shortened(name)} has a shape or offsets that are no whole numbers, or too many of them")
    if stop - start != prod(shape) * DTYPES[dtype][1]:
        raise ValueError(f"{shortened(name)} has {stop - start:,} bytes, not those of its shape in {dtype}")
    return Entry(dtype, tuple(shape), data + start, data + stop)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
