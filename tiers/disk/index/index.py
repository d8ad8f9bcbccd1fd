"""The index, in LMDB: which block is in which slot, which was used last, which slots are free.

A key here is a block's index key (see `rows`), which is as short as is safe: the index is nearly
all the memory that a block takes. `edit` holds what changes the index.

A commit that is not synced survives the death of a process but not of the machine; owner files tell
which of the two happened (see `owner`).
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from tiers.block import FORMAT_VERSION
from tiers.disk.index.edit import (
    INDEX_KEY_BYTES,
    ROW,
    STATE,
    Edit,
    Entry,
    fields,
    parse_changes,
    parse_entry,
)
from tiers.disk.index.environment import Environment
from tiers.errors import TierUnusable
from tiers.store import Usage

INDEX_FORMAT = 3
MAP_BYTES = 1 << 38
"""Address space for the index, not memory or disk: some 500 million blocks. The same for every
capacity, so that no process finds the map outgrown by one that was given more."""

READERS_CHECKED_S = 60.0

_MAX_READERS = 1024
_LOCK_BYTES = (_MAX_READERS + 64) * 64
"""Of LMDB's lock file: a line of the processor's cache a reader, and its head."""

_TABLES = ("blocks", "recency", "free", "reserved", "lengths", "changes", "meta")
_FORMAT = f"kvtiers index {INDEX_FORMAT}, records {FORMAT_VERSION}".encode()


class Piece(NamedTuple):
    """Live keys after row `row` of the log, joined, and the rows since the piece before."""

    row: int
    changes: list[array[int]]
    keys: bytes


def _allocate_readers(path: Path) -> None:
    """Allocate disk space for LMDB's lock file, which LMDB makes as a hole and writes as memory: on
    a full disk one more reader would kill the process by SIGBUS. Only while this process has no
    LMDB open on the file: closing any handle of it frees the locks LMDB has on it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(f"{path}-lock", flags, 0o600)
    try:
        os.posix_fallocate(handle, 0, _LOCK_BYTES)
    finally:
        os.close(handle)


def _changes(log: Any, last: int, after: int, limit: int | None) -> list[array[int]] | None:
    if after == last:
        return []
    if not log.set_key(ROW.pack(after + 1)):
        return None
    return [parse_changes(row) for row in islice(log.iternext(keys=False), limit)]


class Index:
    """One open LMDB environment. LMDB allows one per file and process: see `registry`.

    `synced`: after a power cut the index is as one of the last two commits left it. `lasting`: as
    the last one left it, for which each commit syncs twice.

    Its methods raise LMDB's errors; the constructor also Damaged, OSError, and TierUnusable for an
    index of another format.
    """

    def __init__(
        self,
        path: Path,
        synced: bool = False,
        lasting: bool = False,
        map_bytes: int = MAP_BYTES,
    ) -> None:
        self._path = path
        self._pages = 0
        self._checked = -math.inf
        _allocate_readers(path)
        self._env = Environment(
            path,
            _TABLES,
            subdir=False,
            map_size=map_bytes,
            mode=0o600,
            sync=synced,
            metasync=lasting,
            max_dbs=len(_TABLES),
            max_readers=_MAX_READERS,
        )
        try:
            self.clear_readers()
            self._require_format()
            self._env.open_tables()
        except BaseException:
            self._env.close()
            raise

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
        """Return each key's live block, or None."""
        with self._env.begin("blocks") as txn:
            found = [txn.get(key) for key in keys]
        return [None if data is None else parse_entry(data) for data in found]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether it is live. Reads mapped memory and takes no lock."""
        with self._env.begin("blocks") as txn:
            return [txn.get(key) is not None for key in keys]

    def starting_with(self, beginning: bytes, most: int) -> list[bytes]:
        """The first `most` live keys that begin with these bytes."""
        keys: list[bytes] = []
        with self._env.begin("blocks") as txn:
            cursor = txn.cursor()
            more = cursor.set_range(beginning)
            while more and len(keys) < most and cursor.key().startswith(beginning):
                keys.append(cursor.key())
                more = cursor.next()
        return keys

    def piece(self, row: int | None, after: bytes, limit: int) -> Piece | None:
        """Return the first `limit` live keys after key `after`, and the log's rows after row `row`,
        from one reading. None if the log no longer goes back to row `row`."""
        with self._env.begin() as txn:
            log = txn.cursor(self._env.tables["changes"])
            last = fields(ROW, log.key())[0] if log.last() else 0
            changes = _changes(log, last, last if row is None else row, None)
            if changes is None:
                return None
            blocks = txn.cursor(self._env.tables["blocks"])
            more = blocks.set_range(after + b"\0")
            found = list(islice(blocks.iternext(values=False), limit)) if more else []
        keys = b"".join(found)
        if len(keys) != INDEX_KEY_BYTES * len(found):
            raise lmdb.CorruptedError("a key of another length in the index")
        return Piece(last, changes, keys)

    def changes(self, after: int, limit: int) -> list[array[int]] | None:
        """Return the log's rows after row `after`, `limit` at most: fingerprints in the order of
        their changes. None if the log no longer goes back to row `after`."""
        with self._env.begin("changes") as txn:
            log = txn.cursor()
            last = fields(ROW, log.key())[0] if log.last() else 0
            return _changes(log, last, after, limit)

    def usage(self) -> Usage:
        """Count live blocks, and the bytes of live and reserved slots."""
        with self._env.begin() as txn:
            blocks = txn.stat(self._env.tables["blocks"])["entries"]
            data = txn.get(b"state", db=self._env.tables["meta"])
        capacity, used, _ = fields(STATE, data) if data else (0, 0, 0)
        return Usage(blocks=blocks, used=used, capacity=capacity)

    @contextmanager
    def edit(self, owner: bytes) -> Iterator[Edit]:
        """One write transaction: applies all of the body's changes, or none if the body raises."""
        with self._env.begin(write=True) as txn:
            edit = Edit(txn, self._env.tables, owner)
            yield edit
            edit.save_state()

    def wait_at_most(self, seconds: float) -> None:
        """Let an edit raise lmdb.LockError once it has waited so long for others of whom none
        commits; it is `BRIEF_WAIT_S` until this is called."""
        self._env.wait = seconds

    def reopen(self) -> None:
        """Open the index anew if LMDB refuses all (see `environment`)."""
        self._env.reopen()

    def clear_readers(self) -> None:
        """Remove dead processes from LMDB's table of readers, every minute and when the file grew:
        pages that they were reading are never used again otherwise. Takes microseconds."""
        pages, now = self._env.info()["last_pgno"], time.monotonic()
        if pages > self._pages or now > self._checked + READERS_CHECKED_S:
            self._pages, self._checked = pages, now
            self._env.reader_check()

    def sync(self) -> None:
        """Sync all commits to the device."""
        self._env.sync()

    def close(self) -> None:
        """Unmap. Not while another thread is in a method."""
        self._env.close()
