"""The changes of the index: every slot of a slab file is in one of three states, and only `Edit`
moves it between them.

    free ──claim──> reserved ──publish──> live
      ^                │  ^                 │
      └────vacate──────┘  └─────retire──────┘

A reserved slot belongs to one owner, who alone writes its bytes. `used` counts live and reserved
slots. A state changes in one transaction with everything that depends on it, so a
process killed at any instant leaves each slot in exactly one state.

A log of the last edits has the blocks that were added and removed; `fingerprint_index` follows it.
"""

from __future__ import annotations

import struct
import sys
import time
from array import array
from collections.abc import Collection, Container, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import lmdb
import xxhash

from tiers.disk.slab import slot_bytes

ADDED = 1
"""The bit of a fingerprint in the log whose block was added; without it, it was removed."""

MARKED = 2
"""The bit that every fingerprint has, so that none is zero."""

_MAX_OFFSET = 1 << 62
NAMESPACE_PART = 8
INDEX_KEY_BYTES = NAMESPACE_PART + 16

ENTRY = struct.Struct("<QQ16sQ")
SLOT = struct.Struct(">QQ")  # big-endian, as in SIZE and STAMP: LMDB sorts keys by bytes
SIZE = struct.Struct(">Q")
STAMP = struct.Struct(">Q")
ROW = struct.Struct(">Q")
STATE = struct.Struct("<QQQ")
MOMENT = struct.Struct("<QQ")
MOMENT_EVERY = 600
"""Seconds between two notes of the time, by which tools know how old a stamp is."""
_MOMENTS = 512


class Slot(NamedTuple):
    """A slot: `size` in bytes, which names the slab file, and its number in that file."""

    size: int
    number: int


class Entry(NamedTuple):
    """A live block. `checksum`: of its record; a slot with another record does not hold the block.
    `stamp`: grows with each use; 0: it is not published yet."""

    slot: Slot
    payload_bytes: int
    checksum: bytes
    stamp: int = 0


def index_key(key: bytes) -> bytes:
    """Return the 24 bytes that stand for a key: the start of its namespace, and a digest of it all.
    Two keys with one index key hide each other, no more: a record names its whole key."""
    return key[:NAMESPACE_PART] + xxhash.xxh3_128_digest(key)


def key_digest(index_key: bytes) -> bytes:
    """Return the digest of the whole key that an index key stands for."""
    return index_key[NAMESPACE_PART:]


def index_key_prefix(namespace: bytes) -> bytes:
    return namespace[:NAMESPACE_PART]


def fingerprint(key: bytes) -> int:
    """Return 62 bits of an index key's digest, as a signed word: a block in `FingerprintIndex`."""
    return digest_fingerprint(key_digest(key))


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


def parse_times(data: bytes) -> list[tuple[int, int]]:
    """Parse the notes of the time: seconds since the epoch, and the last stamp before. Stamps that
    follow are of the next `MOMENT_EVERY` seconds."""
    if len(data) % MOMENT.size:
        raise lmdb.CorruptedError(f"a row of {len(data)} bytes for the times")
    return list(MOMENT.iter_unpack(data))


FIRST = Slot(0, 0)
"""A slot that sorts before all others."""

MAX_SKIPPED = 1024
"""Blocks that one edit skips to evict others, in half a millisecond."""

_LOG_BYTES = 1 << 20


class Edit:
    """The changes of one write transaction; nobody else changes the index meanwhile."""

    def __init__(self, txn: Any, tables: Mapping[str, Any], owner: bytes) -> None:
        self._txn = txn
        self._tables = tables
        self._owner = owner
        self._changes = array("q")
        self.evicted = 0
        """Live blocks that this edit has retired for room."""
        self.freed: list[Slot] = []
        """Slots that were freed: their disk space is given back behind the commit, see `vacate`."""
        self._after, self._skipped = STAMP.pack(0), 0
        self._state = self._get("meta", b"state") or STATE.pack(0, 0, 0)
        self.capacity, self.used, self.clock = fields(STATE, self._state)
        self._first = self.clock

    def set_capacity(self, capacity: int) -> None:
        """Set it for every process on the folder, by name of this one: see `setter`."""
        self.capacity = capacity
        self._put("meta", b"setter", self._owner)

    @property
    def setter(self) -> bytes | None:
        """The owner that set the capacity; None: an earlier version set it, which notes none."""
        return self._get("meta", b"setter")

    def save_state(self) -> None:
        """Write the counters and the log, which are kept in memory; call it before the commit."""
        if self.used < 0:
            raise lmdb.CorruptedError("more bytes were freed than were in use")
        state = STATE.pack(self.capacity, self.used, self.clock)
        if state != self._state:
            self._put("meta", b"state", state)
            self._note_time()
        if self._changes:
            self._log(self._changes)

    def _note_time(self) -> None:
        noted, now = self._get("meta", b"times") or b"", int(time.time())
        if noted and abs(now - fields(MOMENT, noted[-MOMENT.size :])[0]) < MOMENT_EVERY:
            return
        if len(noted) >= _MOMENTS * MOMENT.size:  # every second one, of the older half
            times = parse_times(noted)
            half = _MOMENTS // 2
            noted = b"".join(MOMENT.pack(*item) for item in (*times[:half:2], *times[half:]))
        self._put("meta", b"times", noted + MOMENT.pack(now, self._first))

    def _log(self, changes: array[int]) -> None:
        log = self._txn.cursor(self._tables["changes"])
        row = fields(ROW, log.key())[0] + 1 if log.last() else 1
        log.put(ROW.pack(row), changes.tobytes(), append=True)
        while self._is_long(self._txn.stat(self._tables["changes"])) and log.first():
            log.delete()

    def _is_long(self, log: Mapping[str, int]) -> bool:
        # The last row stays, since it numbers the next.
        pages = log["leaf_pages"] + log["overflow_pages"]  # of 4 to 32 KiB, by the machine's
        return log["entries"] > 1 and pages * log["psize"] > _LOG_BYTES

    def entry(self, key: bytes) -> Entry | None:
        data = self._get("blocks", key)
        return None if data is None else parse_entry(data)

    def renew(self, key: bytes) -> bool:
        """Make a live block the most recently used; return whether there is one."""
        entry = self.entry(key)
        if entry is None:
            return False
        self._delete("recency", STAMP.pack(entry.stamp))
        self._enter(key, entry)
        return True

    def oldest(self, besides: Collection[bytes]) -> bytes | None:
        """Return the least recently used key that is not in `besides`, or None."""
        cursor = self._txn.cursor(self._tables["recency"])
        return next((key for key in cursor.iternext(keys=False) if key not in besides), None)

    def next_oldest(self, besides: Sequence[Container[bytes]]) -> tuple[bytes, int] | None:
        """Return the least recently used key that is in none of `besides`, and its stamp. A key
        that this edit has skipped before is not looked at again. None: there is none, or the edit
        would have to skip too many."""
        cursor = self._txn.cursor(self._tables["recency"])
        for stamp, key in cursor if cursor.set_range(self._after) else ():
            self._after = stamp
            if not any(key in keys for keys in besides):
                return key, fields(STAMP, stamp)[0]
            self._skipped += 1
            if self._skipped > MAX_SKIPPED:
                break
        return None

    def claim(self, size: int) -> Slot:
        """Reserve a free slot of `size` bytes, or a new one at the file's end."""
        cursor = self._txn.cursor(self._tables["free"])
        if cursor.set_range(SLOT.pack(size, 0)):
            slot = parse_slot(*fields(SLOT, cursor.key()))
            if slot.size == size:
                cursor.delete()
                return self._reserve(slot)
        length = self.lengths().get(size, 0)
        self._put("lengths", SIZE.pack(size), SIZE.pack(length + 1))
        return self._reserve(Slot(size, length))

    def _reserve(self, slot: Slot) -> Slot:
        self._put("reserved", SLOT.pack(*slot), self._owner)
        self.used += slot.size
        return slot

    def is_last(self, slot: Slot) -> bool:
        """Whether a reserved slot is at its file's end."""
        return slot.number + 1 == self.lengths().get(slot.size)

    def publish(self, key: bytes, entry: Entry) -> None:
        """Make a reserved slot the live block of a key that has none."""
        self._delete("reserved", SLOT.pack(*entry.slot))
        self._enter(key, entry)
        self._changes.append(fingerprint(key) | ADDED)

    def _enter(self, key: bytes, entry: Entry) -> None:
        self.clock += 1
        self._put("recency", STAMP.pack(self.clock), key)
        row = ENTRY.pack(entry.slot.number, entry.payload_bytes, entry.checksum, self.clock)
        self._put("blocks", key, row)

    def retire(self, key: bytes) -> Slot:
        """Remove a live block from the index; its slot is reserved for us now."""
        entry = self.entry(key)
        if entry is None:
            raise lmdb.CorruptedError("a block that is not live can't be retired")
        self._delete("blocks", key)
        self._delete("recency", STAMP.pack(entry.stamp))
        self._changes.append(fingerprint(key))
        self._put("reserved", SLOT.pack(*entry.slot), self._owner)
        return entry.slot

    def vacate(self, slot: Slot) -> None:
        """Free a reserved slot. Its disk space is given back when that is committed: a process that
        is killed before would else leave a live block without bytes."""
        self.freed.append(slot)
        self._delete("reserved", SLOT.pack(*slot))
        self.used -= slot.size
        if self.is_last(slot):
            self._put("lengths", SIZE.pack(slot.size), SIZE.pack(slot.number))
        else:
            self._put("free", SLOT.pack(*slot), b"")

    def reservations(self) -> dict[Slot, bytes]:
        rows = self._txn.cursor(self._tables["reserved"])
        return {parse_slot(*fields(SLOT, key)): owner for key, owner in rows}

    def is_of(self, owner: bytes, slot: Slot) -> bool:
        return self._get("reserved", SLOT.pack(*slot)) == owner

    def is_free(self, slot: Slot) -> bool:
        """Whether the slot is nobody's: free, or behind the end of its file."""
        if slot.number >= self.lengths().get(slot.size, 0):
            return True
        return self._get("free", SLOT.pack(*slot)) is not None

    def free(self, after: Slot = FIRST, limit: int | None = None) -> list[Slot]:
        """Return free slots in order: the first `limit` after slot `after`, or all."""
        cursor = self._txn.cursor(self._tables["free"])
        rows = cursor.iternext(values=False) if cursor.set_range(SLOT.pack(*after) + b"\0") else ()
        return [parse_slot(*fields(SLOT, key)) for key in islice(rows, limit)]

    def lengths(self) -> dict[int, int]:
        """Return the number of slots of each slab file, by slot size."""
        rows = self._txn.cursor(self._tables["lengths"])
        return {fields(SIZE, key)[0]: fields(SIZE, value)[0] for key, value in rows}

    def _get(self, table: str, key: bytes) -> bytes | None:
        data: bytes | None = self._txn.get(key, db=self._tables[table])
        return data

    def _put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._tables[table])

    def _delete(self, table: str, key: bytes) -> None:
        # A row to delete was read or written as part of a state: if it is missing, that is damage.
        if not self._txn.delete(key, db=self._tables[table]):
            raise lmdb.CorruptedError(f"no such row in {table}")
