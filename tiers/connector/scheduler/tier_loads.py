"""TierLoads: what a tier has of a request, and the loads that bring it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiers.connector.policy.block_loader import SharedLoad
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.jobs import PendingLoad
from tiers.connector.scheduler.tier_manager import DOWN
from tiers.connector.scheduler.tier_request import TierRequest
from tiers.contract.block_groups import MISSING
from tiers.contract.messages import LoadItem, LoadJob
from tiers.contract.protocols import NULL_BLOCK
from tiers.loading.load_cost import LoadCost


class TierLoads:
    """The loading half of one tier's scheduler; used by the scheduler's thread alone."""

    def __init__(self, context: TierContext, load_cost: LoadCost, now: Callable[[], float]) -> None:
        """`load_cost` learns how long the loads take. `now` gives seconds."""
        self._context = context
        self._load_cost = load_cost
        self._now = now
        self._orders: list[LoadJob] = []

    def take_orders(self) -> list[LoadJob]:
        """The loads begun since the last call."""
        orders, self._orders = self._orders, []
        return orders

    # -- looking up --------------------------------------------------------------------------

    def coverage(self, tier_request: TierRequest, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks the tier could load; None: ask again."""
        requests, request_state = self._context.requests, tier_request.state
        if not self._context.health.reads:
            tier_request.lookup.timer.went_down(self._now())
            return [MISSING] * len(blocks)
        asked = range(blocks.start, min(requests.loadable(request_state), blocks.stop))
        if tier_request.recompute or not asked:
            return [MISSING] * len(blocks)
        began = self._now()
        size = len(requests.groups)
        numbers = range(asked.start * size, asked.stop * size)
        parts = self._context.open.manager.coverage(
            tier_request.lookup, requests.keys(request_state), numbers
        )
        if parts is None:
            tier_request.lookup.timer.asked(began, self._now())
            return None
        tier_request.lookup.timer.answered(began, self._now())
        if not tier_request.answered:
            tier_request.answered = True
            if tier_request.lookup.is_unanswered:
                self._context.count(lookup_timeouts=1)
        levels = requests.groups.coverage(parts)
        return [*levels, *[MISSING] * (len(blocks) - len(asked))] if asked != blocks else levels

    def version(self, tier_request: TierRequest) -> int | None:
        """See `BlockLoader.version`."""
        if tier_request.recompute:
            return DOWN
        keys = self._context.requests.keys(tier_request.state)
        return self._context.open.manager.version(tier_request.lookup, keys)

    # -- loading -----------------------------------------------------------------------------

    def begin(self, tier_request: TierRequest, blocks: list[int], shared: SharedLoad) -> None:
        """Load these blocks of a request, as a part of `shared`."""
        of_block, keys, targets = self._parts(tier_request, blocks)
        slots = self._context.open.manager.prepare_load(keys)
        items = list(map(LoadItem, keys, targets, slots))
        job = self._context.jobs.load(
            tier_request, items, blocks=blocks, of_block=of_block, shared=shared
        )
        self._orders.append(job)
        self._load_cost.began(job.job_id, self._tokens(len(blocks)))

    def _parts(
        self, tier_request: TierRequest, blocks: list[int]
    ) -> tuple[list[int], list[bytes], list[int]]:
        """Block, key and paged block of each part that the engine has a place for."""
        groups, request_state = self._context.requests.groups, tier_request.state
        if groups.is_plain:
            (table,) = request_state.tables
            return blocks, [request_state.keys[b] for b in blocks], [table[b] for b in blocks]
        of_block: list[int] = []
        keys: list[bytes] = []
        targets: list[int] = []
        for block in blocks:
            for part, paged in enumerate(groups.paged(request_state.tables, block)):
                if paged != NULL_BLOCK or not groups.window:
                    of_block.append(block)
                    keys.append(request_state.keys[block * len(groups) + part])
                    targets.append(paged)
        return of_block, keys, targets

    def _tokens(self, blocks: int) -> int:
        return blocks * self._context.requests.engine.block_tokens

    def count(self, tier_request: TierRequest, blocks: int) -> None:
        """Count a request that the engine begins, which loads `blocks` blocks from this tier.

        Requests are counted, not calls: one that waits for room is asked about in every step. As
        in the engine's own metrics of its hits, one that it has preempted does not count again.
        """
        if getattr(tier_request.state.request, "num_preemptions", 0):
            return
        lookup, hit = (
            tier_request.answered and not tier_request.looked_up,
            bool(blocks) and not tier_request.hit,
        )
        if lookup or hit or blocks:
            tokens = self._tokens(blocks)
            self._context.count(lookups=int(lookup), hits=int(hit), hit_tokens=tokens)
        if lookup:
            times = tier_request.lookup.timer.times
            self._context.count(lookup_seconds=[times.answer], lookup_notice_seconds=[times.notice])
        tier_request.looked_up |= lookup
        tier_request.hit |= hit

    def ended(self, load: PendingLoad) -> None:
        """Take in that a load has ended on all ranks."""
        context, job, result = self._context, load.job, load.result
        manager = context.open.manager
        failed = {load.of_block[index] for index in result.failed}
        arrived = self._tokens(len(load.blocks) - len(failed))
        excused = result.late or result.outdated
        self._load_cost.ended(job.job_id, result.seconds, not failed, arrived, excused)
        context.count(**self._load_cost.gauges())
        manager.complete_load([i.key for i in job.items], [i.slot for i in job.items])
        lost = [job.items[index].key for index in sorted(result.lost)]
        for key in lost:
            manager.discard(key)
        context.kv_events.lost(lost)
        context.tenants.gone(lost)
        load.tier_request.recompute |= bool(result.failed)
        # It came in waves, of which the last counts as used last, until it is offered.
        load.tier_request.order.stale |= not context.promote
        if failed and context.requests.engine.all_or_nothing_loads:
            failed.add(0)
        if load.blocks:
            failure = min((load.of_block[index] for index in result.failed), default=None)
            load.shared.notes.part_ended(load.blocks[0], failure, len(lost), result.times)
        if load.shared.end(load.blocks, failed, self._count_loaded):
            load.tier_request.state.wait_budget.loaded()

    def _count_loaded(self, blocks: int) -> None:
        self._context.count(loaded_tokens=self._tokens(blocks))
