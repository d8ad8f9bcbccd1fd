"""RankParts: what a store has of blocks of which each rank stores a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import and_

from tiers.contract.generation import Generation, space_of
from tiers.store import LocalIndex, TierStore


class RankParts:
    """The names of blocks in a store, one for each rank, and which blocks are held of all ranks.

    `namespaces`: one per rank, or one of ranks that have the same part of a block.
    """

    def __init__(
        self, store: TierStore, namespaces: Sequence[bytes], generation: Generation
    ) -> None:
        self._store = store
        self._namespaces = namespaces
        self._generation = generation

    def __len__(self) -> int:
        """Names of a block."""
        return len(self._namespaces)

    def _spaces(self) -> list[bytes]:
        return self._spaces_of(self._generation.tag)

    def _spaces_of(self, tag: bytes) -> list[bytes]:
        return [space_of(namespace, tag) for namespace in self._namespaces]

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """All names of blocks, block by block."""
        # A block's rank parts lie together: a store that evicts one of them loses the block.
        spaces = self._spaces()
        return [space + key for key in keys for space in spaces]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the store which blocks it holds; on the caller's thread."""
        return _everywhere(self._store.has, self._spaces(), keys)

    def has_of_either(self, keys: Sequence[bytes]) -> list[bool]:
        """The same of keys that are all of this generation, or all of none."""
        tag = self._generation.tag  # once: a reset may come at any time, on another thread
        is_own = bool(keys) and keys[0].endswith(tag)
        return _everywhere(self._store.has, self._spaces_of(tag if is_own else b""), keys)

    def peek(self, index: LocalIndex, keys: Sequence[bytes]) -> list[bool]:
        """Look up in the store's index which blocks it holds. What it lacks of the first rank is
        not asked of the others: a prompt that is not there costs the same however many there are.
        """
        first, *others = self._spaces()
        held = index.peek([first + key for key in keys])
        if others and (some := list(compress(keys, held))):
            of_others = iter(_everywhere(index.peek, others, some))
            held = [has and next(of_others) for has in held]
        return held


def _everywhere(
    has: Callable[[Sequence[bytes]], list[bool]], spaces: Sequence[bytes], keys: Sequence[bytes]
) -> list[bool]:
    """Which keys are held in all these spaces, asked in one call: behind a network each costs a
    round trip."""
    found = has([space + key for space in spaces for key in keys])
    held = found[: len(keys)]
    for start in range(len(keys), len(found), len(keys) or 1):
        held = list(map(and_, held, found[start : start + len(keys)]))
    return held
