"""LruResidency: the host pool keeps the blocks that were used last."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.cpu.residency import SlotResidency
from tiers.host.slots import Slots

ALL = 1


class LruResidency(SlotResidency):
    """The least recently used block goes first."""

    def __init__(self, pool: Slots, max_slots: int) -> None:
        super().__init__(pool, max_slots, queues=1)

    def _used(self, slots: Sequence[int]) -> None:
        self._queues.move_all(slots, ALL)

    def _enter(self, key: bytes, slot: int, head: int | None) -> None:
        if head is None:
            self._queues.append(slot, ALL)
        else:
            self._queues.insert(slot, head)

    def _next(self) -> int:
        return self._queues.first(ALL)
