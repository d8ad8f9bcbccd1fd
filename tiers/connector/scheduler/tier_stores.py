"""TierStores: which blocks of a step a tier stores, and what its stores in flight hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tiers.connector.policy.request_state import EngineStep, RequestState, Scheduled
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.policy.tenant_counts import tenant_of
from tiers.connector.scheduler.jobs import Jobs, PendingStore, StoreShare
from tiers.connector.scheduler.tier import Tier, TierRequest
from tiers.connector.scheduler.tier_hints import TierHints
from tiers.contract.messages import NO_PLACE, StoreItem, StoreJob
from tiers.contract.protocols import NULL_BLOCK
from tiers.store import batch_blocks

RETRIES = 256
"""Blocks, of all requests, that a step offers again at most: half a millisecond's work."""
FOR_ROOM = ("store_dropped_inflight", "store_dropped_no_slot")
"""Why a block is refused that is offered again."""
NOT_YET = "store_deferred"
"""Why a block is refused that the tier should not have so far: one of those behind it may be asked
for as often as it takes."""


class Offers(NamedTuple):
    """Parts of a request's blocks to store: of each its number among the request's keys, its key
    and its paged block. In columns: 8,192 new tuples would call Python's garbage collector."""

    numbers: Sequence[int]
    keys: Sequence[bytes]
    paged: Sequence[int]

    def without(self, overwritten: set[int]) -> Offers:
        """Those that are in none of these paged blocks."""
        if overwritten.isdisjoint(self.paged):
            return self
        safe = [row for row in zip(*self, strict=True) if row[2] not in overwritten]
        return Offers(*zip(*safe, strict=True)) if safe else NO_OFFERS

    def outside(self, omitted: Sequence[range], size: int) -> Offers:
        """Those in none of these blocks, of `size` parts each."""
        if not any(size * blocks.stop > self.numbers[0] for blocks in omitted):
            return self  # as of nearly all steps
        rows = zip(*self, strict=True)
        kept = [row for row in rows if not any(row[0] // size in blocks for blocks in omitted)]
        return Offers(*zip(*kept, strict=True)) if kept else NO_OFFERS


Taken = tuple[TierRequest, dict[int, StoreItem]]
"""What a tier stores of a request, by number."""

NO_OFFERS = Offers((), (), ())


def new_offers(requests: RequestTable, tier_request: TierRequest, scheduled: Scheduled) -> Offers:
    """All parts of the blocks that are complete, were not offered yet, and may be stored."""
    offers = _complete(requests, tier_request, scheduled)
    omitted = scheduled.request_state.omitted
    return offers.outside(omitted, len(requests.groups)) if omitted and offers.keys else offers


def _complete(requests: RequestTable, tier_request: TierRequest, scheduled: Scheduled) -> Offers:
    request_state, before, last = scheduled.request_state, scheduled.before, scheduled.complete
    first = tier_request.offered
    if last <= first:
        return NO_OFFERS
    keys = requests.keys(request_state)
    if not request_state.shared:
        return NO_OFFERS
    tier_request.offered = last
    if requests.groups.is_plain:
        (table,) = request_state.tables
        return Offers(range(first, last), keys[first:last], table[first:last])
    size = len(requests.groups)
    offers = _kept(requests, request_state, range(first * size, last * size), before)
    left = [state for state in scheduled.states if first * size <= state[0] < last * size]
    if not left:
        return offers
    of_states = [(number, keys[number], paged) for number, paged in left]
    return Offers(*zip(*sorted([*zip(*offers, strict=True), *of_states]), strict=True))


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
            keeps = requests.keeps_windows(request_state, block)
            at, kept = block, groups.kept(block, before if keeps else math.inf)
            paged = groups.paged(request_state.tables, block)
        if kept[part] and (paged[part] != NULL_BLOCK or not groups.window):
            kept_numbers.append(number)
            places.append(paged[part])
    return Offers(kept_numbers, [request_state.keys[number] for number in kept_numbers], places)


Claimed = tuple[dict[int, StoreItem], dict[int, str]]
"""The outcome of some offers, by the number of each: those that are stored, and those that the tier
misses and does not get, with the counter that names the reason."""


class TierStores:
    """The storing half of one tier's scheduler; used by the scheduler's thread alone."""

    def __init__(self, tier: Tier, jobs: Jobs, hints: TierHints, promote: bool) -> None:
        """`promote`: whether loaded blocks are stored, too."""
        self.is_paused = False
        """Whether nothing more is stored: the operator wishes so, or the tier leaves the chain."""
        self.slots_pinned = 0
        """Slots that stores in flight hold."""
        self._tier = tier
        self._jobs = jobs
        self._admission = tier.admission
        self._hints = hints
        self.promote = promote
        self._retries = RETRIES
        self._last_offers: list[tuple[TierRequest, Offers]] = []
        self._keys: set[bytes] = set()
        self._reading: dict[int, int] = {}

    # -- offering ----------------------------------------------------------------------------

    def orders(self, step: EngineStep) -> tuple[list[StoreJob], list[int]]:
        """The stores that a step begins, and the jobs whose blocks it overwrites."""
        self._retries = RETRIES
        self._admission.acceptance.look()
        self._hints.step()
        new = [*self._new(step.scheduled)]
        # The tier is asked once for all requests, and not at all where no block is complete.
        misses = self._misses([key for _, _, offers in new for key in offers.keys])
        taken: list[Taken] = []
        for run, tier_request, offers in new:
            items = self._offer_again(tier_request, run) if tier_request.refused else {}
            items |= self._offer_new(tier_request, offers, misses)
            taken.append((tier_request, items))
            again = run.request_state.to_offer_again
            (again.add if tier_request.refused else again.discard)(self._tier)
        last = self._offer_last(step.overwritten)
        jobs = self._begin(taken + last)
        for tier_request, _ in last:
            self._touch_prefix(tier_request)
        reading = self._reading
        readers = sorted({reading[block] for block in step.overwritten & reading.keys()})
        for job in jobs:
            for item in job.items:
                if item.source is not None:
                    reading[item.source] = job.job_id
        return jobs, readers

    def _may_store(self, tier_request: TierRequest) -> bool:
        tier, request_state = self._tier, tier_request.request_state
        stores = tier.usable and not self.is_paused and request_state.stores
        return stores and tier.tenants.may_keep(tenant_of(request_state.request))

    def _new(self, runs: Sequence[Scheduled]) -> Iterator[tuple[Scheduled, TierRequest, Offers]]:
        """What a step completes of its requests, full blocks of known tokens; and those of which
        blocks are offered again."""
        tier = self._tier
        for run in runs:
            tier_request = run.request_state.tiers.get(tier) or tier.request(run.request_state)
            if run.is_new and not self.promote:
                # Of a prompt that was loaded whole the engine computes the last token once more.
                tier_request.offered = (run.before + 1) // tier.requests.engine.block_tokens
            if run.complete > tier_request.offered or tier_request.refused:
                if self._may_store(tier_request):
                    yield run, tier_request, new_offers(tier.requests, tier_request, run)
                elif run.request_state.may_store and (tier.usable or not tier.has_opened):
                    # It opens yet, is paused, or marks are late.
                    run.request_state.to_offer_again.add(tier)

    def _misses(self, keys: Sequence[bytes]) -> Iterator[bool]:
        """Whether the tier misses each of these; nothing is asked for no keys."""
        return iter(self._tier.open.manager.touch_and_list_missing(keys) if keys else ())

    def _offer_new(
        self, tier_request: TierRequest, offers: Offers, misses: Iterator[bool]
    ) -> dict[int, StoreItem]:
        """Offer blocks for the first time; of each the next in `misses` is whether the tier has it.
        Those that find no room wait for a later step."""
        if not offers.keys:
            return {}
        missed = [*islice(misses, len(offers.keys))]
        items, refused = self.claim(offers, missed, tier_request.behind)
        if items or refused:
            self._admission.acceptance.offered(len(items), refused.values())
        if refused:
            waiting = {number: why for number, why in refused.items() if why in FOR_ROOM}
            tier_request.refused |= waiting
            self._refuse(tier_request, [why for why in refused.values() if why not in FOR_ROOM])
        return items

    def _refuse(self, tier_request: TierRequest, reasons: Sequence[str]) -> None:
        """Count blocks that are not stored; and none behind them is, but for those deferred."""
        self._tier.count(**Counter(reasons))
        if tier_request.cut is None:
            tier_request.cut = next((why for why in reasons if why != NOT_YET), None)

    def _offer_again(self, tier_request: TierRequest, scheduled: Scheduled) -> dict[int, StoreItem]:
        """Offer what had no room before, first blocks first, while the request has the blocks."""
        requests, waiting = self._tier.requests, tier_request.refused
        most = min(self._retries, self._room())
        if most <= 0:
            return {}
        # After a preemption it may not have got as far again.
        last = scheduled.complete * len(requests.groups)
        numbers = [number for number in islice(waiting, most) if number < last]
        offers = _kept(requests, tier_request.request_state, numbers, scheduled.before)
        gone = {*numbers}.difference(offers.numbers)  # the engine has given them away
        self._tier.count(**Counter(map(waiting.pop, gone)))
        self._retries -= len(offers.keys)
        items, refused = self.claim(offers, [*self._misses(offers.keys)], tier_request.cut)
        over = [number for number in offers.numbers if refused.get(number) not in FOR_ROOM]
        before = {number: waiting.pop(number) for number in over}
        self._refuse(tier_request, [refused[number] for number in over if number in refused])
        taken = (why for number, why in before.items() if number not in refused)
        self._admission.acceptance.found_room(taken)
        return items

    def _offer_last(self, overwritten: set[int]) -> list[Taken]:
        """Take what requests that have ended since the last step left to offer.

        The engine has taken their blocks back. Those that it gives to others in this step would be
        gathered too late; the others are fenced from now on, like all that are being gathered.
        """
        ended, self._last_offers = self._last_offers, []
        taken: list[Taken] = []
        for tier_request, left in ended:
            offers = left.without(overwritten)
            items = self._offer_new(tier_request, offers, self._misses(offers.keys))
            self._tier.count(**Counter(tier_request.refused.values()))  # there is no later step
            tier_request.order.finished = True
            taken.append((tier_request, items))
        return taken

    def _begin(self, taken: Sequence[Taken]) -> list[StoreJob]:
        """Begin to store what was taken of each request, a few blocks of several in one job:
        hundreds answer, and a job of one block costs both halves as much as one of many. A job has
        no more than one call of the store takes, and an eighth of what may be in flight: blocks
        make room for others when their job has ended, and a tier that lags must not run dry until
        those come."""
        tier, requests = self._tier.open, self._tier.requests
        writers = 1 if tier.one_writer else requests.engine.world_size
        most = batch_blocks(max(1, tier.block_bytes // writers))
        together = min(most, self._most_inflight() // 8)
        stores: list[PendingStore] = []
        for tier_request, items in taken:
            if not items:
                continue
            tier_request.order.in_flight += 1
            request_state, numbers = tier_request.request_state, list(items)
            adapter = request_state.mark.adapter
            place = tier.manager.place(request_state.keys, numbers)
            if not stores or not stores[-1].takes(len(items), adapter, place, together):
                job = StoreJob(self._jobs.next_id(), [], requests.generation.tag, adapter, place)
                stores.append(PendingStore(job))
            stores[-1].job.items.extend(items.values())
            # Of packs in batches, the first is stored, and evicted, first.
            is_whole = len(items) == tier_request.offered * len(requests.groups)
            at_once = is_whole and (place is NO_PLACE or len(items) <= most)
            stores[-1].shares.append(StoreShare(tier_request, numbers, at_once))
        for store in stores:
            self._jobs.begin(store, requests.step.number)
            self._tier.count(store_taken=len(store.job.items))
        return [store.job for store in stores]

    # -- what stores in flight hold ----------------------------------------------------------

    def claim(self, offers: Offers, missed: Sequence[bool], behind: str | None = None) -> Claimed:
        """Take slots for those offers of a request that the tier `missed` and its rules admit.

        What is behind a block that the tier should have and does not get is refused for the same
        reason, since it could not be loaded. `behind`: that reason, where there is such a block
        before these.
        """
        tier, admission, in_flight = self._tier.open, self._admission, self._keys
        items: dict[int, StoreItem] = {}
        refused: dict[int, str] = {}
        if not any(missed):  # as of most prompts that come again
            return items, refused
        behind = behind or (None if self._tier.writes else "store_dropped_down")
        claim, room, block_bytes = tier.pool.claim, self._room(), tier.block_bytes
        asks, holds_room = not admission.admits_all, not tier.manager.in_host_memory
        for number, key, paged, is_missed in zip(*offers, missed, strict=True):
            if not is_missed or key in in_flight:
                continue
            reason = behind
            if reason is None and asks:
                reason = admission.refuses(key, block_bytes)
            if reason is None and room <= 0:
                reason = "store_dropped_inflight"
            claimed = claim(key) if reason is None else None
            if claimed is None:
                refused[number] = reason = reason or "store_dropped_no_slot"
                behind = None if reason == NOT_YET else reason
                continue
            room -= holds_room
            if asks:
                admission.stores(key, block_bytes)
            in_flight.add(key)
            slot, is_fresh = claimed
            # As `StoreItem(...)`, in a third of the time.
            items[number] = tuple.__new__(StoreItem, (key, slot, paged if is_fresh else None))
        self.slots_pinned += len(items)
        return items, refused

    def _room(self) -> int:
        """How many blocks more may be stored at once, as far as that decides."""
        pinned = 0 if self._tier.open.manager.in_host_memory else self.slots_pinned
        return self._most_inflight() - pinned

    def _most_inflight(self) -> int:
        tier = self._tier.open
        if tier.manager.in_host_memory:
            return tier.pool.end
        return self._admission.most_inflight(tier.block_bytes, tier.pool.end)

    # -- ends --------------------------------------------------------------------------------

    def ended(self, store: PendingStore) -> None:
        """Take in that a store has ended on all ranks."""
        tier, job, result = self._tier, store.job, store.result
        self._admission.acceptance.failed(len(result.failed))
        self._admission.rate.ended(len(job.items) - len(result.failed), result.seconds)
        kept: list[dict[int, bytes]] = []
        first, of_tenants = 0, Counter[str]()
        for share in store.shares:
            kept.append(self._keep(store, share, first))
            before, first = first, first + len(share.numbers)
            stored = {*range(before, first)} - result.failed - result.already_stored
            of_tenants[tenant_of(share.tier_request.request_state.request)] += len(stored)
        tier.requests.tenants.stored(result.bytes, of_tenants)
        tier.open.manager.stored([key for of_request in kept for key in of_request.values()])
        for share, of_request in zip(store.shares, kept, strict=True):
            at_once = share.at_once and not result.renewed  # those may count as used once more
            share.tier_request.order.ended(len(share.numbers) if at_once else None)
            self._note_kept(share, of_request)

    def _note_kept(self, share: StoreShare, kept: dict[int, bytes]) -> None:
        """The tier keeps these blocks of a request, of a store that has ended."""
        tier, tier_request = self._tier, share.tier_request
        self._hints.stored(tier_request, [*kept])
        tenant = tenant_of(tier_request.request_state.request)
        if beyond := tier.tenants.beyond(tenant, tier.open.block_bytes):
            tier.open.manager.drop(beyond, tier.requests.generation.tag)
            tier.kv_events.lost(beyond)
            self._hints.lost(beyond)
        self._touch_prefix(tier_request)

    def _keep(self, store: PendingStore, share: StoreShare, first: int) -> dict[int, bytes]:
        """Take in how the blocks of a request ended, from item `first` of the job on; return the
        keys of those that the tier keeps, by number."""
        tier, manager, events = self._tier, self._tier.open.manager, self._tier.kv_events
        job, failed, already_stored = store.job, store.result.failed, store.result.already_stored
        release, complete = tier.open.pool.release, manager.complete_store
        numbers, reading = share.numbers, self._reading
        request_state = share.tier_request.request_state
        predecessors = manager.predecessors(request_state.keys, numbers)
        tenant = tenant_of(request_state.request)
        has_quota = tier.tenants.has_quota(tenant)
        kept: dict[int, bytes] = {}
        keys = [item.key for item in job.items[first : first + len(numbers)]]
        self._keys.difference_update(keys)
        is_ours = tier.requests.generation.owns(keys[0])  # and so are all that a request stores
        if job.generation and not is_ours:  # blocks without one stay: others may use them
            manager.drop(keys, job.generation)
        # The first last, so that it counts as used last: predecessors must outlive their tail.
        for index in reversed(range(first, first + len(numbers))):
            key, slot, source = job.items[index]
            if is_ours and complete(key, slot, index not in failed, predecessors.get(key)):
                kept[number := numbers[index - first]] = key
                if events.wanted and index not in already_stored:
                    events.stored(key, number)
                if has_quota:
                    tier.tenants.keeps(tenant, key)
            release(slot)
            if source is not None and reading.get(source) == job.job_id:
                del reading[source]
        self.slots_pinned -= len(numbers)
        events.announce_stored(request_state)
        return kept

    def _touch_prefix(self, tier_request: TierRequest) -> None:
        """Have the tail evicted first, of a prefix that was stored in steps."""
        keys = tier_request.offered * len(self._tier.requests.groups)
        if tier_request.order.touch_due(keys):
            self._tier.open.manager.touch_prefix(tier_request.request_state.keys[:keys])

    def request_finished(self, tier_request: TierRequest, tables: Sequence[list[int]]) -> None:
        """Keep what the request leaves to offer for the next step."""
        requests = self._tier.requests
        self._hints.ended(tier_request)
        last = requests.ended(tier_request.request_state, tables)
        offers = NO_OFFERS
        groups, waiting = requests.groups, tier_request.refused
        if groups.ends and 0 < last.after < tier_request.request_state.request.num_prompt_tokens:
            # Aborted in the midst of its prompt: whoever asks for it again goes on from there.
            first = max(0, last.complete - groups.ends)
            tier_request.offered = min(tier_request.offered, first)
            tier_request.refused = {n: w for n, w in waiting.items() if n < first * len(groups)}
        if self._may_store(tier_request):
            offers = new_offers(requests, tier_request, last)
        if offers.keys:
            self._last_offers.append((tier_request, offers))
        else:
            tier_request.order.finished = True
            self._touch_prefix(tier_request)
        self._tier.count(**Counter(tier_request.refused.values()))
        # What it offers last is behind those.
        tier_request.cut, tier_request.refused = tier_request.behind, {}

    def drop_last_offers(self) -> None:
        """Offer nothing of requests that have ended: their blocks may not be read any more."""
        for tier_request, _ in self._last_offers:
            tier_request.order.finished = True
        self._last_offers.clear()
