"""The rows of the index: what they hold, and the index key that stands for a block's key."""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Any, NamedTuple

import lmdb
import xxhash

from tiers.disk.slab import slot_bytes

ADDED = 1
"""The bit of a fingerprint in the log that says that its block came; without it, it went."""

MARKED = 2
"""The bit that every fingerprint has, so that none is zero."""

_MAX_OFFSET = 1 << 62
_NAMESPACE_PART = 8
INDEX_KEY_BYTES = _NAMESPACE_PART + 16
DIGEST_WORD = slice(_NAMESPACE_PART, _NAMESPACE_PART + 8)
"""The bytes of an index key that its fingerprint is made of."""

ENTRY = struct.Struct("<QQ16sQ")
SLOT = struct.Struct(">QQ")  # big-endian, as in SIZE and STAMP: LMDB sorts keys by bytes
SIZE = struct.Struct(">Q")
STAMP = struct.Struct(">Q")
ROW = struct.Struct(">Q")
STATE = struct.Struct("<QQQ")


class Slot(NamedTuple):
    """A slot: `size` in bytes, which names the slab file, and its number in that file."""

    size: int
    number: int


class Entry(NamedTuple):
    """A live block. `checksum`: of its record; a slot with another record does not hold the block.
    `stamp`: grows with each use."""

    slot: Slot
    payload_bytes: int
    checksum: bytes
    stamp: int


def index_key(key: bytes) -> bytes:
    """Return the 24 bytes that stand for a key: the start of its namespace, and a digest of it all.
    Two keys with one index key hide each other, no more: a record names its whole key."""
    return key[:_NAMESPACE_PART] + xxhash.xxh3_128_digest(key)


def index_key_prefix(namespace: bytes) -> bytes:
    """Return what all index keys of a namespace begin with."""
    return namespace[:_NAMESPACE_PART]


def fingerprint(key: bytes) -> int:
    """Return 62 bits of an index key's digest, as a signed word: a block in `FingerprintIndex`."""
    return digest_fingerprint(key[DIGEST_WORD])


def digest_fingerprint(digest: bytes) -> int:
    """Return the fingerprint of an index key by its digest, of 16 bytes."""
    return int.from_bytes(digest[:8], sys.byteorder, signed=True) & ~ADDED | MARKED


def fields(row: struct.Struct, data: bytes) -> tuple[Any, ...]:
    """Unpack a row. Raises lmdb.CorruptedError, as the parsers do: LMDB has no checksums, so a
    flipped bit in its file can reach us as an impossible row."""
    if len(data) != row.size:
        raise lmdb.CorruptedError(f"a row of {len(data)} bytes, {row.size} expected")
    return row.unpack(data)


def parse_slot(size: int, number: int) -> Slot:
    """Check that a file can have this slot."""
    if not 0 < size * (number + 1) <= _MAX_OFFSET:
        raise lmdb.CorruptedError(f"no file has slot {number} of {size} bytes")
    return Slot(size, number)


def parse_changes(data: bytes) -> array[int]:
    """Parse a row of the log: fingerprints in the order of their changes, `ADDED` or not."""
    if len(data) % 8:
        raise lmdb.CorruptedError(f"a row of {len(data)} bytes in the log of changes")
    changes = array("q")
    changes.frombytes(data)
    return changes


def parse_entry(data: bytes) -> Entry:
    """Parse a live block's row; the slot's size follows from the payload's."""
    number, payload_bytes, checksum, stamp = fields(ENTRY, data)
    slot = parse_slot(slot_bytes(payload_bytes), number)
    return Entry(slot, payload_bytes, checksum, stamp)
