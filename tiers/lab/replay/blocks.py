"""The replay engine's paged KV: which blocks are free, shared, or still hold a known prefix."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


def chain_hash(parent: bytes, tokens: Sequence[int], salt: str) -> bytes:
    """A block's hash: of its tokens, all tokens before them, and a salt."""
    text = parent + repr((tuple(tokens), salt)).encode()
    return hashlib.sha256(text).digest()


class BlockPool:
    """Reference-counted blocks; a free block keeps its prefix until it is taken again (LRU)."""

    def __init__(self, num_blocks: int, prefix_caching: bool) -> None:
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
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
        if self.caches_prefixes and self._hashes[block] is None and block_hash not in self._cached:
            self._hashes[block] = block_hash
            self._cached[block_hash] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back. As in vLLM's `free_blocks`, a prefix's last blocks are taken again
        before its first, and blocks without a known prefix before all others."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)


Tables = list[list[int]]
"""A request's blocks, one table per KV cache group."""


class BlockTables:
    """Block tables over one pool, of a model with one KV cache group, which attends to all tokens.
    With windows, which blocks are needed would hang on the tokens `computed` before."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self.pool = pool
        self.block_tokens = block_tokens

    def find_prefix(self, hashes: Sequence[bytes]) -> Tables:
        """The longest prefix that is still in place."""
        return [self.pool.find_prefix(hashes)]

    def share(self, tables: Tables) -> None:
        """Take a reference on all their blocks."""
        self.pool.share(tables[0])

    def missing(self, tables: Tables, blocks: int, computed: int) -> int:
        """Paged blocks that tables need to reach `blocks` each, with `computed` tokens computed."""
        return max(0, blocks - len(tables[0]))

    def grow(self, tables: Tables, fresh: Sequence[int], blocks: int, computed: int) -> Tables:
        """Put the missing paged blocks in; returns the blocks added to each table."""
        tables[0] += fresh
        return [list(fresh)]

    def know(self, tables: Tables, hashes: Sequence[bytes], computed: int) -> None:
        for block, block_hash in zip(
            tables[0][: computed // self.block_tokens], hashes, strict=False
        ):
            self.pool.know(block, block_hash)

    def release(self, tables: Tables) -> None:
        for table in tables:
            self.pool.release(table)
            table.clear()
