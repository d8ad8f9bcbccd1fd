"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.connector import SchedulerConnector
from tiers.connector.contract.coverage import MISSING
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.contract.generation import Generation
from tiers.connector.contract.messages import (
    BlockEvent,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    WorkerHandshake,
)
from tiers.connector.contract.protocols import Blocks, ConnectorOutput, Request, SchedulerOutput
from tiers.connector.contract.stats import TierStats
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.choice import stitched
from tiers.connector.policy.shared_load import SharedLoad
from tiers.connector.policy.wait_budget import WaitBudget
from tiers.connector.scheduler.admission import Admission
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.jobs import Jobs, PendingLoad
from tiers.connector.scheduler.kv_events import KVEvents
from tiers.connector.scheduler.requests import RequestState, RequestTable
from tiers.connector.scheduler.tenant_quotas import Tenants
from tiers.connector.scheduler.tier_halves import OpenManager, TierHalves
from tiers.connector.scheduler.tier_health import TierHealth
from tiers.connector.scheduler.why_nothing import why_nothing
from tiers.host.slots import SlotPool


class OffloadingScheduler(SchedulerConnector):
    """One tier, in the scheduler's process. Nothing here does I/O or waits."""

    def __init__(
        self,
        tier: str,
        engine: EngineInfo,
        open_manager: OpenManager,
        promote: bool,
        generation: Generation,
        wait_budget: WaitBudget,
        admission: Admission,
        tenants: Tenants,
        now: Callable[[], float] = time.monotonic,
        prompt_only: bool = False,
        hit_source: str = "external_unspecified",
    ) -> None:
        """`generation` and `wait_budget` are those of all tiers of a chain; see `RequestTable`.
        `hit_source`: the engine's word for where this tier's tokens come from."""
        self.tier = tier
        self._hit_source = hit_source
        self.load_cost, self.stats = LoadCost(now), TierStats()
        groups = BlockGroups(engine)
        context = TierContext(
            engine,
            groups,
            generation,
            promote,
            RequestTable(engine, groups, generation, promote, prompt_only),
            Jobs(engine.world_size, generation),
            TierHealth(),
            tenants,
            KVEvents(tier, engine, groups, generation),
            self.note,
        )
        self._context, self._engine = context, engine
        self._requests, self._jobs, self._health = context.requests, context.jobs, context.health
        self._halves = TierHalves(
            tier, context, open_manager, wait_budget, admission, self.load_cost
        )
        self.why_nothing = partial(why_nothing, context, self._halves)
        self._told: dict[str, float] = {}
        self._overwritten: set[int] = set()

    # -- opening -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Open the tier with what its workers said; another connector's words are ignored."""
        said = [one for one in metadata.values() if isinstance(one, WorkerHandshake)]
        self._halves.register_workers({handshake.rank: handshake for handshake in said})

    # -- state -------------------------------------------------------------------------------

    @property
    def reqs_being_loaded(self) -> set[str]:
        """Requests with a load under way."""
        return self._jobs.requests_loading

    @property
    def pool(self) -> SlotPool:
        """The slots of the chain; none until the tier is open."""
        return self._halves.stores.reservations.pool

    @property
    def slots_pinned(self) -> int:
        """Slots that blocks on their way into the tier hold."""
        return self._halves.stores.reservations.slots_pinned

    @property
    def blocks_held(self) -> int:
        """Blocks that the tier keeps in slots."""
        return self._halves.manager.slots_kept()

    @property
    def jobs_under_way(self) -> int:
        """Loads and stores that have not ended on all ranks."""
        return len(self._jobs)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[str, int]:
        """All from this tier."""
        return {self._hit_source: num_external_tokens} if num_external_tokens else {}

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All: a load brings whatever the engine has a place for."""
        return tuple(range(len(self._engine.kv_groups)))

    def note(self, **measures: float | list[float]) -> None:
        """Add to the tier's measures."""
        self.stats.add(self.tier, **measures)

    def get_kv_connector_stats(self) -> TierStats | None:
        """What was measured since the last call; gauges only where they have changed."""
        stats, self.stats = self.stats, TierStats()
        if evictions := self._context.kv_events.take_evictions():
            stats.add(self.tier, evictions=evictions)
        block_bytes = self._halves.stores.reservations.block_bytes
        gauges = self._jobs.gauges(block_bytes) | self._health.gauges()
        if gauges != self._told:
            self._told = gauges
            stats.add(self.tier, **gauges)
        return None if stats.is_empty() else stats

    def has_pending_push_work(self) -> bool:
        """Whether a transfer will end soon whose end only a step can tell us of."""
        ends_soon = self._halves.manager.completes_on_gather or self._jobs.any_loading
        return bool(self._jobs) and ends_soon

    # -- loading -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones the tier could load; None: ask again."""
        if not self._engine.media.ready(request):
            return None, False  # also where it loads nothing, since its marks come before its KV
        first, rest = divmod(num_computed_tokens, self._engine.block_tokens)
        stop = first if rest else request.num_tokens // self._engine.block_tokens
        asked = {0: partial(self.coverage, request)}
        found = stitched(asked, range(first, stop), self._context.groups.window)
        if found.looking:
            return None, False
        count = max(0, found.stop - first - int(self._engine.drops_last))
        self._requests.state_of(request).match = (first, count)
        return count * self._engine.block_tokens, count > 0

    def coverage(self, request: Request, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks the tier could load; None: ask again."""
        if not self._engine.media.ready(request):
            return None
        if not self._health.reads:
            return [MISSING] * len(blocks)
        return self._halves.loads.coverage(self._requests.state_of(request), blocks)

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks; load into them what was promised for it."""
        state = self._allocated(request, blocks)
        count = num_external_tokens // self._engine.block_tokens
        if count:
            first, found = state.match
            assert count <= found, f"{count} blocks to load of {found} found"
            self._halves.loads.begin(state, list(range(first, first + count)), SharedLoad(1))
        self._halves.loads.count(state, count)

    def load_blocks(
        self, request: Request, blocks: Blocks, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """Note the request's blocks; load into them this tier's part of a shared load."""
        state = self._allocated(request, blocks)
        mine = [block for part in ranges for block in part]
        self._halves.loads.begin(state, mine, shared)
        self._halves.loads.count(state, len(mine))

    def _allocated(self, request: Request, blocks: Blocks) -> RequestState:
        state = self._requests.state_of(request)
        state.tables = tuple(list(table) for table in blocks.get_block_ids())
        state.asked, state.computed = None, 0
        # Another tier may load into these blocks while this one still reads what they held.
        self._overwritten.update(*state.tables)
        return state

    def on_new_request(self, request: Request) -> None:
        """Begin to find out what the tier has of a request, if it can't tell at once."""
        if not self._engine.media.ready(request) or not self._health.usable:
            return
        state = self._requests.state_of(request)
        if state.keys and state.limits.may_load(self.tier):
            self._halves.manager.prefetch_lookup(state.lookup, state.keys)

    # -- steps -------------------------------------------------------------------------------

    def disable_store(self, request: Request) -> None:
        """Never offer its blocks."""
        self._requests.state_of(request).store = False

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> OffloadingConnectorMetadata:
        """Orders for the workers of this step."""
        self.load_cost.stepped()
        overwritten, self._overwritten = self._overwritten, set()
        scheduled = self._requests.scheduled(scheduler_output, overwritten)
        stores, flush = self._halves.stores.orders(scheduled, overwritten)
        loads = self._halves.loads.take_orders()
        idle = not scheduler_output.num_scheduled_tokens
        return OffloadingConnectorMetadata(loads, stores, flush, idle)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Take in what the workers finished."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self.note(**meta.measures)
        if meta.unusable is not None:
            self._halves.fail(meta.unusable)
        self._halves.register_workers(meta.handshakes, in_step=True)
        self._health.update(meta.health)
        for job_id, result in meta.jobs.items():
            ended = self._jobs.end(job_id, result)
            if isinstance(ended, PendingLoad):
                self._halves.loads.ended(ended)
            elif ended is not None:
                self._halves.stores.ended(ended)

    def take_events(self) -> list[BlockEvent]:
        """What the tier came to hold and lost since the last call."""
        return self._context.kv_events.take()

    # -- ends --------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Never again find what was stored so far; stores under way end unfindable too. Or go on
        with all of it, where the operator says that weights don't change.

        False: loads of before are still under way, whose requests may use what they bring.
        """
        # An engine that sleeps gives its memory up next, and these are not read before. A copy
        # under way is done by then: vLLM waits for its device first.
        self._halves.stores.drop_last_offers()
        generation = self._context.generation
        if not generation.lasts:
            self._context.kv_events.lost(self._halves.manager.reset())
            self._halves.manager.clear(generation.renew())
            self._requests.reset()
        return not self.reqs_being_loaded

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Drop what is kept for a request; its transfers under way end on their own.

        `block_ids`: the blocks that it has yet, of each KV cache group. Never holds them back: the
        fence on reuse protects stores under way.
        """
        state = self._requests.get(request.request_id)
        if state is not None:
            self._halves.stores.request_finished(state, block_ids)
        self.note(**self._requests.forget(request.request_id))
        return False, None

    def shutdown(self) -> None:
        """Release the tier, which has nothing and wants nothing from now on."""
        self._halves.close()
