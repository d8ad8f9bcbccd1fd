"""ArcResidency: divides the slots between blocks used once and blocks used again, adaptively."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.cpu.ghost_list import GhostList
from tiers.cpu.residency import SlotResidency
from tiers.host.slots import Slots

ONCE, AGAIN = 1, 2


class ArcResidency(SlotResidency):
    """Two queues by recency, of blocks used once and of those used since they came.

    Of each as many keys that have gone are remembered as there are slots. One of them that comes
    back says that its queue was too short, and the share of the slots that it may have moves.
    After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003,
    where fewer keys are remembered of a queue that is long.
    """

    def __init__(self, pool: Slots, max_slots: int) -> None:
        super().__init__(pool, max_slots, queues=2)
        self._gone = {ONCE: GhostList(max_slots), AGAIN: GhostList(max_slots)}
        self._share = 0.0
        """Slots that blocks used once may have before they are the next to go."""

    def _used(self, slots: Sequence[int]) -> None:
        self._queues.move_all(slots, AGAIN)

    def _enter(self, key: bytes, slot: int, head: int | None) -> None:
        once, again = (max(1, len(gone)) for gone in self._gone.values())
        queue = AGAIN
        if self._gone[ONCE].take(key):
            self._share = min(self._max_slots, self._share + max(1.0, again / once))
        elif self._gone[AGAIN].take(key):
            self._share = max(0.0, self._share - max(1.0, once / again))
        else:
            queue = ONCE
        if head is not None and self._queues.where[head] == queue:
            self._queues.insert(slot, head)
        else:
            self._queues.append(slot, queue)

    def _next(self) -> int:
        once, again = self._queues.length(ONCE), self._queues.length(AGAIN)
        return self._queues.first(ONCE if once and (once > self._share or not again) else AGAIN)

    def _evicted(self, key: bytes, queue: int) -> None:
        self._gone[queue].add(key)
