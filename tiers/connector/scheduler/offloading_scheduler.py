"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec.offloading import OffloadingSpec
from tiers.connector.policy.block_loader import SharedLoad
from tiers.connector.policy.request_state import RequestState, RequestTable
from tiers.connector.scheduler.admission import Admission, Tenants, tenant_of
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.jobs import Jobs, PendingLoad
from tiers.connector.scheduler.kv_events import KVEvents, place_of
from tiers.connector.scheduler.open_tier import NOT_OPEN, OpenManager
from tiers.connector.scheduler.tier_health import TierHealth
from tiers.connector.scheduler.tier_hints import TierHints
from tiers.connector.scheduler.tier_loads import TierLoads
from tiers.connector.scheduler.tier_manager import DOWN
from tiers.connector.scheduler.tier_stores import TierStores
from tiers.contract.connector import SchedulerConnector
from tiers.contract.messages import (
    NO_LOOKUP_TIMES,
    LookupTimes,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    WorkerHandshake,
)
from tiers.contract.protocols import BlockEvent, Blocks, ConnectorOutput, Request, SchedulerOutput
from tiers.contract.stats import TierStats
from tiers.errors import TierUnusable
from tiers.host.slots import SlotPool
from tiers.loading.load_cost import LoadCost


class OffloadingScheduler(SchedulerConnector):
    """One tier, in the scheduler's process. Nothing here does I/O, or waits in a step that has
    something to compute."""

    def __init__(
        self,
        spec: OffloadingSpec,
        requests: RequestTable,
        open_manager: OpenManager,
        admission: Admission,
        tenants: Tenants,
        promote: bool,
        describes: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requests`: those of all tiers of a chain. `promote`: see `TierContext`. `describes`: see
        `KVEvents`."""
        self.tier = spec.tier_name
        self._hit_source = spec.hit_source
        self.load_cost = LoadCost(now)
        self.stats = TierStats()
        engine, generation = requests.engine, requests.generation
        context = TierContext(
            self.tier,
            requests,
            promote,
            Jobs(engine.world_size, generation),
            TierHealth(self.tier),
            tenants,
            KVEvents(place_of(spec), requests, describes),
            self.note,
        )
        self._context, self._requests = context, requests
        self._jobs, self._health = context.jobs, context.health
        self._open_manager = open_manager
        self._loads = TierLoads(context, self.load_cost, now)
        self._hints = TierHints(context, now)
        self._stores = TierStores(context, admission, self._hints)
        self._handshakes: dict[int, WorkerHandshake] = {}
        capacity = getattr(spec, "capacity", None)
        self._capacity = capacity if isinstance(capacity, int) else 0
        self._told: dict[str, float] = {}
        self._is_news = False
        self._evicted_seen = 0

    # -- opening -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Open the tier with what its workers said; another connector's words are ignored."""
        said = [one for one in metadata.values() if isinstance(one, WorkerHandshake)]
        self._register_workers({handshake.rank: handshake for handshake in said})

    def _register_workers(
        self, handshakes: Mapping[int, WorkerHandshake], in_step: bool = False
    ) -> None:
        """Take what workers say of themselves; with the last of them the tier opens.

        `in_step`: the engine has begun to serve, so that opening may take a moment only.
        """
        self._handshakes.update(handshakes)
        known, needed = len(self._handshakes), self._requests.engine.world_size
        if self._health.is_settled or known < needed:
            return
        ranks = [self._handshakes[rank] for rank in sorted(self._handshakes)]
        try:
            self._context.open = self._open_manager(ranks, in_step, self._evicted)
        except TierUnusable as error:
            self._health.failed(str(error))
        else:
            self._context.kv_events.keep_in(self._context.open.inventory)
            self._health.opened()
        # The metrics learn of it by a step, which an engine without requests makes for that.
        self._is_news = not in_step

    def _evicted(self, key: bytes) -> None:
        self._context.kv_events.evicted(key)
        self._context.tenants.gone((key,))

    # -- state -------------------------------------------------------------------------------

    @property
    def pool(self) -> SlotPool:
        """The slots of the chain; none until the tier is open."""
        return self._context.open.pool

    @property
    def is_up(self) -> bool:
        """Whether the tier is open, and loads or stores now."""
        health = self._health
        return health.usable and (health.reads or health.writes)

    @property
    def is_lost(self) -> bool:
        """Whether the tier never loads or stores again."""
        return self._health.is_settled and not self._health.usable

    @property
    def slots_pinned(self) -> int:
        """Slots that blocks on their way into the tier hold."""
        return self._stores.reservations.slots_pinned

    @property
    def blocks_held(self) -> int:
        """Blocks that the tier keeps in slots."""
        return self._context.open.manager.slots_kept()

    @property
    def jobs_in_flight(self) -> int:
        """Loads and stores that have not ended on all ranks."""
        return len(self._jobs)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[str, int]:
        return {self._hit_source: num_external_tokens} if num_external_tokens else {}

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All: a load brings whatever the engine has a place for."""
        return tuple(range(len(self._requests.engine.kv_groups)))

    def note(self, **measures: float | list[float]) -> None:
        """Add to the tier's measures."""
        self.stats.add(self.tier, **measures)

    def get_kv_connector_stats(self) -> TierStats | None:
        """What was measured since the last call; gauges only where they have changed."""
        stats, self.stats = self.stats, TierStats()
        if measures := self._context.kv_events.take_measures():
            stats.add(self.tier, **measures)
        tier = self._context.open
        if evicted := tier.manager.evicted() - self._evicted_seen:
            self._evicted_seen += evicted
            stats.add(self.tier, evictions=max(0, evicted))
        gauges = self._jobs.gauges(tier.block_bytes) | self._health.gauges(tier.manager.health())
        gauges |= self._room() | {"retained_blocks": len(self._hints)}
        # A log line of anything says also how the tier does.
        if gauges != self._told or not stats.is_empty():
            self._told = gauges
            stats.add(self.tier, **gauges)
        return None if stats.is_empty() else stats

    def _room(self) -> dict[str, float]:
        tier = self._context.open
        usage = tier.manager.usage()
        capacity = self._capacity if usage.capacity is None else usage.capacity
        used = usage.used + tier.manager.slots_kept() * tier.slot_bytes
        return {"capacity_bytes": float(capacity), "used_bytes": float(used)}

    def has_pending_push_work(self) -> bool:
        """Whether a transfer will end soon whose end only a step can tell us of, or events of
        before a restart are to be told, or how the tier opened."""
        ends_soon = self._context.open.manager.completes_on_gather or self._jobs.any_loading
        to_tell = self._is_news or self._context.kv_events.is_announcing
        return (bool(self._jobs) and ends_soon) or to_tell

    def lookup_times(self, request: Request) -> LookupTimes:
        """See `Explained`."""
        request_state = self._requests.get(request)
        return (
            NO_LOOKUP_TIMES
            if request_state is None
            else self._context.tier_request(request_state).lookup.timer.times
        )

    def why_nothing(self, request: Request) -> str:
        """Why the tier covers no block of a request: a word of `tiers.explain.accounts.REASONS`;
        empty: it was asked, and has none."""
        here = self._context.open.manager.health()
        request_state = self._requests.get(request)
        tier_request = None if request_state is None else self._context.tier_request(request_state)
        if not self._health.usable:
            return "not_open"
        if not (self._health.reads and here.reads):
            return "down"
        if tier_request is not None and tier_request.recompute:
            return "failed_before"
        if tier_request is not None and tier_request.lookup.is_unanswered:
            return "late"
        if not here.reads_up:
            return "failed"
        return "" if self._context.tenants.may_keep(tenant_of(request)) else "tenant"

    # -- loading -----------------------------------------------------------------------------

    def coverage(self, request_state: RequestState, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks the tier could load; None: ask again."""
        return self._loads.coverage(self._context.tier_request(request_state), blocks)

    def version(self, request_state: RequestState) -> int | None:
        """What `coverage` says of a request is the same while this is; None: it is not known."""
        return (
            self._loads.version(self._context.tier_request(request_state))
            if self._health.reads
            else DOWN
        )

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """The request begins without a load from this tier; see `load_blocks`."""
        assert not num_external_tokens, "a tier of ours loads blocks, not tokens"
        self._begins(self._requests.of(request), 0)

    def load_blocks(
        self, request_state: RequestState, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """Load this tier's part of a shared load, into the blocks that the request has by now."""
        mine = [block for part in ranges for block in part]
        self._loads.begin(self._context.tier_request(request_state), mine, shared)
        self._begins(request_state, len(mine))

    def _begins(self, request_state: RequestState, blocks: int) -> None:
        tier_request = self._context.tier_request(request_state)
        tier_request.lookup.cancel()
        self._loads.count(tier_request, blocks)
        tier_request.lookup.timer.begin()

    def on_new_request(self, request: Request) -> None:
        """Begin to find out what the tier has of a request, if it can't tell at once."""
        if not self._health.usable or not self._requests.ready(request):
            return
        request_state = self._requests.of(request)
        keys = self._requests.keys(request_state)
        if keys and request_state.limits.may_load(self.tier):
            self._context.open.manager.prefetch_lookup(
                self._context.tier_request(request_state).lookup, keys
            )

    # -- steps -------------------------------------------------------------------------------

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> OffloadingConnectorMetadata:
        self._is_news = False
        self.load_cost.stepped()
        stores, flush = self._stores.orders(self._requests.step)
        loads = self._loads.take_orders()
        idle = not scheduler_output.num_scheduled_tokens
        if idle:
            self._context.open.manager.wait_a_moment()
        one_writer = self._context.open.one_writer
        return OffloadingConnectorMetadata(loads, stores, flush, idle, one_writer)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self.note(**meta.measures)
        if meta.unusable is not None:
            self._health.failed(meta.unusable)
        self._register_workers(meta.handshakes, in_step=True)
        self._health.update(meta.health)
        for job_id, result in meta.jobs.items():
            ended = self._jobs.end(job_id, result)
            if isinstance(ended, PendingLoad):
                self._loads.ended(ended)
            elif ended is not None:
                self._stores.ended(ended)

    def take_events(self) -> list[BlockEvent]:
        return self._context.kv_events.take()

    # -- ends --------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Never again find what was stored so far; stores in flight end unfindable too. Or go on
        with all of it, where the operator says that weights don't change.

        False: loads of before are still in flight, whose requests may use what they bring.
        """
        # An engine that sleeps gives its memory up next, and these are not read before. A copy
        # in flight is done by then: vLLM waits for its device first.
        self._stores.drop_last_offers()
        if not self._requests.generation.lasts:
            self.weights_changed()
        return not self._jobs.any_loading

    def weights_changed(self) -> None:
        """Begin the next generation, whatever the operator says of resets."""
        self._stores.drop_last_offers()
        self._hints.forget()
        self._context.kv_events.lost(self._context.open.manager.reset())
        self._context.open.manager.clear(self._requests.generation.renew())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Drop what is kept for a request; its transfers in flight end on their own.

        `block_ids`: the blocks that it has yet, of each KV cache group. Never holds them back: the
        fence on reuse protects stores in flight.
        """
        request_state = self._requests.get(request)
        if request_state is not None:
            tier_request = self._context.tier_request(request_state)
            self._stores.request_finished(tier_request, block_ids)
            tier_request.lookup.cancel()
            self.note(**Counter(tier_request.refused.values()))
            tier_request.cut, tier_request.refused = (
                tier_request.behind,
                {},
            )  # what it offers last is behind those
        return False, None

    def shutdown(self) -> None:
        """Release the tier, which has nothing and wants nothing from now on."""
        self._health.ended()
        self._context.kv_events.keep_in(None)
        opened, self._context.open = self._context.open, NOT_OPEN
        opened.manager.close()
