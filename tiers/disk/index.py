"""The index: which key is in which slot, who was used last, which slots are free. LMDB.

Every slot of a slab file is in one of three states, and only `Edit` moves it between them:

    free ──claim──> reserved ──publish──> live
      ^                │  ^                 │
      └────vacate──────┘  └─────retire──────┘

A reserved slot belongs to one owner, who alone writes its bytes; live and reserved slots are
what `used` counts. A state changes in one transaction with everything that depends on it, so a
process killed at any instant leaves each slot in exactly one state.

What it calls a key is a block's label (see `label`): as short as it is safe to be, since the index
is all that a block takes of memory.

Commits that are not synced survive the death of a process but not of the machine, which the
owner files tell (see `owner`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import xxhash

from tiers.block import FORMAT_VERSION
from tiers.disk.failures import Damaged
from tiers.disk.slab import slot_bytes
from tiers.errors import TierUnusable
from tiers.store import Usage

INDEX_FORMAT = 2
MAP_BYTES = 1 << 38
"""Address space for the index, not memory or disk: some 500 million blocks. The same for every
capacity, so that no process finds the map outgrown by one that was given more."""

_MAX_READERS = 1024
_MAX_OFFSET = 1 << 62
_TABLES = ("blocks", "recency", "free", "reserved", "lengths", "meta")
_LABEL_SPACE = 8
_ENTRY = struct.Struct("<QQ16sQ")
_SLOT = struct.Struct(">QQ")  # big-endian, as in _SIZE and _STAMP: LMDB sorts keys by bytes
_SIZE = struct.Struct(">Q")
_STAMP = struct.Struct(">Q")
_STATE = struct.Struct("<QQQ")
_FORMAT = f"kvtiers index {INDEX_FORMAT}, records {FORMAT_VERSION}".encode()


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


def _fields(row: struct.Struct, data: bytes) -> tuple[Any, ...]:
    # LMDB has no checksums: a flipped bit in its file can reach us as a row that can't be.
    if len(data) != row.size:
        raise lmdb.CorruptedError(f"a row of {len(data)} bytes, {row.size} expected")
    return row.unpack(data)


def _parse_slot(size: int, number: int) -> Slot:
    if not 0 < size * (number + 1) <= _MAX_OFFSET:
        raise lmdb.CorruptedError(f"no file has slot {number} of {size} bytes")
    return Slot(size, number)


def _parse_entry(data: bytes) -> Entry:
    number, payload_bytes, checksum, stamp = _fields(_ENTRY, data)
    slot = _parse_slot(slot_bytes(payload_bytes), number)
    return Entry(slot, payload_bytes, checksum, stamp)


class Index:
    """One open LMDB environment. LMDB allows one per file and process: see `vault`.

    `synced`: a machine that goes down leaves the index as one of the last two commits made it;
    `lasting`: as the last one did, for which a commit syncs twice.

    Its methods raise LMDB's errors; the constructor also Damaged, and TierUnusable for an index
    of another format.
    """

    def __init__(
        self,
        path: Path,
        synced: bool = False,
        lasting: bool = False,
        map_bytes: int = MAP_BYTES,
    ) -> None:
        self._path = path
        self._env = lmdb.open(
            str(path),
            subdir=False,
            map_size=map_bytes,
            mode=0o600,
            sync=synced,
            metasync=lasting,
            max_dbs=len(_TABLES),
            max_readers=_MAX_READERS,
        )
        try:
            self._require_whole_file()
            self._env.reader_check()
            self._require_format()
            self._tables = {name: self._env.open_db(name.encode()) for name in _TABLES}
        except BaseException:
            self._env.close()
            raise

    def _require_whole_file(self) -> None:
        # Reading a mapped page behind the end of a cut file would kill the process by SIGBUS.
        with self._env.begin() as txn:
            page = txn.stat(self._env.open_db(None, txn))["psize"]
        need, size = (self._env.info()["last_pgno"] + 1) * page, os.stat(self._path).st_size
        if size < need:
            raise Damaged(f"{self._path} has {size} bytes, {need} expected")

    def _require_format(self) -> None:
        with self._env.begin(write=True) as txn:
            found = self._format(txn)
        if found != _FORMAT:
            raise TierUnusable(
                f"{self._path} has the format {found.decode(errors='replace')!r}, this version "
                f"reads {_FORMAT.decode()!r}; name another folder, or remove this one's files"
            )

    def _format(self, txn: Any) -> bytes:
        fresh = txn.stat(self._env.open_db(None, txn))["entries"] == 0
        try:
            meta = self._env.open_db(b"meta", txn, create=fresh)
        except lmdb.NotFoundError:
            return b"of another program"
        if fresh:
            txn.put(b"format", _FORMAT, db=meta)
        found: bytes = txn.get(b"format", b"unknown", db=meta)
        return found

    def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Look keys up."""
        with self._env.begin(db=self._tables["blocks"]) as txn:
            found = [txn.get(key) for key in keys]
        return [None if data is None else _parse_entry(data) for data in found]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys are live. From mapped memory; waits for nobody."""
        with self._env.begin(db=self._tables["blocks"]) as txn:
            return [txn.get(key) is not None for key in keys]

    def starting_with(self, beginning: bytes) -> list[bytes]:
        """Every live key that begins with these bytes."""
        keys = []
        with self._env.begin(db=self._tables["blocks"]) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(beginning)
            while more and cursor.key().startswith(beginning):
                keys.append(cursor.key())
                more = cursor.next()
        return keys

    def usage(self) -> Usage:
        """Count live blocks, and the bytes of live and reserved slots."""
        with self._env.begin() as txn:
            blocks = txn.stat(self._tables["blocks"])["entries"]
            data = txn.get(b"state", db=self._tables["meta"])
        capacity, used, _ = _fields(_STATE, data) if data else (0, 0, 0)
        return Usage(blocks=blocks, used=used, capacity=capacity)

    @contextmanager
    def edit(self, owner: bytes) -> Iterator[Edit]:
        """One write transaction: all of the body's edits, or none if it raises."""
        with self._env.begin(write=True) as txn:
            edit = Edit(txn, self._tables, owner)
            yield edit
            edit.save_state()

    def sync(self) -> None:
        """Make what is committed survive the machine."""
        self._env.sync(True)

    def close(self) -> None:
        """Unmap. Not while another thread is in a method."""
        self._env.close()


class Edit:
    """The changes of one write transaction; no other process or thread changes anything."""

    def __init__(self, txn: Any, tables: Mapping[str, Any], owner: bytes) -> None:
        self._txn = txn
        self._tables = tables
        self._owner = owner
        self._state = self._get("meta", b"state") or _STATE.pack(0, 0, 0)
        self.capacity, self.used, self._clock = _fields(_STATE, self._state)

    def save_state(self) -> None:
        """Write what the edit keeps in memory; the last step before the commit."""
        if self.used < 0:
            raise lmdb.CorruptedError("more bytes were freed than were in use")
        state = _STATE.pack(self.capacity, self.used, self._clock)
        if state != self._state:
            self._put("meta", b"state", state)

    def entry(self, key: bytes) -> Entry | None:
        """The live block of a key."""
        data = self._get("blocks", key)
        return None if data is None else _parse_entry(data)

    def renew(self, key: bytes) -> None:
        """Count a live block as used after every other; an unknown key is ignored."""
        entry = self.entry(key)
        if entry is not None:
            self._delete("recency", _STAMP.pack(entry.stamp))
            self._enter(key, entry)

    def oldest(self, besides: Collection[bytes]) -> bytes | None:
        """The key whose use is longest ago and that is none of `besides`."""
        cursor = self._txn.cursor(self._tables["recency"])
        return next((key for key in cursor.iternext(keys=False) if key not in besides), None)

    def claim(self, size: int) -> Slot:
        """Reserve a free slot, a new one at the file's end if there is none."""
        cursor = self._txn.cursor(self._tables["free"])
        if cursor.set_range(_SLOT.pack(size, 0)):
            slot = _parse_slot(*_fields(_SLOT, cursor.key()))
            if slot.size == size:
                cursor.delete()
                return self._reserve(slot)
        length = self.lengths().get(size, 0)
        self._put("lengths", _SIZE.pack(size), _SIZE.pack(length + 1))
        return self._reserve(Slot(size, length))

    def _reserve(self, slot: Slot) -> Slot:
        self._put("reserved", _SLOT.pack(*slot), self._owner)
        self.used += slot.size
        return slot

    def publish(self, key: bytes, slot: Slot, payload_bytes: int, checksum: bytes) -> None:
        """Make a reserved slot, of the size for it, the live block of a key that has none."""
        self._delete("reserved", _SLOT.pack(*slot))
        self._enter(key, Entry(slot, payload_bytes, checksum, 0))

    def _enter(self, key: bytes, entry: Entry) -> None:
        self._clock += 1
        self._put("recency", _STAMP.pack(self._clock), key)
        row = _ENTRY.pack(entry.slot.number, entry.payload_bytes, entry.checksum, self._clock)
        self._put("blocks", key, row)

    def retire(self, key: bytes) -> Slot:
        """Forget a live block; its slot is reserved for us now."""
        entry = self.entry(key)
        if entry is None:
            raise lmdb.CorruptedError("a block that is not live can't be retired")
        self._delete("blocks", key)
        self._delete("recency", _STAMP.pack(entry.stamp))
        self._put("reserved", _SLOT.pack(*entry.slot), self._owner)
        return entry.slot

    def vacate(self, slot: Slot) -> None:
        """Free a reserved slot, whose disk space is already given back."""
        self._delete("reserved", _SLOT.pack(*slot))
        self.used -= slot.size
        if slot.number + 1 == self.lengths().get(slot.size):
            self._put("lengths", _SIZE.pack(slot.size), _SIZE.pack(slot.number))
        else:
            self._put("free", _SLOT.pack(*slot), b"")

    def reservations(self) -> dict[Slot, bytes]:
        """Every reserved slot and its owner's id."""
        rows = self._txn.cursor(self._tables["reserved"])
        return {_parse_slot(*_fields(_SLOT, key)): owner for key, owner in rows}

    def is_mine(self, slot: Slot) -> bool:
        """Whether the slot is reserved for us."""
        return self._get("reserved", _SLOT.pack(*slot)) == self._owner

    def free(self) -> list[Slot]:
        """Every free slot below its file's length."""
        rows = self._txn.cursor(self._tables["free"]).iternext(values=False)
        return [_parse_slot(*_fields(_SLOT, key)) for key in rows]

    def lengths(self) -> dict[int, int]:
        """How many slots each slab file has, by slot size."""
        rows = self._txn.cursor(self._tables["lengths"])
        return {_fields(_SIZE, key)[0]: _fields(_SIZE, value)[0] for key, value in rows}

    def _get(self, table: str, key: bytes) -> bytes | None:
        data: bytes | None = self._txn.get(key, db=self._tables[table])
        return data

    def _put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._tables[table])

    def _delete(self, table: str, key: bytes) -> None:
        # Every row deleted was read or written as part of a state, so a missing one is damage.
        if not self._txn.delete(key, db=self._tables[table]):
            raise lmdb.CorruptedError(f"no such row in {table}")
