"""SlotOrders: the transfers of slots that workers were told to make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tiers.connector.hosted.shared_slots import SlotRegion
from tiers.host.slots import SlotPool


class SlotOrders:
    """Counts ordered transfers by slot; each holds a reference on its slot until it has ended.

    The engine tells when that is, except after a reset: then the marks in all `regions` tell it.
    """

    def __init__(self, pool: SlotPool, regions: Sequence[SlotRegion]) -> None:
        self._pool = pool
        self._regions = regions
        self._ordered = [0] * pool.num_slots
        self._under_way: Counter[int] = Counter()
        self._forgotten: list[int] = []

    def begin(self, slot: int) -> None:
        """Order a transfer of `slot`; takes over a reference of the caller's."""
        self._ordered[slot] += 1
        self._under_way[slot] += 1

    def end(self, slot: int) -> None:
        """Note that a transfer of `slot` has ended on all ranks, and release the slot."""
        self._under_way[slot] -= 1
        self._pool.release(slot)

    def forget(self) -> None:
        """Expect no `end` for the transfers under way: the engine has forgotten them."""
        self._forgotten += self._under_way.elements()
        self._under_way.clear()

    def release_ended(self) -> None:
        """Release the slots of forgotten transfers that all workers have ended."""
        self._forgotten = [slot for slot in self._forgotten if not self._release(slot)]

    def _release(self, slot: int) -> bool:
        if any(region.ended(slot) < self._ordered[slot] for region in self._regions):
            return False
        self._pool.release(slot)
        return True
