"""Which blocks a step offers to a tier, and the slots and paged blocks that its stores use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from tiers.connector.policy.request_state import RequestState, RequestTable, Scheduled
from tiers.connector.scheduler.admission.admission import Admission
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.tier_request import TierRequest
from tiers.contract.messages import StoreItem, StoreJob
from tiers.contract.protocols import NULL_BLOCK


class Offers(NamedTuple):
    """Parts of a request's blocks to store: of each its number among the request's keys, its key
    and its paged block. In columns: 8,192 new tuples would call Python's garbage collector."""

    numbers: Sequence[int]
    keys: Sequence[bytes]
    paged: Sequence[int]

    def without(self, overwritten: set[int]) -> Offers:
        """Those that are in none of these paged blocks."""
        safe = [place for place, block in enumerate(self.paged) if block not in overwritten]
        return Offers(
            [self.numbers[i] for i in safe],
            [self.keys[i] for i in safe],
            [self.paged[i] for i in safe],
        )


NOTHING = Offers((), (), ())


def new_offers(requests: RequestTable, tier_request: TierRequest, scheduled: Scheduled) -> Offers:
    """All parts of the blocks that are complete and were not offered yet."""
    request_state, before, last = scheduled.state, scheduled.before, scheduled.complete
    first = tier_request.offered
    if last <= first:  # most steps of an answer complete no block
        return NOTHING
    keys = requests.keys(request_state)
    if not request_state.shared:
        return NOTHING
    tier_request.offered = last
    if requests.groups.is_plain:
        (table,) = request_state.tables
        return Offers(range(first, last), keys[first:last], table[first:last])
    size = len(requests.groups)
    offers = _kept(requests, request_state, range(first * size, last * size), before)
    left = [one for one in scheduled.states if first * size <= one[0] < last * size]
    if not left:
        return offers
    of_states = [(number, keys[number], paged) for number, paged in left]
    return Offers(*zip(*sorted([*zip(*offers, strict=True), *of_states]), strict=True))


def offers_again(
    requests: RequestTable, tier_request: TierRequest, scheduled: Scheduled, most: int
) -> Offers:
    """At most so many of the parts that had no room; what is still refused must be noted again.

    Its request runs in this step, so that these blocks are its own.
    """
    last = scheduled.complete * len(requests.groups)
    # After a preemption it may not have got as far again.
    taken = [number for number in islice(tier_request.refused, most) if number < last]
    offers = _kept(requests, tier_request.state, taken, scheduled.before)
    for number in set(taken) - set(offers.numbers):
        del tier_request.refused[number]  # the engine has given it away
    return offers


def _kept(
    requests: RequestTable, request_state: RequestState, numbers: Iterable[int], before: int
) -> Offers:
    """Those of these parts that the engine has not given away."""
    groups = requests.groups
    kept_numbers: list[int] = []
    places: list[int] = []
    at, paged, kept = -1, [NULL_BLOCK], [False]
    for number in numbers:
        block, part = divmod(number, len(groups))
        if block != at:
            # Its block table as we know it still names what the engine has given away since.
            at, kept = block, groups.kept(block, before)
            paged = groups.paged(request_state.tables, block)
        if kept[part] and (paged[part] != NULL_BLOCK or not groups.window):
            kept_numbers.append(number)
            places.append(paged[part])
    return Offers(kept_numbers, [request_state.keys[number] for number in kept_numbers], places)


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
    """What the stores in flight of one tier hold. Used by the scheduler's thread alone."""

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
