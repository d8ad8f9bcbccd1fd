"""ArcResidency: divides the slots between blocks used once and blocks used again, adaptively."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.cpu.residency import SlotResidency
from tiers.host.arc_queues import AGAIN, ONCE, Arc
from tiers.host.slots import Slots


class ArcResidency(SlotResidency):
    """Two queues by recency, of blocks used once and of those used since they were stored."""

    def __init__(self, pool: Slots, max_slots: int) -> None:
        super().__init__(pool, max_slots, queues=2)
        self._arc: Arc[bytes] = Arc(max_slots)

    def _used(self, slots: Sequence[int]) -> None:
        self._queues.move_all(slots, AGAIN)

    def _enter(self, key: bytes, slot: int, head: int | None) -> None:
        queue = AGAIN if self._arc.enter(key) else ONCE
        if head is not None and self._queues.where[head] == queue:
            self._queues.insert(slot, head)
        else:
            self._queues.append(slot, queue)

    def _next(self) -> int:
        queues = self._queues
        return queues.first(self._arc.next(queues.length(ONCE), queues.length(AGAIN)))

    def _evicted(self, key: bytes, queue: int) -> None:
        self._arc.evicted(queue, key)
