"""The binary formats of Xet, apart from any server."""

import struct
from itertools import pairwise

import lz4.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.hub.local.xet_format import Segment, chunk_content, chunk_offsets, files_in_shard, regrouped


def chunk(scheme: int, payload: bytes, length: int) -> bytes:
    sizes = len(payload).to_bytes(3, "little") + bytes([scheme]) + length.to_bytes(3, "little")
    return b"\0" + sizes + payload


@given(st.binary(max_size=200))
def test_grouping_by_four_is_undone(content: bytes) -> None:
    grouped = b"".join(content[group::4] for group in range(4))
    assert regrouped(grouped) == content


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), st.sampled_from([0, 1, 2]))
def test_every_chunk_of_a_xorb_is_found_and_unpacked(contents: list[bytes], scheme: int) -> None:
    def packed(content: bytes) -> bytes:
        grouped = b"".join(content[group::4] for group in range(4)) if scheme == 2 else content
        return chunk(scheme, lz4.frame.compress(grouped) if scheme else grouped, len(content))

    xorb = b"".join(map(packed, contents)) + b"XETBLOB and a footer"
    offsets = chunk_offsets(xorb)
    chunks = [xorb[start:end] for start, end in pairwise(offsets)]
    assert [chunk_content(piece) for piece in chunks] == contents


def test_a_xorb_that_is_cut_short_is_refused() -> None:
    with pytest.raises(ValueError, match="cut short"):
        chunk_offsets(chunk(0, b"content", 7)[:-1])


@pytest.mark.parametrize(("scheme", "length", "complaint"), [(9, 1, "scheme 9"), (0, 2, "length")])
def test_a_chunk_that_does_not_hold_what_it_says_is_refused(scheme: int, length: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        chunk_content(chunk(scheme, b"x", length))


def test_a_shard_tells_the_segments_and_the_digest_of_its_files() -> None:
    words = struct.pack("<4Q", 1, 2, 3, 4)
    segment = struct.pack("<32sIIII", words, 0, 100, 2, 5)
    file = struct.pack("<32sIIQ", words, 1 << 30, 1, 0) + segment + words + bytes(16)
    shard = bytes(48) + file + b"\xff" * 32 + bytes(16)
    name = "".join(f"{word:016x}" for word in (1, 2, 3, 4))
    (found,) = files_in_shard(shard)
    assert (found.hash, found.sha256, found.segments) == (name, name, (Segment(name, 100, 2, 5),))


def test_a_shard_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="ends too early"):
        files_in_shard(bytes(60))
