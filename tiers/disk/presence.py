"""Which blocks are there, for the engine's thread: a table of fingerprints beside the index.

A lookup in an index of a million blocks walks pages that no cache of the processor has: 1.7 us a
block, 14 ms for a prompt of 8,192. The table takes one cache line a block, for all blocks of a call
at once: 1 to 2 ms.

It follows the index's log of changes, our own and other processes'. It may be wrong only where two
fingerprints of 62 bits are equal, and then a load misses or a block is computed again. While there
is no table, or the log has run ahead of it, the index itself is asked.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import lmdb
import xxhash

from tiers.disk.index import Index
from tiers.disk.rows import ADDED, MARKED, label

CELLS = 8
"""Fingerprints a bucket has room for: one cache line."""

_FILL = 4
_FILL_MAX = 6
_ROWS_AT_ONCE = 8
_AT_ONCE = 2048  # of more, torch would let threads work and wait for them

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Table:
    """Fingerprints: buckets of eight, and a set for what does not fit its bucket.

    Made of the first 8 bytes of each of so many labels' digests. 16 bytes a block then, 11 when it
    should be made anew.
    """

    def __init__(self, count: int, words: Iterable[bytes]) -> None:
        import torch

        self._torch = torch
        self.count = count
        # Odd, since fingerprints have two bits in common.
        self._num_buckets = self.count // _FILL + 256 | 1
        self._cells = array("q", bytes(8 * CELLS * self._num_buckets))
        self._buckets = torch.frombuffer(self._cells, dtype=torch.int64).view(-1, CELLS)
        self._overflow: set[int] = set()
        filled = torch.zeros(self._num_buckets, dtype=torch.int64)
        for piece in words:
            some = torch.frombuffer(bytearray(piece), dtype=torch.int64)
            self._fill(some & ~ADDED | MARKED, filled)

    def _fill(self, some: Tensor, filled: Tensor) -> None:
        """Add fingerprints behind the `filled` cells of each bucket."""
        torch = self._torch
        bucket, order = (some % self._num_buckets).sort()
        some = some[order]
        # A fingerprint's place among those of its bucket.
        place = torch.arange(len(some)) - torch.searchsorted(bucket, bucket)
        cell = filled[bucket] + place
        fits = cell < CELLS
        self._buckets[bucket[fits], cell[fits]] = some[fits]
        self._overflow.update(some[~fits].tolist())
        filled.index_add_(0, bucket, torch.ones_like(bucket))

    @property
    def is_crowded(self) -> bool:
        """Whether too many buckets are full."""
        return self.count > _FILL_MAX * self._num_buckets

    def apply(self, changes: array[int]) -> None:
        """Add and remove, in order."""
        for change in changes:
            if change & ADDED:
                self._put(0, change ^ ADDED)
                self.count += 1
            else:
                self._put(change, 0)
                self.count -= 1

    def _put(self, old: int, new: int) -> None:
        """Let a cell of the bucket that has the one have the other; 0 is no fingerprint."""
        first = (old or new) % self._num_buckets * CELLS
        for cell in range(first, first + CELLS):
            if self._cells[cell] == old:
                self._cells[cell] = new
                return
        if new:
            self._overflow.add(new)
        else:
            self._overflow.discard(old)

    def has(self, digests: Sequence[bytes]) -> list[bool]:
        """Say which are there, by the digests of their labels."""
        torch = self._torch
        words = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int64)
        wanted = words[::2] & ~ADDED | MARKED
        found = torch.empty(len(digests), dtype=torch.bool)
        for start in range(0, len(digests), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            rows = self._buckets.index_select(0, some % self._num_buckets)
            found[start : start + _AT_ONCE] = (rows == some[:, None]).any(1)
        if self._overflow:
            (missing,) = (~found).nonzero(as_tuple=True)
            spilled = [one in self._overflow for one in wanted[missing].tolist()]
            found[missing] = torch.tensor(spilled, dtype=torch.bool)
        answers: list[bool] = found.tolist()
        return answers


class Presence:
    """What `peek` asks: the table once there is one, else the index.

    The first lookup begins the making of a table, by `submit`, on another thread: a second and a
    half for a million blocks. So does one that finds the log too far ahead, or the table crowded.
    Raises what `Index.has` does.
    """

    def __init__(self, index: Index, submit: Callable[[Callable[[], None]], object]) -> None:
        self._index = index
        self._submit = submit
        self._table: Table | None = None
        self._row = 0
        self._renewing = False
        # Held while the table is read or follows the log, so that no lookup sees half of a change
        # and no row is applied twice; not while a table is made.
        self._lock = threading.Lock()

    @property
    def is_renewing(self) -> bool:
        """Whether a table is being made, or catches up."""
        return self._renewing

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """Say which keys are live."""
        if not keys:
            return []
        with self._lock:
            if self._table is not None and self._follow(self._table):
                return self._table.has([xxhash.xxh3_128_digest(key) for key in keys])
            if not self._renewing:
                self._renewing = True
                self._submit(self._renew)
        return self._index.has([label(key) for key in keys])

    def _follow(self, table: Table) -> bool:
        """Apply the next rows of the log; whether that was all. Gives up a table that can't."""
        rows = self._index.changes(self._row, _ROWS_AT_ONCE + 1)
        if rows is None or table.is_crowded:
            self._table = None
            return False
        for changes in rows[:_ROWS_AT_ONCE]:
            table.apply(changes)
            self._row += 1
        return len(rows) <= _ROWS_AT_ONCE

    def _renew(self) -> None:
        """Make a table if there is none, and let it catch up."""
        try:
            while self._renewing:
                if self._table is None:
                    with self._index.snapshot() as live:
                        table = Table(live.num_blocks, live.words)
                    with self._lock:
                        self._table, self._row = table, live.row
                with self._lock:
                    self._renewing = self._table is None or not self._follow(self._table)
        except lmdb.Error as error:
            # Left as renewing: the index can't be read, and the lookups that ask it will say so.
            logger.warning("a disk tier's lookups go by its index: %s", error)
