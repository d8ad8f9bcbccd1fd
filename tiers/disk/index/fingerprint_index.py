"""Lookups for the engine's thread: a table of fingerprints in memory, beside the index.

A lookup in an index of a million blocks walks pages that no processor cache holds: 1.7 us a block,
14 ms for a prompt of 8,192 blocks. The table reads one cache line a block, for all blocks of a call
at once: 1 to 2 ms.

The table follows the index's log of changes, by this process and by others. It is wrong where two
fingerprints of 62 bits are equal, and while the log is ahead of it: then a load misses, or a block
is computed again. A lookup follows a few edits of the log and leaves the rest to another thread.
Without a table the index is asked, which takes too long for an engine's thread: see `is_ready`.

A table is made piece by piece: each piece reads the log since the piece before, and the next keys.
So the log need not last as long as the making, which takes seconds for millions of blocks, and no
reading keeps the pages of the index from reuse that long. A table that exists follows the log every
second, asked or not.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import Struct
from typing import TYPE_CHECKING

import lmdb
import xxhash

from tiers.concurrency.executors import IoExecutor
from tiers.disk.index.edit import ADDED, INDEX_KEY_BYTES, MARKED, digest_fingerprint, index_key
from tiers.disk.index.index import Index

CELLS = 8
"""Fingerprints in a bucket: one cache line."""

_cells_from = Struct(f"{CELLS}q").unpack_from

_FILL = 4
_FILL_MAX = 6
_ROW_BATCH = 32
"""Edits that a lookup follows, of 64 changes each where stores are large: 1.5 to 3 ms."""

_PAUSE_S = 0.001
"""Seconds between two steps in which a table catches up. Without it lookups would wait for all."""

_SCALAR_MAX_KEYS = 64
"""Keys looked up one by one, 0.5 us each. The calls of torch take 15 us, and more beside threads
that work: after each the lock of the interpreter may be another's. Most steps of an engine look up
the blocks that some answers have completed, and prompts of 64 are common."""
_KEY_BATCH = 2048
"""Keys looked up or read at once. For more torch would start threads and wait for them; and a
reading from a cold index keeps other threads of Python waiting for its pages."""

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class FingerprintTable:
    """A set of fingerprints: buckets of eight, and a plain set for those that do not fit.
    Takes 16 bytes a block when it is made, and 11 when it `is_crowded`."""

    def __init__(self, room: int) -> None:
        """Makes an empty table, for `room` blocks or some more."""
        import torch

        self._torch = torch
        self.count = 0
        # Odd, since fingerprints have two bits in common.
        self._num_buckets = room // _FILL + 256 | 1
        # The kernel's zeros: writing zeros for millions of blocks would stop all of Python. Large
        # pages: of 50 million blocks 8,192 are looked up in 1.4 ms, with small pages in 3.1.
        memory = mmap(-1, 8 * CELLS * self._num_buckets, MAP_PRIVATE | MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel may have none
            memory.madvise(MADV_HUGEPAGE)
        self._cells = memoryview(memory).cast("q")
        self._buckets = torch.frombuffer(memory, dtype=torch.int64).view(-1, CELLS)
        self._overflow: set[int] = set()

    @property
    def is_crowded(self) -> bool:
        """Whether too many buckets are full, so that a larger table should be made."""
        return self.count > _FILL_MAX * self._num_buckets

    def add(self, keys: bytes) -> None:
        """Add the fingerprints of these index keys, joined, but for those in a bucket already."""
        torch = self._torch
        words = torch.frombuffer(bytearray(keys), dtype=torch.int64)
        bucket, some, rows = self._look_up(words.view(-1, INDEX_KEY_BYTES // 8)[:, 1])
        (new,) = (rows != some[:, None]).all(1).nonzero(as_tuple=True)
        bucket, order = bucket[new].sort()
        new = new[order]
        # By `index_select`, since torch has other threads help with rows taken by an index.
        some, empty = some[new], rows.index_select(0, new) == 0
        # A fingerprint takes the empty cell that its position in its bucket's group gives.
        every = torch.arange(1, len(some) + 1)
        before = every[:-1] * (bucket[1:] != bucket[:-1])
        place = every - torch.cat((every.new_zeros(1), before)).cummax(0).values
        taken = empty & (empty.cumsum(1) == place[:, None])
        which, cell = taken.nonzero(as_tuple=True)
        self._buckets[bucket[which], cell] = some[which]
        self.count += len(which) - len(self._overflow)
        self._overflow.update(some[~taken.any(1)].tolist())
        self.count += len(self._overflow)

    def apply(self, changes: array[int]) -> None:
        """Apply a row of the log: add and remove fingerprints, in order. One that is there is not
        added, and one that is not there is not removed."""
        cells, num_buckets, overflow = self._cells, self._num_buckets, self._overflow
        for change in changes:  # a microsecond each, so no function of ours is called
            mark = change & ~ADDED
            first = mark % num_buckets * CELLS
            bucket = _cells_from(cells, 8 * first)
            is_here = mark in bucket
            if change & ADDED:
                if is_here or mark in overflow:
                    continue
                if 0 in bucket:
                    cells[first + bucket.index(0)] = mark
                else:
                    overflow.add(mark)
                self.count += 1
            elif is_here or mark in overflow:
                if is_here:
                    cells[first + bucket.index(mark)] = 0
                # It may have been added again where there was room by then.
                overflow.discard(mark)
                self.count -= 1

    def has(self, digests: Sequence[bytes]) -> list[bool]:
        """Say for each digest, of 16 bytes, whether its fingerprint is in the table."""
        if len(digests) <= _SCALAR_MAX_KEYS:
            size, cells, overflow = self._num_buckets, self._cells, self._overflow
            return [
                mark in _cells_from(cells, mark % size * 8 * CELLS) or mark in overflow
                for mark in map(digest_fingerprint, digests)
            ]
        words = self._torch.frombuffer(bytearray(b"".join(digests)), dtype=self._torch.int64)[::2]
        answers: list[bool] = []
        for start in range(0, len(digests), _KEY_BATCH):
            _, some, rows = self._look_up(words[start : start + _KEY_BATCH])
            held = (rows == some[:, None]).any(1)
            answers += held.tolist()
            if self._overflow:
                (missing,) = (~held).nonzero(as_tuple=True)
                places = (missing + start).tolist()
                for place, mark in zip(places, some[missing].tolist(), strict=True):
                    answers[place] = mark in self._overflow
        return answers

    def _look_up(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The bucket, fingerprint and bucket's cells of each digest word."""
        some = words & ~ADDED | MARKED
        bucket = some % self._num_buckets
        return bucket, some, self._buckets.index_select(0, bucket)


class FingerprintIndex:
    """Answers `peek`: from the table once there is one, else from the index.

    A table is made on a thread of its own: a second for a million blocks. So is another for one
    that is crowded, or that the log has run away from; the old one serves until then. Thread-safe.
    Raises what `Index.has` raises.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        # Not one of those that read and write, which would miss it for a minute.
        self._thread = IoExecutor(1, "disk-table")
        self._submit: Callable[[Callable[[], None]], object] = self._thread.submit
        self._table: FingerprintTable | None = None  # a thread that can't make another drops it
        self._row = 0
        self._followed = -1
        """The number of the commit up to which the table has followed the log."""
        self._lost = False
        self.was_made = False
        """Whether there ever was a table."""
        self._renewing = False
        # Held while the table is read or follows the log: otherwise a lookup could see half of a
        # change, or a row could be applied twice. Not held while a table is made.
        self._lock = threading.Lock()

    def is_ready(self) -> bool:
        """Whether there is a table; if not, one is being made from now on. One of a few blocks is
        made at once. Stays True, even while the index has to answer."""
        if self._table is None and not self._renewing:
            few = self._index.usage().blocks <= _KEY_BATCH
            self._begin_renewing((lambda make: make()) if few else self._submit)
        return self.was_made

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether its block is live."""
        if not keys:
            return []
        with self._lock:
            is_whole, table = self._follow(), self._table
            held = table.has([xxhash.xxh3_128_digest(key) for key in keys]) if table else None
        if not is_whole or self._needs_another():
            self._begin_renewing(self._submit)
        return self._index.has([index_key(key) for key in keys]) if held is None else held

    def _begin_renewing(self, submit: Callable[[Callable[[], None]], object]) -> None:
        with self._lock:
            if self._renewing:
                return
            self._renewing = True
        submit(self._renew)

    def follow(self) -> bool:
        """Let the table, if there is one, follow the log; return whether more is to follow. Called
        in the background: the log would run away from a table that is seldom asked."""
        with self._lock:
            return self._table is not None and not self._follow() and not self._lost

    def stop(self) -> None:
        """Stop making a table: nobody should wait for it."""
        with self._lock:  # without it `_renew` could set the flag afterwards, and continue
            self._renewing = False

    def close(self) -> None:
        """Wait until the index is not read any more; call `stop` before."""
        self._thread.shutdown()

    def _follow(self) -> bool:
        """Apply the next rows of the log; return whether there is a table and those were all."""
        if (table := self._table) is None:
            return False
        # Reading the log gives up Python's lock, which an engine's thread then waits for.
        if self._index.last_commit() == self._followed:
            return True
        rows, commit = self._index.changes(self._row, _ROW_BATCH + 1)
        self._lost = rows is None
        if rows is None:
            return False
        for changes in rows[:_ROW_BATCH]:
            table.apply(changes)
            self._row += 1
        is_whole = len(rows) <= _ROW_BATCH
        self._followed = commit if is_whole else -1
        return is_whole

    def _needs_another(self) -> bool:
        return (table := self._table) is None or self._lost or table.is_crowded

    def _renew(self) -> None:
        """Make a table if another is needed, and let it catch up with the log."""
        try:
            while self._renewing:
                if self._needs_another() and (made := self._make()) is not None:
                    with self._lock:
                        (self._table, self._row), self._lost = made, False
                        self._followed = -1
                        self.was_made = True
                with self._lock:
                    self._renewing = self._renewing and not self._follow()
                if self._renewing:
                    time.sleep(_PAUSE_S)
        except (lmdb.Error, OSError, MemoryError, RuntimeError) as error:  # the last is of torch
            # `_renewing` stays set: there is no memory for another, or the index can't be read, and
            # lookups that ask it will say so. The one there is may have lost the log.
            self._table = None
            logger.warning(
                "the disk tier can't make its table of fingerprints, so lookups ask its index, "
                "which is slower: %s",
                error,
            )

    def _make(self) -> tuple[FingerprintTable, int] | None:
        """Make a table; return it and the row of the log that it has come to.

        Changes of keys that are yet to be read are applied, too: a key that is then read is there
        already. So the table is right for all keys up to the last one read, and in the end for all.
        None: it was stopped, or the log ran away between two pieces.
        """
        table = FingerprintTable(self._index.usage().blocks)
        piece = self._index.piece(None, b"", _KEY_BATCH)
        while piece is not None and self._renewing:
            for changes in piece.changes:
                table.apply(changes)
            if not piece.keys:
                return table, piece.row
            table.add(piece.keys)
            piece = self._index.piece(piece.row, piece.keys[-INDEX_KEY_BYTES:], _KEY_BATCH)
        return None
