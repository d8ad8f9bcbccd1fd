"""Storing: the slots of blocks on their way into a tier, and the paged blocks still read for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiers.connector.base import StoreItem, StoreJob
from tiers.connector.manager import TierManager
from tiers.pool import SlotPool


class Storing:
    """What the stores under way of one tier hold. Used by the scheduler's thread alone."""

    def __init__(self) -> None:
        self.pool = SlotPool(0)
        self.slots_pinned = 0
        self._keys: set[bytes] = set()
        self._reading: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def claim(
        self, manager: TierManager, offers: Sequence[tuple[bytes, int]]
    ) -> tuple[list[StoreItem], int]:
        """Slots for those offers, (key, paged block), that the tier wants; and how many wanted
        ones are dropped, since there is no slot for them."""
        wanted = manager.wants([key for key, _ in offers])
        items: list[StoreItem] = []
        dropped = 0
        for (key, paged), want in zip(offers, wanted, strict=True):
            if not want or key in self._keys:
                continue
            claim = None if self._lags(manager) else self.pool.claim(key)
            if claim is None:
                dropped += 1
                continue
            self.slots_pinned += 1
            self._keys.add(key)
            items.append(StoreItem(key, claim.slot, paged if claim.fresh else None))
        return items, dropped

    def _lags(self, manager: TierManager) -> bool:
        # A tier that lags behind may not hold all slots, or it would starve the others.
        half = max(1, self.pool.num_slots // 2)
        return self.slots_pinned >= half and not manager.completes_on_gather

    def begin(self, jobs: Iterable[StoreJob]) -> None:
        """These jobs are on their way to the workers, which read the paged blocks."""
        for job in jobs:
            for item in job.items:
                if item.source is not None:
                    self._reading[item.source] = job.job_id

    def readers(self, blocks: set[int]) -> list[int]:
        """Jobs that may still read any of these paged blocks."""
        return sorted({self._reading[block] for block in blocks & self._reading.keys()})

    def end(self, job_id: int, item: StoreItem) -> None:
        """Give an item's slot and paged block back."""
        self._keys.discard(item.key)
        self.pool.release(item.slot)
        self.slots_pinned -= 1
        if item.source is not None and self._reading.get(item.source) == job_id:
            del self._reading[item.source]
