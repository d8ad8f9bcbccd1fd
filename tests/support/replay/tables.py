"""Block tables of several KV cache groups: of windows, and of the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.contract.protocols import NULL_BLOCK
from tiers.lab.replay.blocks import BlockPool, BlockTables, Tables

STATE = 0
"""In place of a window: the group's blocks hold states of a recurrent layer. Of a prefix only the
block of its last token is kept, with the state after all tokens up to it."""


def has_null(windows: Sequence[int | None]) -> bool:
    """Whether paged block 0 only stands for blocks that are not kept."""
    return any(window is not None for window in windows)


def _name(block_hash: bytes, group: int) -> bytes:
    return block_hash + bytes([group])


class CachePool(BlockPool):
    """Blocks of which one alone stands for those that are not kept, where there are such."""

    def __init__(self, num_blocks: int, prefix_caching: bool, has_null: bool) -> None:
        super().__init__(num_blocks, prefix_caching)
        if has_null:
            assert self.take(1) == [NULL_BLOCK]

    def forget_all(self) -> None:
        """No block holds a known prefix any more."""
        self.forget(range(len(self._hashes)))


class WindowTables(BlockTables):
    """Block tables over one pool: a group with a window (in tokens) keeps only blocks that it
    reaches, one of STATE the last state."""

    def __init__(self, pool: BlockPool, block_tokens: int, windows: Sequence[int | None]) -> None:
        super().__init__(pool, block_tokens)
        self._windows = windows
        self._has_null = has_null(windows)

    def _is_real(self, block: int) -> bool:
        return block != NULL_BLOCK or not self._has_null

    def _real(self, table: Sequence[int]) -> list[int]:
        return [block for block in table if self._is_real(block)]

    def _first_kept(self, window: int | None, computed: int) -> int:
        if window == STATE:
            return max(0, computed - 1) // self.block_tokens
        return 0 if window is None else max(0, computed - window + 1) // self.block_tokens

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
        first = self._first_kept(self._windows[group], len(hashes) * self.block_tokens)
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
        full = min(computed // self.block_tokens, len(hashes))
        ends_a_block = full * self.block_tokens == computed
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
