"""TierLoads: what a tier has of a request, and the loads that bring it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiers.connector.contract.coverage import MISSING
from tiers.connector.contract.messages import LoadItem, LoadJob
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.shared_load import SharedLoad
from tiers.connector.policy.wait_budget import WaitBudget
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.jobs import PendingLoad
from tiers.connector.scheduler.manager import TierManager
from tiers.connector.scheduler.requests import RequestState


class TierLoads:
    """The loading half of one tier's scheduler; used by the scheduler's thread alone."""

    def __init__(
        self,
        context: TierContext,
        manager: TierManager,
        wait_budget: WaitBudget,
        load_cost: LoadCost,
    ) -> None:
        """`wait_budget`: the chain's. `load_cost` learns how long the loads take."""
        self._context = context
        self._manager = manager
        self._wait_budget = wait_budget
        self._load_cost = load_cost
        self._orders: list[LoadJob] = []

    def take_orders(self) -> list[LoadJob]:
        """The loads begun since the last call."""
        orders, self._orders = self._orders, []
        return orders

    # -- looking up --------------------------------------------------------------------------

    def coverage(self, state: RequestState, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks the tier could load; None: ask again."""
        asked = range(blocks.start, min(self._context.requests.stop(state), blocks.stop))
        if state.recompute or not asked:
            return [MISSING] * len(blocks)
        now = time.perf_counter()
        since = now if state.asked is None else state.asked
        size = len(self._context.groups)
        parts = self._manager.coverage(
            state.lookup, state.keys, range(asked.start * size, asked.stop * size)
        )
        if parts is None:
            state.asked = since
            return None
        state.asked = None
        if not state.answered:
            state.answered = True
            self._context.count(lookup_seconds=[time.perf_counter() - since])
        levels = self._context.groups.coverage(parts)
        return [*levels, *[MISSING] * (len(blocks) - len(asked))] if asked != blocks else levels

    # -- loading -----------------------------------------------------------------------------

    def begin(self, state: RequestState, blocks: list[int], shared: SharedLoad) -> None:
        """Load these blocks of a request, as a part of `shared`."""
        of_block, keys, targets = self._context.requests.to_load(state, blocks)
        slots = self._manager.prepare_load(keys)
        request_id = state.request.request_id
        job = self._context.jobs.load(
            request_id,
            list(map(LoadItem, keys, targets, slots)),
            self._wait_budget.left(request_id),
            blocks=blocks,
            of_block=of_block,
            shared=shared,
        )
        self._orders.append(job)
        self._load_cost.began(job.job_id, len(blocks) * self._context.engine.block_tokens)

    def count(self, state: RequestState, blocks: int) -> None:
        """Count a request that the engine begins, which loads `blocks` blocks from this tier.

        Requests are counted, not calls: one that waits for room is asked about in every step. As
        in the engine's own metrics of its hits, one that it has preempted does not count again.
        """
        if getattr(state.request, "num_preemptions", 0):
            return
        lookup, hit = state.answered and not state.looked_up, bool(blocks) and not state.hit
        if lookup or hit or blocks:
            tokens = blocks * self._context.engine.block_tokens
            self._context.count(lookups=int(lookup), hits=int(hit), hit_tokens=tokens)
        state.looked_up |= lookup
        state.hit |= hit

    def ended(self, load: PendingLoad) -> None:
        """Take in that a load has ended on all ranks."""
        context, job = self._context, load.job
        self._load_cost.ended(job.job_id, load.seconds, whole=not load.failed)
        context.count(**self._load_cost.gauges())
        self._manager.complete_load([i.key for i in job.items], [i.slot for i in job.items])
        lost = [job.items[index].key for index in sorted(load.lost)]
        for key in lost:
            self._manager.discard(key)
        context.kv_events.lost(lost)
        context.tenants.gone(lost)
        state = context.requests.get(job.request_id)
        if state is not None:
            state.recompute |= bool(load.failed)
            # It came in waves, of which the last counts as used last, until it is offered.
            state.order.stale |= not context.promote
        failed = {load.of_block[index] for index in load.failed}
        if failed and context.engine.all_or_nothing_loads:
            failed.add(0)
        if load.blocks:
            failure = min(load.of_block[index] for index in load.failed) if load.failed else None
            load.shared.notes.part_ended(load.blocks[0], failure, len(lost), load.times)
        if load.shared.end(load.blocks, failed, self._count_loaded):
            self._wait_budget.loaded(job.request_id)

    def _count_loaded(self, blocks: int) -> None:
        self._context.count(loaded_tokens=blocks * self._context.engine.block_tokens)
