"""TierStores: which blocks of a step a tier stores, and what its stores in flight hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tiers.connector.policy.request_state import EngineStep, RequestState, RequestTable, Scheduled
from tiers.connector.scheduler.admission import Admission, tenant_of
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.jobs import PendingStore
from tiers.connector.scheduler.tier_hints import TierHints
from tiers.connector.scheduler.tier_request import TierRequest
from tiers.contract.messages import StoreItem, StoreJob
from tiers.contract.protocols import NULL_BLOCK
from tiers.store import batch_blocks

RETRIES = 256
"""Blocks, of all requests, that a step offers again at most: half a millisecond's work."""


class TierStores:
    """The storing half of one tier's scheduler; used by the scheduler's thread alone."""

    def __init__(self, context: TierContext, admission: Admission, hints: TierHints) -> None:
        self._hints = hints
        self.reservations = StoreReservations(context, admission)
        self._context = context
        self._acceptance = admission.acceptance
        self._rate = admission.rate
        self._retries = RETRIES
        self._last_offers: list[tuple[TierRequest, Offers]] = []

    # -- offering ----------------------------------------------------------------------------

    def orders(self, step: EngineStep) -> tuple[list[StoreJob], list[int]]:
        """The stores that a step begins, and the jobs whose blocks it overwrites."""
        self._retries = RETRIES
        self._acceptance.look()
        self._hints.step()
        new = [self._new(one) for one in step.scheduled]
        lacking = self._lacking([offers for _, _, offers in new])
        jobs = [job for one in new if (job := self._offer(*one, lacking)) is not None]
        jobs += self._offer_last(step.overwritten)
        flush = self.reservations.readers(step.overwritten)
        self.reservations.begin(jobs)
        return jobs, flush

    def _may_store(self, tier_request: TierRequest) -> bool:
        if not self._context.health.usable or not tier_request.state.stores:
            return False
        return self._context.tenants.may_keep(tenant_of(tier_request.state.request))

    def _new(self, scheduled: Scheduled) -> tuple[Scheduled, TierRequest, Offers]:
        """What the step completes of a request: full blocks of known tokens."""
        tier_request, requests = self._context.tier_request(scheduled.state), self._context.requests
        if scheduled.is_new and not self._context.promote:
            tier_request.offered = scheduled.before // requests.engine.block_tokens
        if scheduled.complete <= tier_request.offered or not self._may_store(tier_request):
            return scheduled, tier_request, NOTHING  # in most steps of an answer
        return scheduled, tier_request, new_offers(requests, tier_request, scheduled)

    def _lacking(self, offers: Sequence[Offers]) -> Iterator[bool]:
        """Which of these the tier lacks, one after the other. It is asked once for all requests,
        and nothing where no block is complete, as in most steps of an answer."""
        keys = [key for one in offers for key in one.keys]
        return iter(self._context.open.manager.touch_and_list_missing(keys) if keys else ())

    def _offer(
        self,
        scheduled: Scheduled,
        tier_request: TierRequest,
        offers: Offers,
        lacking: Iterator[bool],
    ) -> StoreJob | None:
        """Store what the tier lacks of these, the next in `lacking`, or of those before them."""
        again = (
            self._offer_again(tier_request, scheduled)
            if tier_request.refused and self._may_store(tier_request)
            else {}
        )
        return self._begin(tier_request, again | self._offer_new(tier_request, offers, lacking))

    def _offer_new(
        self, tier_request: TierRequest, offers: Offers, lacking: Iterator[bool]
    ) -> dict[int, StoreItem]:
        """Offer blocks for the first time. Those that find no room wait for a later step."""
        if not offers.keys:
            return {}
        lacks = [*islice(lacking, len(offers.keys))]
        items, refused = self.reservations.claim(offers, lacks, tier_request.behind)
        if items or refused:
            self._acceptance.offered(len(items), Counter(refused.values()) if refused else {})
        if refused:
            tier_request.refused |= {
                number: why for number, why in refused.items() if why in FOR_ROOM
            }
            self._give_up(tier_request, [why for why in refused.values() if why not in FOR_ROOM])
        return items

    def _give_up(self, tier_request: TierRequest, reasons: Sequence[str]) -> None:
        """Count blocks that are not stored; and none behind them is, but for those deferred."""
        self._context.count(**Counter(reasons))
        tier_request.cut = tier_request.cut or next(
            (why for why in reasons if why != NOT_YET), None
        )

    def _offer_again(self, tier_request: TierRequest, scheduled: Scheduled) -> dict[int, StoreItem]:
        """Offer what had no room before, head first, while the request runs and has the blocks."""
        waiting = tier_request.refused
        most = min(self._retries, self.reservations.room())
        if most <= 0:
            return {}
        offers = offers_again(self._context.requests, tier_request, scheduled, most)
        self._retries -= len(offers.keys)
        items, refused = self.reservations.claim(
            offers, [*self._lacking([offers])], tier_request.cut
        )
        over = [number for number in offers.numbers if refused.get(number) not in FOR_ROOM]
        before = {number: waiting.pop(number) for number in over}
        self._give_up(tier_request, [refused[number] for number in over if number in refused])
        taken = (why for number, why in before.items() if number not in refused)
        self._acceptance.taken_later(Counter(taken))
        return items

    def _offer_last(self, overwritten: set[int]) -> list[StoreJob]:
        """Store what requests that have ended since the last step left to offer.

        The engine has taken their blocks back. Those that it gives to others in this step would be
        gathered too late; the others are fenced from now on, like all that are being gathered.
        """
        ended, self._last_offers = self._last_offers, []
        jobs: list[StoreJob | None] = []
        for tier_request, left in ended:
            offers = left.without(overwritten)
            items = self._offer_new(tier_request, offers, self._lacking([offers]))
            self._context.count(**Counter(tier_request.refused.values()))  # there is no later step
            tier_request.order.finished = True
            jobs.append(self._begin(tier_request, items))
            self._touch_prefix(tier_request)
        return [job for job in jobs if job is not None]

    def _begin(self, tier_request: TierRequest, items: dict[int, StoreItem]) -> StoreJob | None:
        if not items:
            return None
        tier_request.order.in_flight += 1
        # In several batches its head, which is stored first, would be the first to go.
        requests = self._context.requests
        writers = 1 if self._context.open.one_writer else requests.engine.world_size
        payload = self._context.open.block_bytes // writers
        whole = tier_request.offered * len(requests.groups)
        at_once = len(items) == whole <= batch_blocks(max(1, payload))
        tenant = tenant_of(tier_request.state.request)
        return self._context.jobs.store(tier_request, items, tenant, at_once=at_once)

    # -- ends --------------------------------------------------------------------------------

    def ended(self, store: PendingStore) -> None:
        """Take in that a store has ended on all ranks."""
        context, manager, job = self._context, self._context.open.manager, store.job
        tier_request, generation = store.tier_request, context.requests.generation
        self._acceptance.failed(len(store.result.failed))
        self._rate.ended(len(job.items) - len(store.result.failed), store.result.seconds)
        heads = manager.predecessors(tier_request.state.keys, store.numbers)
        kept: list[bytes] = []
        numbers: list[int] = []
        # The first last, so that it counts as used last: a prefix's head must outlive its tail.
        for index in reversed(range(len(job.items))):
            item = job.items[index]
            stored, head = index not in store.result.failed, heads.get(item.key)
            if generation.owns(item.key):
                if manager.complete_store(item.key, item.slot, stored, head):
                    if index not in store.result.already_stored:
                        context.kv_events.stored(item.key, store.numbers[index])
                    kept.append(item.key)
                    numbers.append(store.numbers[index])
            elif job.generation:  # blocks without one stay: others may use them
                manager.drop([item.key], job.generation)
            self.reservations.end(job.job_id, item)
        context.kv_events.tell_stored(tier_request.state)
        self._hints.stored(tier_request, numbers)
        self._keep_quota(store.tenant, kept)
        tier_request.order.ended(len(store.numbers) if store.at_once else None)
        self._touch_prefix(tier_request)

    def _keep_quota(self, tenant: str, kept: Sequence[bytes]) -> None:
        context = self._context
        beyond = context.tenants.kept(tenant, kept, context.open.block_bytes)
        if beyond:
            context.open.manager.drop(beyond, context.requests.generation.tag)
            context.kv_events.lost(beyond)

    def _touch_prefix(self, tier_request: TierRequest) -> None:
        """Let the head of what was stored in steps be the last to go."""
        keys = tier_request.offered * len(self._context.requests.groups)
        if tier_request.order.touch_due(keys):
            self._context.open.manager.touch_prefix(tier_request.state.keys[:keys])

    def request_finished(self, tier_request: TierRequest, tables: Sequence[list[int]]) -> None:
        """Keep what the request leaves to offer for the next step."""
        requests = self._context.requests
        self._hints.ended(tier_request)
        last = requests.ended(tier_request.state, tables)
        if (
            self._may_store(tier_request)
            and (offers := new_offers(requests, tier_request, last)).keys
        ):
            self._last_offers.append((tier_request, offers))
        else:
            tier_request.order.finished = True
            self._touch_prefix(tier_request)

    def drop_last_offers(self) -> None:
        """Offer nothing of requests that have ended: their blocks may not be read any more."""
        for tier_request, _ in self._last_offers:
            tier_request.order.finished = True
        self._last_offers.clear()


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
