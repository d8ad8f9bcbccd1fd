"""Stores to try an engine with: the simplest, in memory, and a tier over any that exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import PrivateAttr

from spec.offloading import StoreContext, StoreSpec
from tiers.store import Block, TierStore


class MemoryStore:
    """Keeps copies of payloads in a dict, `blocks`, as long as the object lives. Has a LocalIndex.

    A payload of another length than the caller's is a miss.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    peek = has

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.blocks.update((block.key, bytes(block.payload)) for block in blocks)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [self._copy_to(block) for block in blocks]

    def _copy_to(self, block: Block) -> bool:
        kept = self.blocks.get(block.key)
        if kept is None or len(kept) != len(block.payload):
            return False
        block.payload[:] = kept
        return True

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def close(self) -> None:
        """Keep everything: the other half of an engine may use the same store."""


class GivenSpec(StoreSpec):
    """A tier over a store that exists already: `GivenSpec(type="given").over(store)`.

    Both halves of an engine, and every worker in this process, open that same object.
    """

    _store: TierStore = PrivateAttr(default_factory=MemoryStore)

    def over(self, store: TierStore) -> Self:
        self._store = store
        return self

    def scratch(self, folder: Path) -> Self:
        """As it is: nobody else has the object."""
        return self

    def open(self, site: StoreContext) -> TierStore:
        return self._store
