"""The form of a pack: every byte of its index counts, and its name is its first key."""

from __future__ import annotations

import struct

import pytest
import xxhash

from tiers.errors import RecordError
from tiers.host.slots import ALIGNMENT
from tiers.remote.packs.pack import (
    INDEX_BYTES,
    MAX_PACK_BLOCKS,
    PACK_BYTES,
    blocks_of_pack,
    key_of,
    name_of,
    pack_index,
    parse_index,
)
from tiers.testing import make_key
from tiers.wrappers.encryption import encrypted_bytes


def test_an_index_says_which_blocks_a_pack_has() -> None:
    keys = [make_key() for _ in range(MAX_PACK_BLOCKS)]
    index = parse_index(pack_index(keys, 4096))
    assert len(index) == MAX_PACK_BLOCKS and index.payload_bytes == 4096
    assert index.matches(keys) == MAX_PACK_BLOCKS
    assert index.matches([*keys[:5], make_key(), *keys[6:]]) == 5
    assert index.matches([make_key(), *keys], at=1) == MAX_PACK_BLOCKS
    assert index.matches(keys[:3]) == 3
    assert index.matches(keys[1:]) == 0


@pytest.mark.fault
def test_an_index_with_any_other_byte_is_none() -> None:
    whole = pack_index([make_key() for _ in range(3)], 4096)
    for at in range(INDEX_BYTES):
        data = bytearray(whole)
        data[at] ^= 1
        with pytest.raises(RecordError):
            parse_index(data)
    for end in (0, 100, INDEX_BYTES - 1):
        with pytest.raises(RecordError):
            parse_index(whole[:end])


def test_an_index_that_is_whole_and_none_of_ours_is_none() -> None:
    """Whoever wrote it: it may not say where more blocks lie than a pack has."""

    def written(place: slice, some: bytes) -> bytes:
        body = bytearray(pack_index([make_key() for _ in range(3)], 4096)[:-8])
        body[place] = some
        return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))

    count = slice(10, 12)
    assert len(parse_index(written(count, b"\2\0"))) == 2
    assert len(parse_index(written(count, MAX_PACK_BLOCKS.to_bytes(2, "little")))) == 64
    for data in (
        written(slice(0, 1), b"K"),
        written(count, b"\0\0"),
        written(count, (MAX_PACK_BLOCKS + 1).to_bytes(2, "little")),
    ):
        with pytest.raises(RecordError, match="not a pack"):
            parse_index(data)


def test_a_name_leads_back_to_its_key_and_others_to_none() -> None:
    for length in (17, 18, 48, 128):
        key = make_key(length)
        assert key_of(name_of(key)) == key
    name = name_of(make_key())
    for other in ("", "a", "notes/x", name.upper(), name[:-1], f"{name}.part", f"x{name}"):
        assert key_of(other) is None


def test_a_pack_has_as_many_blocks_as_come_close_to_its_length() -> None:
    assert blocks_of_pack(1) == MAX_PACK_BLOCKS
    assert blocks_of_pack(64 << 10) == 64
    assert blocks_of_pack(2 << 20) == 4
    assert blocks_of_pack((2 << 20) + ALIGNMENT + 1) == 2
    assert blocks_of_pack(PACK_BYTES * 4) == 1
    for size in (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, PACK_BYTES):
        assert blocks_of_pack(encrypted_bytes(size)) == blocks_of_pack(size), "twice the requests"
