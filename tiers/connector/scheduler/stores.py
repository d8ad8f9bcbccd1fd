"""TierStores: which blocks of each step a tier stores, and what becomes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from tiers.connector.policy.requests import Scheduled, Step
from tiers.connector.scheduler.admission.admission import Admission
from tiers.connector.scheduler.admission.tenant_quotas import tenant_of
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.jobs import PendingStore
from tiers.connector.scheduler.store_reservations import (
    FOR_ROOM,
    NOT_YET,
    NOTHING,
    Offers,
    StoreReservations,
    new_offers,
    offers_again,
)
from tiers.connector.scheduler.tier_hints import TierHints
from tiers.connector.scheduler.tier_request import TierRequest
from tiers.contract.messages import StoreItem, StoreJob
from tiers.store import batch_blocks

RETRIES = 256
"""Blocks, of all requests, that a step offers again at most: half a millisecond's work."""


class TierStores:
    """The storing half of one tier's scheduler; used by the scheduler's thread alone."""

    def __init__(self, context: TierContext, admission: Admission, hints: TierHints) -> None:
        self._hints = hints
        self.reservations = StoreReservations(context, admission)
        self._context = context
        self._intake = admission.intake
        self._rate = admission.rate
        self._retries = RETRIES
        self._last_offers: list[tuple[TierRequest, Offers]] = []

    # -- offering ----------------------------------------------------------------------------

    def orders(self, step: Step) -> tuple[list[StoreJob], list[int]]:
        """The stores that a step begins, and the jobs whose blocks it overwrites."""
        self._retries = RETRIES
        self._intake.look()
        self._hints.step()
        new = [self._new(one) for one in step.scheduled]
        lacking = self._lacking([offers for _, _, offers in new])
        jobs = [job for one in new if (job := self._offer(*one, lacking)) is not None]
        jobs += self._offer_last(step.overwritten)
        flush = self.reservations.readers(step.overwritten)
        self.reservations.begin(jobs)
        return jobs, flush

    def _may_store(self, own: TierRequest) -> bool:
        if not self._context.health.usable or not own.state.stores:
            return False
        return self._context.tenants.may_keep(tenant_of(own.state.request))

    def _new(self, scheduled: Scheduled) -> tuple[Scheduled, TierRequest, Offers]:
        """What the step completes of a request: full blocks of known tokens."""
        own, requests = self._context.own(scheduled.state), self._context.requests
        if scheduled.is_new and not self._context.promote:
            own.offered = scheduled.before // requests.engine.block_tokens
        if scheduled.complete <= own.offered or not self._may_store(own):
            return scheduled, own, NOTHING  # in most steps of an answer
        return scheduled, own, new_offers(requests, own, scheduled)

    def _lacking(self, offers: Sequence[Offers]) -> Iterator[bool]:
        """Which of these the tier lacks, one after the other. It is asked once for all requests,
        and nothing where no block is complete, as in most steps of an answer."""
        keys = [key for one in offers for key in one.keys]
        return iter(self._context.open.manager.missing(keys) if keys else ())

    def _offer(
        self, scheduled: Scheduled, own: TierRequest, offers: Offers, lacking: Iterator[bool]
    ) -> StoreJob | None:
        """Store what the tier lacks of these, the next in `lacking`, or of those before them."""
        again = self._offer_again(own, scheduled) if own.refused and self._may_store(own) else {}
        return self._begin(own, again | self._offer_new(own, offers, lacking))

    def _offer_new(
        self, own: TierRequest, offers: Offers, lacking: Iterator[bool]
    ) -> dict[int, StoreItem]:
        """Offer blocks for the first time. Those that find no room wait for a later step."""
        if not offers.keys:
            return {}
        lacks = [*islice(lacking, len(offers.keys))]
        items, refused = self.reservations.claim(offers, lacks, own.behind)
        if items or refused:
            self._intake.offered(len(items), Counter(refused.values()) if refused else {})
        if refused:
            own.refused |= {number: why for number, why in refused.items() if why in FOR_ROOM}
            self._give_up(own, [why for why in refused.values() if why not in FOR_ROOM])
        return items

    def _give_up(self, own: TierRequest, reasons: Sequence[str]) -> None:
        """Count blocks that are not stored; and none behind them is, but for those deferred."""
        self._context.count(**Counter(reasons))
        own.cut = own.cut or next((why for why in reasons if why != NOT_YET), None)

    def _offer_again(self, own: TierRequest, scheduled: Scheduled) -> dict[int, StoreItem]:
        """Offer what had no room before, head first, while the request runs and has the blocks."""
        waiting = own.refused
        most = min(self._retries, self.reservations.room())
        if most <= 0:
            return {}
        offers = offers_again(self._context.requests, own, scheduled, most)
        self._retries -= len(offers.keys)
        items, refused = self.reservations.claim(offers, [*self._lacking([offers])], own.cut)
        over = [number for number in offers.numbers if refused.get(number) not in FOR_ROOM]
        before = {number: waiting.pop(number) for number in over}
        self._give_up(own, [refused[number] for number in over if number in refused])
        taken = (why for number, why in before.items() if number not in refused)
        self._intake.taken_later(Counter(taken))
        return items

    def _offer_last(self, overwritten: set[int]) -> list[StoreJob]:
        """Store what requests that have ended since the last step left to offer.

        The engine has taken their blocks back. Those that it gives to others in this step would be
        gathered too late; the others are fenced from now on, like all that are being gathered.
        """
        ended, self._last_offers = self._last_offers, []
        jobs: list[StoreJob | None] = []
        for own, left in ended:
            offers = left.without(overwritten)
            items = self._offer_new(own, offers, self._lacking([offers]))
            self._context.count(**Counter(own.refused.values()))  # there is no later step
            own.order.finished = True
            jobs.append(self._begin(own, items))
            self._settle(own)
        return [job for job in jobs if job is not None]

    def _begin(self, own: TierRequest, items: dict[int, StoreItem]) -> StoreJob | None:
        if not items:
            return None
        own.order.under_way += 1
        # In several batches its head, which is stored first, would be the first to go.
        requests = self._context.requests
        writers = 1 if self._context.open.one_writer else requests.engine.world_size
        payload = self._context.open.block_bytes // writers
        whole = own.offered * len(requests.groups)
        at_once = len(items) == whole <= batch_blocks(max(1, payload))
        tenant = tenant_of(own.state.request)
        return self._context.jobs.store(own, items, tenant, at_once=at_once)

    # -- ends --------------------------------------------------------------------------------

    def ended(self, store: PendingStore) -> None:
        """Take in that a store has ended on all ranks."""
        context, manager, job = self._context, self._context.open.manager, store.job
        own, generation = store.own, context.requests.generation
        self._intake.failed(len(store.result.failed))
        self._rate.ended(len(job.items) - len(store.result.failed), store.result.seconds)
        heads = manager.heads(own.state.keys, store.numbers)
        kept: list[bytes] = []
        numbers: list[int] = []
        # The first last, so that it counts as used last: a prefix's head must outlive its tail.
        for index in reversed(range(len(job.items))):
            item = job.items[index]
            stored, head = index not in store.result.failed, heads.get(item.key)
            if generation.made(item.key):
                if manager.complete_store(item.key, item.slot, stored, head):
                    if index not in store.result.known:
                        context.kv_events.stored(item.key, store.numbers[index])
                    kept.append(item.key)
                    numbers.append(store.numbers[index])
            elif job.generation:  # blocks without one stay: others may use them
                manager.drop([item.key], job.generation)
            self.reservations.end(job.job_id, item)
        context.kv_events.tell_stored(own.state)
        self._hints.stored(own, numbers)
        self._keep_quota(store.tenant, kept)
        own.order.ended(len(store.numbers) if store.at_once else None)
        self._settle(own)

    def _keep_quota(self, tenant: str, kept: Sequence[bytes]) -> None:
        context = self._context
        beyond = context.tenants.kept(tenant, kept, context.open.block_bytes)
        if beyond:
            context.open.manager.drop(beyond, context.requests.generation.tag)
            context.kv_events.lost(beyond)

    def _settle(self, own: TierRequest) -> None:
        """Let the head of what was stored in steps be the last to go."""
        keys = own.offered * len(self._context.requests.groups)
        if own.order.settle(keys):
            self._context.open.manager.settle(own.state.keys[:keys])

    def request_finished(self, own: TierRequest, tables: Sequence[list[int]]) -> None:
        """Keep what the request leaves to offer for the next step."""
        requests = self._context.requests
        self._hints.ended(own)
        last = requests.ended(own.state, tables)
        if self._may_store(own) and (offers := new_offers(requests, own, last)).keys:
            self._last_offers.append((own, offers))
        else:
            own.order.finished = True
            self._settle(own)

    def drop_last_offers(self) -> None:
        """Offer nothing of requests that have ended: their blocks may not be read any more."""
        for own, _ in self._last_offers:
            own.order.finished = True
        self._last_offers.clear()
