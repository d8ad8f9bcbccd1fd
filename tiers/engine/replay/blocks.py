"""The replay engine's paged KV: which blocks are free, shared, or still hold a known prefix."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence


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
        self._prefix_caching = prefix_caching

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix that is still in place."""
        found = []
        for block_hash in hashes:
            if block_hash not in self._cached:
                break
            found.append(self._cached[block_hash])
        return found

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
        for block in taken:
            self._forget(block)
            self._refs[block] = 1
        return taken

    def _forget(self, block: int) -> None:
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None and self._cached.get(block_hash) == block:
            del self._cached[block_hash]

    def know(self, block: int, block_hash: bytes) -> None:
        """Note which prefix a computed or loaded block holds."""
        if self._prefix_caching and self._hashes[block] is None and block_hash not in self._cached:
            self._hashes[block] = block_hash
            self._cached[block_hash] = block

    def forget_all(self) -> None:
        """No block holds a known prefix any more."""
        for block in range(len(self._hashes)):
            self._forget(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back; the tail of a prefix is taken again before its head."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
