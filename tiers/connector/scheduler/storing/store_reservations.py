"""StoreReservations: the slots and paged blocks that stores under way use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.storing.admission import Admission
from tiers.connector.scheduler.storing.offers import Offers
from tiers.contract.messages import StoreItem, StoreJob

FOR_ROOM = ("store_dropped_inflight", "store_dropped_no_slot")
"""Why a block is refused that is offered again."""

NOT_YET = "store_deferred"
"""Why a block is refused that the tier should not have so far: one of those behind it may be asked
for as often as it takes."""


class Claimed(NamedTuple):
    """What came of some offers, by the number of each. `items`: what is stored. `refused`: what the
    tier lacks and does not get, and the counter that says why."""

    items: dict[int, StoreItem]
    refused: dict[int, str]


class StoreReservations:
    """What the stores under way of one tier hold. Used by the scheduler's thread alone."""

    def __init__(self, context: TierContext, admission: Admission) -> None:
        self.slots_pinned = 0
        self._context = context
        self._admission = admission
        self._keys: set[bytes] = set()
        self._reading: dict[int, int] = {}

    def claim(self, offers: Offers, lacking: Sequence[bool], behind: str | None = None) -> Claimed:
        """Take slots for those offers of a request that the tier is `lacking` and its rules admit.

        What is behind a block that the tier should have and does not get is refused for the same
        reason, since it could not be loaded. `behind`: that reason, where there is such a block
        before these.
        """
        tier = self._context.open
        items: dict[int, StoreItem] = {}
        refused: dict[int, str] = {}
        if not any(lacking):  # as of most prompts that come again
            return Claimed(items, refused)
        for number, key, paged, lacks in zip(*offers, lacking, strict=True):
            if not lacks or key in self._keys:
                continue
            reason = behind or self._refusal(key)
            claim = tier.pool.claim(key) if reason is None else None
            if claim is None:
                refused[number] = reason = reason or "store_dropped_no_slot"
                behind = None if reason == NOT_YET else reason
                continue
            self._admission.stores(key, tier.block_bytes)
            self.slots_pinned += 1
            self._keys.add(key)
            items[number] = StoreItem(key, claim.slot, paged if claim.fresh else None)
        return Claimed(items, refused)

    def _refusal(self, key: bytes) -> str | None:
        if not self._context.health.writes:
            return "store_dropped_down"
        reason = self._admission.refuses(key, self._context.open.block_bytes)
        if reason is None and self.room() <= 0:
            return "store_dropped_inflight"
        return reason

    def room(self) -> int:
        """How many blocks more may be on their way into the tier, as far as that decides."""
        tier = self._context.open
        if tier.manager.completes_on_gather:
            return tier.pool.num_slots
        most = self._admission.most_inflight(tier.block_bytes, tier.pool.num_slots)
        return most - self.slots_pinned

    def begin(self, jobs: Iterable[StoreJob]) -> None:
        """Note that these jobs go to the workers, which read the paged blocks."""
        for job in jobs:
            for item in job.items:
                if item.source is not None:
                    self._reading[item.source] = job.job_id

    def readers(self, blocks: set[int]) -> list[int]:
        """Jobs that may still read any of these paged blocks."""
        return sorted({self._reading[block] for block in blocks & self._reading.keys()})

    def end(self, job_id: int, item: StoreItem) -> None:
        """Give the slot and the paged block of an item back."""
        self._keys.discard(item.key)
        self._context.open.pool.release(item.slot)
        self.slots_pinned -= 1
        if item.source is not None and self._reading.get(item.source) == job_id:
            del self._reading[item.source]
