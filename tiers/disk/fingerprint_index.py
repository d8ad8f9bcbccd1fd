"""Lookups for the engine's thread: a table of fingerprints in memory, beside the index.

A lookup in an index of a million blocks walks pages that no processor cache holds: 1.7 us a block,
14 ms for a prompt of 8,192 blocks. The table reads one cache line a block, for all blocks of a call
at once: 1 to 2 ms.

The table follows the index's log of changes, by this process and by others. It is wrong only where
two fingerprints of 62 bits are equal; then a load misses, or a block is computed again. While there
is no table, or the log has run too far ahead of it, lookups ask the index itself.
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
from tiers.disk.rows import ADDED, MARKED, index_key

CELLS = 8
"""Fingerprints in a bucket: one cache line."""

_FILL = 4
_FILL_MAX = 6
_ROWS_AT_ONCE = 8
_AT_ONCE = 2048  # for more keys torch would start threads and wait for them

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class FingerprintTable:
    """A set of fingerprints: buckets of eight, and a plain set for what does not fit its bucket.
    Takes 16 bytes a block when it is made, and 11 when it `is_crowded`."""

    def __init__(self, count: int, words: Iterable[bytes]) -> None:
        """`words`: the digest words of `count` index keys, in pieces."""
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
        """Add `some` fingerprints after the `filled` cells of each bucket."""
        torch = self._torch
        bucket, order = (some % self._num_buckets).sort()
        some = some[order]
        # The fingerprint's position among those of its bucket.
        place = torch.arange(len(some)) - torch.searchsorted(bucket, bucket)
        cell = filled[bucket] + place
        fits = cell < CELLS
        self._buckets[bucket[fits], cell[fits]] = some[fits]
        self._overflow.update(some[~fits].tolist())
        filled.index_add_(0, bucket, torch.ones_like(bucket))

    @property
    def is_crowded(self) -> bool:
        """Whether so many buckets are full that the table should be made anew."""
        return self.count > _FILL_MAX * self._num_buckets

    def apply(self, changes: array[int]) -> None:
        """Apply rows of the log: add and remove fingerprints, in order."""
        for change in changes:
            if change & ADDED:
                self._replace(0, change ^ ADDED)
                self.count += 1
            else:
                self._replace(change, 0)
                self.count -= 1

    def _replace(self, old: int, new: int) -> None:
        """Replace fingerprint `old` by `new` in its bucket; 0 stands for an empty cell."""
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
        """Say for each digest, of 16 bytes, whether its fingerprint is in the table."""
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


class FingerprintIndex:
    """Answers `peek`: from the table once there is one, else from the index.

    The first lookup has a table made, by `submit`, on another thread: 1.5 s for a million blocks.
    So does a lookup that finds the log too far ahead, or the table crowded. Thread-safe. Raises
    what `Index.has` raises.
    """

    def __init__(self, index: Index, submit: Callable[[Callable[[], None]], object]) -> None:
        self._index = index
        self._submit = submit
        self._table: FingerprintTable | None = None
        self._row = 0
        self._renewing = False
        # Held while the table is read or follows the log: otherwise a lookup could see half of a
        # change, or a row could be applied twice. Not held while a table is made.
        self._lock = threading.Lock()

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether its block is live."""
        if not keys:
            return []
        with self._lock:
            if self._table is not None and self._follow(self._table):
                return self._table.has([xxhash.xxh3_128_digest(key) for key in keys])
            if not self._renewing:
                self._renewing = True
                self._submit(self._renew)
        return self._index.has([index_key(key) for key in keys])

    def _follow(self, table: FingerprintTable) -> bool:
        """Apply the next rows of the log; return whether those were all. Drops a table that can't
        follow, or is crowded."""
        rows = self._index.changes(self._row, _ROWS_AT_ONCE + 1)
        if rows is None or table.is_crowded:
            self._table = None
            return False
        for changes in rows[:_ROWS_AT_ONCE]:
            table.apply(changes)
            self._row += 1
        return len(rows) <= _ROWS_AT_ONCE

    def _renew(self) -> None:
        """Make a table if there is none, and let it catch up with the log."""
        try:
            while self._renewing:
                if self._table is None:
                    with self._index.snapshot() as live:
                        table = FingerprintTable(live.num_blocks, live.digest_words)
                    with self._lock:
                        self._table, self._row = table, live.row
                with self._lock:
                    self._renewing = self._table is None or not self._follow(self._table)
        except lmdb.Error as error:
            # `_renewing` stays set: the index can't be read, and lookups that ask it will say so.
            logger.warning(
                "the disk tier can't make its table of fingerprints, so lookups ask its index, "
                "which is slower: %s",
                error,
            )
