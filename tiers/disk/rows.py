"""The rows of the index: what they hold, and what stands for a block's key in them."""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Any, NamedTuple

import lmdb
import xxhash

from tiers.disk.slab import slot_bytes

ADDED = 1
"""The bit of a change's fingerprint that says that its block is live now, not gone."""

MARKED = 2
"""The bit that every fingerprint has, so that none is zero."""

_MAX_OFFSET = 1 << 62
_LABEL_SPACE = 8
WORD = slice(_LABEL_SPACE, _LABEL_SPACE + 8)
"""Of a label: what its fingerprint is made of."""

ENTRY = struct.Struct("<QQ16sQ")
SLOT = struct.Struct(">QQ")  # big-endian, as in SIZE and STAMP: LMDB sorts keys by bytes
SIZE = struct.Struct(">Q")
STAMP = struct.Struct(">Q")
ROW = struct.Struct(">Q")
STATE = struct.Struct("<QQQ")


class Slot(NamedTuple):
    """A slot: `size` in bytes, which names the slab file, and its number in there."""

    size: int
    number: int


class Entry(NamedTuple):
    """A live block. `checksum` is its record's: a slot with any other record is not this block.
    `stamp` grows with use."""

    slot: Slot
    payload_bytes: int
    checksum: bytes
    stamp: int


def label(key: bytes) -> bytes:
    """The 24 bytes that stand for a key: the start of its namespace, and a digest of it all.

    Two keys of one label would hide each other, no more: a record names its whole key.
    """
    return key[:_LABEL_SPACE] + xxhash.xxh3_128_digest(key)


def label_start(namespace: bytes) -> bytes:
    """What the labels of a namespace begin with."""
    return namespace[:_LABEL_SPACE]


def fingerprint(label: bytes) -> int:
    """62 bits of a label's digest, in a signed word, that `presence` knows the block by."""
    return int.from_bytes(label[WORD], sys.byteorder, signed=True) & ~ADDED | MARKED


def fields(row: struct.Struct, data: bytes) -> tuple[Any, ...]:
    """Unpack a row. This and the parsers raise lmdb.CorruptedError: LMDB has no checksums, so a
    flipped bit in its file can reach us as a row that can't be."""
    if len(data) != row.size:
        raise lmdb.CorruptedError(f"a row of {len(data)} bytes, {row.size} expected")
    return row.unpack(data)


def parse_slot(size: int, number: int) -> Slot:
    """A slot that a file can have."""
    if not 0 < size * (number + 1) <= _MAX_OFFSET:
        raise lmdb.CorruptedError(f"no file has slot {number} of {size} bytes")
    return Slot(size, number)


def parse_changes(data: bytes) -> array[int]:
    """A row of the log: fingerprints in the order of their changes, `ADDED` or not."""
    if len(data) % 8:
        raise lmdb.CorruptedError(f"a row of {len(data)} bytes in the log of changes")
    changes = array("q")
    changes.frombytes(data)
    return changes


def parse_entry(data: bytes) -> Entry:
    """A live block, whose slot has the size for its payload."""
    number, payload_bytes, checksum, stamp = fields(ENTRY, data)
    slot = parse_slot(slot_bytes(payload_bytes), number)
    return Entry(slot, payload_bytes, checksum, stamp)
