"""The store: blocks are rows of an SQLite file, which the engines of a host share."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiers.errors import TierNotOpen
from tiers.store import Block, PutCounts, Usage

TABLE = """
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY, used INTEGER NOT NULL, size INTEGER NOT NULL, payload BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON blocks (used, size);
"""
CLEAR_BATCH = 256
"""Blocks that one call of `clear` drops at most."""


class TemplateStore:
    """A TierStore in one file. Verbs raise sqlite3.Error: kvtiers makes a miss of it.

    `capacity` bounds the bytes of the payloads; the file is some percent larger. `used` grows with
    each use of a block, so that the smallest is evicted first.
    """

    def __init__(self, path: Path, capacity: int, timeout: float) -> None:
        """Open the file, or make it. Raises TierNotOpen."""
        self._path = path
        self._capacity = capacity
        self._evicted = self._renewed = 0
        # One connection, one thread at a time: calls overlap.
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(
                path, timeout=timeout, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = OFF")  # it is a cache
            self._db.executescript(TABLE)
        except sqlite3.Error as error:
            raise TierNotOpen(f"{path}: {error}") from error  # it is tried again

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return self._held(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        keys = [block.key for block in blocks]
        with self._edit():
            self._renewed += sum(self._held(keys))
            top = self._newest() + len(blocks)
            # The first of a call counts as used last: a block is of no use without those before.
            for age, (key, payload) in enumerate(blocks):
                self._db.execute(
                    "REPLACE INTO blocks (key, used, size, payload) VALUES (?, ?, ?, ?)",
                    (key, top - age, len(payload), payload),
                )
            self._make_room()
            return self._held(keys)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        with self._lock:
            hits = [self._fill(block) for block in blocks]
        with self._edit():
            self._use([block.key for block, hit in zip(blocks, hits, strict=True) if hit])
        return hits

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._edit():
            self._delete(keys)

    def clear(self, namespace: bytes) -> bool:
        with self._edit():
            rows = self._db.execute(
                "SELECT key FROM blocks WHERE key >= ? AND substr(key, 1, ?) = ? LIMIT ?",
                (namespace, len(namespace), namespace, CLEAR_BATCH),
            ).fetchall()
            self._delete(key for (key,) in rows)
        return len(rows) == CLEAR_BATCH

    def usage(self) -> Usage:
        with self._lock:
            blocks, used = self._totals()
        return Usage(blocks, used, self._capacity)

    def resize(self, capacity: int) -> None:
        with self._edit():
            self._capacity = capacity
            self._make_room()

    def counts(self) -> PutCounts:
        return PutCounts(self._renewed, self._evicted)

    def describe(self) -> str:
        return str(self._path)  # in the log line of the tier's opening

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- with the lock held ------------------------------------------------------------------

    @contextmanager
    def _edit(self) -> Iterator[None]:
        """One transaction: other processes see all of it or nothing."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _held(self, keys: Sequence[bytes]) -> list[bool]:
        find = "SELECT 1 FROM blocks WHERE key = ?"
        return [self._db.execute(find, (key,)).fetchone() is not None for key in keys]

    def _fill(self, block: Block) -> bool:
        find = "SELECT payload FROM blocks WHERE key = ?"
        row = self._db.execute(find, (block.key,)).fetchone()
        if row is None or len(row[0]) != len(block.payload):
            return False
        block.payload[:] = row[0]
        return True

    def _use(self, keys: Sequence[bytes]) -> None:
        top = self._newest() + len(keys)
        self._db.executemany(
            "UPDATE blocks SET used = ? WHERE key = ?",
            [(top - age, key) for age, key in enumerate(keys)],
        )

    def _make_room(self) -> None:
        too_much = self._totals()[1] - self._capacity
        victims = []
        if too_much > 0:
            for key, size in self._db.execute("SELECT key, size FROM blocks ORDER BY used"):
                victims.append(key)
                too_much -= size
                if too_much <= 0:
                    break
        self._delete(victims)
        self._evicted += len(victims)

    def _delete(self, keys: Iterable[bytes]) -> None:
        self._db.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in keys])

    def _newest(self) -> int:
        return int(self._db.execute("SELECT coalesce(max(used), 0) FROM blocks").fetchone()[0])

    def _totals(self) -> tuple[int, int]:
        count, size = self._db.execute("SELECT count(*), total(size) FROM blocks").fetchone()
        return count, int(size)
