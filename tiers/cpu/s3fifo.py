"""S3FifoResidency: blocks that are not used again soon go soon."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.cpu.ghost_list import GhostList
from tiers.cpu.residency import SlotResidency
from tiers.host.slots import Slots

SMALL, MAIN = 1, 2
SMALL_SHARE = 0.5
"""Of the slots, for blocks on probation. A tenth, as published, is for objects that come back
soon or never; the next turn of a conversation comes late (see decision 12)."""
MOST_USES = 3
"""Uses that are counted: how often a block is passed by, at most, before it goes."""


class S3FifoResidency(SlotResidency):
    """Two queues in order of arrival: blocks on probation, and those that were used during it.

    A use is only counted, so that it costs next to nothing. Keys that went during probation are
    remembered, as many as there are slots: they come back without one. After Yang and others,
    "FIFO queues are all you need for cache eviction", SOSP 2023.
    """

    def __init__(self, pool: Slots, max_slots: int) -> None:
        super().__init__(pool, max_slots, queues=2)
        self._uses = bytearray(pool.num_slots)
        self._gone = GhostList(max_slots)
        self._small_slots = max(1, int(max_slots * SMALL_SHARE))

    def _used(self, slots: Sequence[int]) -> None:
        uses = self._uses
        for slot in slots:
            if uses[slot] < MOST_USES:
                uses[slot] += 1
            if self._queues.where[slot] > MAIN:
                self._queues.move(slot, MAIN)

    def _enter(self, key: bytes, slot: int, head: int | None) -> None:
        self._uses[slot] = 0
        queue = MAIN if self._gone.take(key) else SMALL
        # A head that was used will be passed by: it needs none to go before it.
        if head is not None and self._queues.where[head] == queue and not self._uses[head]:
            self._queues.insert(slot, head)
        else:
            self._queues.append(slot, queue)

    def _next(self) -> int:
        # It ends: every turn takes a use away, or a block out of probation.
        while True:
            small, main = self._queues.length(SMALL), self._queues.length(MAIN)
            queue = SMALL if small > self._small_slots or not main else MAIN
            slot = self._queues.first(queue)
            if not self._uses[slot]:
                return slot
            self._uses[slot] = 0 if queue == SMALL else self._uses[slot] - 1
            self._queues.move(slot, MAIN)

    def _evicted(self, key: bytes, queue: int) -> None:
        if queue == SMALL:
            self._gone.add(key)
