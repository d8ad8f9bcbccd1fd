"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

import logging
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
from tiers.connector.scheduler.loads import TierLoads
from tiers.connector.scheduler.manager import TierManager
from tiers.connector.scheduler.opening import NOT_OPEN, OnEvict, OpenTier
from tiers.connector.scheduler.requests import RequestState, RequestTable
from tiers.connector.scheduler.store_reservations import StoreReservations
from tiers.connector.scheduler.stores import TierStores
from tiers.connector.scheduler.tenant_quotas import Tenants
from tiers.connector.scheduler.tier_health import TierHealth
from tiers.errors import TierUnusable
from tiers.host.slots import SlotPool

logger = logging.getLogger(__name__)


OpenManager = Callable[[Sequence[WorkerHandshake], bool, OnEvict], OpenTier]
"""`TierOpener.open` for one tier."""


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
        self.load_cost = LoadCost(now)
        self.stats = TierStats()
        groups = BlockGroups(engine)
        self._context = TierContext(
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
        self._engine = engine
        self._requests = self._context.requests
        self._jobs = self._context.jobs
        self._health = self._context.health
        self._wait_budget = wait_budget
        self._admission = admission
        self._open_manager = open_manager
        self._handshakes: dict[int, WorkerHandshake] = {}
        self._told: dict[str, float] = {}
        self._overwritten: set[int] = set()
        self._manager: TierManager = NOT_OPEN.manager
        self._loads, self._stores = self._loads_of(NOT_OPEN), self._stores_of(NOT_OPEN)

    # -- opening -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Open the tier with what its workers said; another connector's words are ignored."""
        said = [one for one in metadata.values() if isinstance(one, WorkerHandshake)]
        self.register_workers({handshake.rank: handshake for handshake in said})

    def register_workers(
        self, handshakes: Mapping[int, WorkerHandshake], in_step: bool = False
    ) -> None:
        """Take what workers say of themselves; with the last of them the tier opens.

        `in_step`: the engine has begun to serve, so that opening may take a moment only.
        """
        self._handshakes.update(handshakes)
        if self._health.is_settled or len(self._handshakes) < self._engine.world_size:
            return
        ranks = [self._handshakes[rank] for rank in sorted(self._handshakes)]
        try:
            tier = self._open_manager(ranks, in_step, self._evicted)
        except TierUnusable as error:
            self._fail(str(error))
            return
        self._manager = tier.manager
        self._loads, self._stores = self._loads_of(tier), self._stores_of(tier)
        self._health.opened(tier.manager)

    def _loads_of(self, tier: OpenTier) -> TierLoads:
        return TierLoads(self._context, tier.manager, self._wait_budget, self.load_cost)

    def _stores_of(self, tier: OpenTier) -> TierStores:
        reservations = StoreReservations(tier, self._admission, self._health)
        return TierStores(self._context, tier.manager, reservations, self._admission.intake)

    def _fail(self, reason: str) -> None:
        if self._health.failed():
            logger.error(
                "tier %r is unusable and the chain goes on without it: %s", self.tier, reason
            )

    def _evicted(self, key: bytes) -> None:
        self._context.kv_events.evicted(key)
        self._context.tenants.gone((key,))

    # -- state -------------------------------------------------------------------------------

    @property
    def reqs_being_loaded(self) -> set[str]:
        """Requests with a load under way."""
        return self._jobs.requests_loading

    @property
    def pool(self) -> SlotPool:
        """The slots of the chain; none until the tier is open."""
        return self._stores.reservations.pool

    @property
    def slots_pinned(self) -> int:
        """Slots that blocks on their way into the tier hold."""
        return self._stores.reservations.slots_pinned

    @property
    def blocks_held(self) -> int:
        """Blocks that the tier keeps in slots."""
        return self._manager.slots_kept()

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
        gauges = self._jobs.gauges(self._stores.reservations.block_bytes) | self._health.gauges()
        if gauges != self._told:
            self._told = gauges
            stats.add(self.tier, **gauges)
        return None if stats.is_empty() else stats

    def has_pending_push_work(self) -> bool:
        """Whether a transfer will end soon whose end only a step can tell us of."""
        return bool(self._jobs) and (self._manager.completes_on_gather or self._jobs.any_loading)

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
        return self._loads.coverage(self._requests.state_of(request), blocks)

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks; load into them what was promised for it."""
        state = self._allocated(request, blocks)
        count = num_external_tokens // self._engine.block_tokens
        if count:
            first, found = state.match
            assert count <= found, f"{count} blocks to load of {found} found"
            self._loads.begin(state, list(range(first, first + count)), SharedLoad(1))
        self._loads.count(state, count)

    def load_blocks(
        self, request: Request, blocks: Blocks, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """Note the request's blocks; load into them this tier's part of a shared load."""
        state = self._allocated(request, blocks)
        mine = [block for part in ranges for block in part]
        self._loads.begin(state, mine, shared)
        self._loads.count(state, len(mine))

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
            self._manager.prefetch_lookup(state.lookup, state.keys)

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
        stores, flush = self._stores.orders(scheduled, overwritten)
        loads = self._loads.take_orders()
        idle = not scheduler_output.num_scheduled_tokens
        return OffloadingConnectorMetadata(loads, stores, flush, idle)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Take in what the workers finished."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self.note(**meta.measures)
        if meta.unusable is not None:
            self._fail(meta.unusable)
        self.register_workers(meta.handshakes, in_step=True)
        self._health.update(meta.health)
        for job_id, result in meta.jobs.items():
            ended = self._jobs.end(job_id, result)
            if isinstance(ended, PendingLoad):
                self._loads.ended(ended)
            elif ended is not None:
                self._stores.ended(ended)

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
        self._stores.drop_last_offers()
        generation = self._context.generation
        if not generation.lasts:
            self._context.kv_events.lost(self._manager.reset())
            self._manager.clear(generation.renew())
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
            self._stores.request_finished(state, block_ids)
        self.note(**self._requests.forget(request.request_id))
        return False, None

    def shutdown(self) -> None:
        """Release the tier, which has nothing and wants nothing from now on."""
        self._health.failed()
        manager, self._manager = self._manager, NOT_OPEN.manager
        manager.close()
