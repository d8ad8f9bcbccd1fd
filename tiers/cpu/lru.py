"""LruResidency: the host pool keeps the blocks that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiers.pool import SlotPool


class LruResidency:
    """Which blocks stay in the pool, in order of use; the least recently used goes first.

    Used by the scheduler's thread alone. Every resident block holds one reference on its slot; a
    block whose slot has any other is being copied and is never evicted.
    """

    SCAN = 128
    """Blocks looked at for one eviction, so that a pool in which all are in use costs little."""

    def __init__(self, pool: SlotPool, max_slots: int) -> None:
        self.on_evict: Callable[[bytes], None] | None = None
        self._pool = pool
        self._max_slots = max_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        pool.add_evictor(self.evict_one)

    def find(self, key: bytes) -> int | None:
        """The slot of a resident block, or None; no use of the block."""
        return self._slots.get(key)

    def admit(self, key: bytes, slot: int) -> None:
        """Keep the block in `slot` as the one used last; not when it is kept already, nor when
        the tier is full and all its blocks are in use."""
        if key in self._slots or (len(self) >= self._max_slots and not self.evict_one()):
            return
        self._pool.retain(slot)
        self._slots[key] = slot

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these blocks as used now, the first of them most: the head of a prefix must
        outlive its tail, which is of no use without it."""
        for key in reversed(keys):
            if key in self._slots:
                self._slots.move_to_end(key)

    def discard(self, key: bytes) -> None:
        """Stop keeping this block; unknown keys are ignored."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._pool.release(slot)

    def clear(self) -> list[bytes]:
        """Stop keeping any block; the slot of one that is being copied goes with its last user."""
        keys = list(self._slots)
        for key in keys:
            self.discard(key)
        return keys

    def evict_one(self) -> bool:
        """Give up the least recently used block that nothing is copying; False: found none.

        Blocks in use that are passed by count as used now, so that the next call looks further.
        """
        for _ in range(min(self.SCAN, len(self._slots))):
            key, slot = next(iter(self._slots.items()))
            if self._pool.references(slot) == 1:
                self.discard(key)
                if self.on_evict is not None:
                    self.on_evict(key)
                return True
            self._slots.move_to_end(key)
        return False

    def __len__(self) -> int:
        return len(self._slots)
