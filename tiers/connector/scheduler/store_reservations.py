"""StoreReservations: the slots and paged blocks that stores under way use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiers.connector.contract.messages import StoreItem, StoreJob
from tiers.connector.scheduler.admission import Admission
from tiers.connector.scheduler.manager import TierManager
from tiers.host.slots import SlotPool

FOR_ROOM = ("store_dropped_inflight", "store_dropped_no_slot")
"""Why a block is refused that is offered again."""


class Claimed(NamedTuple):
    """What came of some offers, by their place among them: those that are stored, and of the others
    that the tier wants, the name of the counter that says why it does not get them."""

    items: dict[int, StoreItem]
    refused: dict[int, str]


class StoreReservations:
    """What the stores under way of one tier hold. Used by the scheduler's thread alone.

    `block_bytes`: of a block, over all ranks; 0 before that is known.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.pool = SlotPool(0)
        self.block_bytes = 0
        self.slots_pinned = 0
        self._keys: set[bytes] = set()
        self._reading: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def claim(self, manager: TierManager, offers: Sequence[tuple[bytes, int]]) -> Claimed:
        """Slots for those offers, (key, paged block), that the tier wants and its rules admit."""
        wanted = manager.wants([key for key, _ in offers])
        items: dict[int, StoreItem] = {}
        refused: dict[int, str] = {}
        for place, ((key, paged), want) in enumerate(zip(offers, wanted, strict=True)):
            if not want or key in self._keys:
                continue
            reason = self.admission.refuses(key, self.block_bytes)
            if reason is None and self.room(manager) <= 0:
                reason = "store_dropped_inflight"
            claim = self.pool.claim(key) if reason is None else None
            if claim is None:
                refused[place] = reason or "store_dropped_no_slot"
                continue
            self.admission.stores(key, self.block_bytes)
            self.slots_pinned += 1
            self._keys.add(key)
            items[place] = StoreItem(key, claim.slot, paged if claim.fresh else None)
        return Claimed(items, refused)

    def room(self, manager: TierManager) -> int:
        """How many blocks more may be on their way into the tier, as far as that decides."""
        if manager.completes_on_gather:
            return self.pool.num_slots
        # A tier that lags behind may not hold all slots, or it would starve the others.
        most = max(1, int(self.pool.num_slots * self.admission.share))
        if self.admission.max_inflight is not None and self.block_bytes:
            most = min(most, max(1, self.admission.max_inflight // self.block_bytes))
        return most - self.slots_pinned

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
