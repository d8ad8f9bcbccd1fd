"""The replay engine's paged KV: which blocks are free, shared, or still hold a known prefix."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from tiers.contract.protocols import NULL_BLOCK


def chain_hash(parent: bytes, tokens: Sequence[int], salt: str) -> bytes:
    """A block's hash: of its tokens, all tokens before them, and a salt."""
    text = parent + repr((tuple(tokens), salt)).encode()
    return hashlib.sha256(text).digest()


class BlockPool:
    """Reference-counted blocks, from `first` on; a free block keeps its prefix until it is taken
    again (LRU)."""

    def __init__(self, num_blocks: int, prefix_caching: bool, first: int = 0) -> None:
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(first, num_blocks))
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self.caches_prefixes = prefix_caching

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix that is still in place."""
        return [self._cached[name] for name in takewhile(self._cached.__contains__, hashes)]

    def share(self, blocks: Sequence[int]) -> None:
        """Take a reference on blocks in place."""
        for block in blocks:
            self._refs[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int] | None:
        """Take fresh blocks, the longest free first; None: too few are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.forget(taken)
        for block in taken:
            self._refs[block] = 1
        return taken

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks hold no known prefix any more."""
        for block in blocks:
            block_hash, self._hashes[block] = self._hashes[block], None
            if block_hash is not None and self._cached.get(block_hash) == block:
                del self._cached[block_hash]

    def know(self, block: int, block_hash: bytes) -> None:
        """Note which prefix a computed or loaded block holds."""
        if self.caches_prefixes and self._hashes[block] is None and block_hash not in self._cached:
            self._hashes[block] = block_hash
            self._cached[block_hash] = block

    def forget_all(self) -> None:
        """No block holds a known prefix any more."""
        self.forget(range(len(self._hashes)))

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back. As in vLLM's `free_blocks`, a prefix's last blocks are taken again
        before its first, and blocks without a known prefix before all others."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)


STATE = 0
"""In place of a window: the group's blocks hold states of a recurrent layer. Of a prefix only the
block of its last token is kept, with the state after all tokens up to it."""


def has_null(windows: Sequence[int | None]) -> bool:
    """Whether paged block 0 only stands for blocks that are not kept."""
    return any(window is not None for window in windows)


def _name(block_hash: bytes, group: int) -> bytes:
    return block_hash + bytes([group])


Tables = list[list[int]]
"""A request's blocks, one table per KV cache group; NULL_BLOCK where none is kept."""


class BlockTables:
    """Block tables over one pool: a group with a window (in tokens) keeps only blocks that it
    reaches, one of STATE the last state."""

    def __init__(self, pool: BlockPool, block_tokens: int, windows: Sequence[int | None]) -> None:
        self.pool = pool
        self._size = block_tokens
        self._windows = windows
        self._has_null = has_null(windows)

    def _is_real(self, block: int) -> bool:
        return block != NULL_BLOCK or not self._has_null

    def _real(self, table: Sequence[int]) -> list[int]:
        return [block for block in table if self._is_real(block)]

    def _first_kept(self, window: int | None, computed: int) -> int:
        if window == STATE:
            return max(0, computed - 1) // self._size
        return 0 if window is None else max(0, computed - window + 1) // self._size

    def _first_new(self, window: int | None, blocks: int, computed: int) -> int:
        """The first block for which a table of `blocks` needs a place."""
        return blocks - 1 if window == STATE else self._first_kept(window, computed)

    def find_prefix(self, hashes: Sequence[bytes]) -> Tables:
        """The longest prefix that is still in place in every group; without windows, the first
        try finds it."""
        longest = len(hashes)
        for group, window in enumerate(self._windows):
            if window is None:
                longest = len(self._in_place(group, hashes[:longest]))
        for count in range(longest, 0, -1):
            tables = [self._find(group, hashes[:count]) for group in range(len(self._windows))]
            whole = [table for table in tables if table is not None]
            if len(whole) == len(tables):
                return whole
        return [[] for _ in self._windows]

    def _in_place(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        return self.pool.find_prefix(_name(block_hash, group) for block_hash in hashes)

    def _find(self, group: int, hashes: Sequence[bytes]) -> list[int] | None:
        first = self._first_kept(self._windows[group], len(hashes) * self._size)
        found = self._in_place(group, hashes[first:])
        return [NULL_BLOCK] * first + found if first + len(found) == len(hashes) else None

    def share(self, tables: Tables) -> None:
        """Take a reference on all their blocks."""
        for table in tables:
            self.pool.share(self._real(table))

    def missing(self, tables: Tables, blocks: int, computed: int) -> int:
        """Paged blocks that tables need to reach `blocks` each, with `computed` tokens computed."""
        return sum(
            max(0, blocks - max(len(table), self._first_new(window, blocks, computed)))
            for table, window in zip(tables, self._windows, strict=True)
        )

    def grow(self, tables: Tables, fresh: Sequence[int], blocks: int, computed: int) -> Tables:
        """Put the missing paged blocks in; returns the blocks added to each table."""
        left = iter(fresh)
        added: Tables = []
        for table, window in zip(tables, self._windows, strict=True):
            first = self._first_new(window, blocks, computed)
            added.append(
                [NULL_BLOCK if i < first else next(left) for i in range(len(table), blocks)]
            )
            table += added[-1]
        return added

    def drop_behind(self, tables: Tables, computed: int) -> None:
        """Give back blocks that no window reaches once `computed` tokens are computed."""
        for table, window in zip(tables, self._windows, strict=True):
            kept = self._first_kept(window, computed)
            self.pool.release(self._real(table[:kept]))
            table[:kept] = [NULL_BLOCK] * kept

    def know(self, tables: Tables, hashes: Sequence[bytes], computed: int) -> None:
        """Note which prefixes the tables' full blocks hold."""
        full = min(computed // self._size, len(hashes))
        ends_a_block = full * self._size == computed
        for group, (table, window) in enumerate(zip(tables, self._windows, strict=True)):
            first = full - ends_a_block if window == STATE else 0
            for block, block_hash in zip(table[first:full], hashes[first:full], strict=True):
                if self._is_real(block):
                    self.pool.know(block, _name(block_hash, group))

    def release(self, tables: Tables) -> None:
        """Give all their blocks back."""
        for table in tables:
            self.pool.release(self._real(table))
            table.clear()
