"""Retaining: how a tier passes blocks by in eviction. Used by the scheduler's thread alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiers.connector.scheduler.managers.store_uses import StoreUses
from tiers.host.slots import Residency, SlotPool

LAPS = 8
"""How often blocks that are retained count as used again while a store's whole capacity is stored:
so a store that evicts what was used longest ago has seven eighths of it to give before them."""


class Retaining:
    """Of a tier that can't: it retains nothing."""

    def held(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that the tier has and can retain."""
        return []

    def retain(self, keys: Sequence[bytes]) -> None:
        """Pass these blocks by in eviction until `release`; they may be retained already."""

    def release(self, keys: Sequence[bytes]) -> None:
        """Let these be evicted again; those that are not retained are ignored."""

    def stored(self, blocks: int, max_blocks: int) -> None:
        """So many `blocks` were stored, of `max_blocks` that the tier has room for."""


class HeldSlots(Retaining):
    """Of a host tier: a retained block has a reference on its slot, as one that is loaded."""

    def __init__(self, residency: Residency, pool: SlotPool) -> None:
        self._residency = residency
        self._pool = pool
        self._slots: dict[bytes, int] = {}

    def held(self, keys: Sequence[bytes]) -> list[bytes]:
        slots = self._residency.find_all(keys)
        return [key for key, slot in zip(keys, slots, strict=True) if slot is not None]

    def retain(self, keys: Sequence[bytes]) -> None:
        for key, slot in zip(keys, self._residency.find_all(keys), strict=True):
            if slot is not None and key not in self._slots:
                self._pool.retain(slot)
                self._slots[key] = slot

    def release(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._pool.release(slot)

    def release_all(self) -> None:
        """Retain nothing any more."""
        self.release([*self._slots])


class TouchPins(Retaining):
    """Of a store: retained blocks count as used again and again."""

    def __init__(self, uses: StoreUses, held: Callable[[Sequence[bytes]], list[bytes]]) -> None:
        """`held`: says at once which blocks the store has; none if it can't."""
        self._uses = uses
        self._held = held
        self._retained: dict[bytes, None] = {}
        self._lap: list[bytes] = []
        self._due = 0.0

    def held(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._held(keys) if self._uses.touch is not None else []

    def retain(self, keys: Sequence[bytes]) -> None:
        self._retained |= dict.fromkeys(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._retained.pop(key, None)

    def stored(self, blocks: int, max_blocks: int) -> None:
        """Count the next of those retained as used, as many as are due."""
        if not self._retained:
            return
        self._due += blocks * LAPS * len(self._retained) / max_blocks
        keys: list[bytes] = []
        while self._due >= 1:
            if not self._lap:
                self._lap = [*self._retained]
            key = self._lap.pop()  # a prefix's tail first
            if key in self._retained:
                keys.append(key)
            self._due -= 1
        self._uses.note(keys[::-1], at_once=True)
