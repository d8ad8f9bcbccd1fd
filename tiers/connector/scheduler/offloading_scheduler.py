"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from spec.chain import ChainSpec, WarmSpec
from spec.offloading import LOADS_AT_ONCE, OffloadingSpec, StoreSpec
from tiers.connector.policy.block_loader import SharedLoad
from tiers.connector.policy.request_state import RequestState, lookup_seconds
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.policy.tenant_counts import tenant_of
from tiers.connector.scheduler.admission import Admission, Tenants
from tiers.connector.scheduler.jobs import Jobs, PendingLoad, PendingSlots, PendingStore
from tiers.connector.scheduler.kv_events import KVEvents, place_of
from tiers.connector.scheduler.open_tier import NOT_OPEN, TierOpener
from tiers.connector.scheduler.tier import Tier, TierRequest
from tiers.connector.scheduler.tier_hints import TierHints
from tiers.connector.scheduler.tier_manager import DOWN, TierManager
from tiers.connector.scheduler.tier_stores import TierStores
from tiers.connector.scheduler.warming import Warming
from tiers.contract.block_groups import MISSING
from tiers.contract.connector import SchedulerConnector
from tiers.contract.messages import (
    NO_LOOKUP_TIMES,
    JobResult,
    LoadItem,
    LoadJob,
    LookupTimes,
    MoveJob,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    Vacated,
    WorkerHandshake,
    items_of,
)
from tiers.contract.protocols import (
    NULL_BLOCK,
    BlockEvent,
    Blocks,
    ConnectorOutput,
    Request,
    SchedulerOutput,
)
from tiers.contract.stats import TierStats
from tiers.errors import TierUnusable
from tiers.host.slots import SlotPool
from tiers.loading.load_cost import LoadCost
from tiers.store import batch_blocks

LOOK_SECONDS = 0.1
"""Between two looks at gauges where nothing is measured: those of two tiers cost a step 16 us."""


class OffloadingScheduler(SchedulerConnector):
    """One tier, in the scheduler's process. Nothing here does I/O, or waits in a step that has
    something to compute."""

    def __init__(
        self,
        spec: OffloadingSpec,
        chain: ChainSpec,
        requests: RequestTable,
        opener: TierOpener,
        now: Callable[[], float],
    ) -> None:
        """`requests`, `opener`: of all tiers of the chain. `now`: seconds, never going back."""
        self.load_cost = LoadCost(now, getattr(spec, "loads_at_once", LOADS_AT_ONCE))
        self._requests, self._now = requests, now
        self._spec, self._chain, self._opener = spec, chain, opener
        admission = Admission(spec, now, len(chain.tiers) == 1, opener.size.step_blocks)
        tenants = Tenants(spec.tier_name, chain.tenants, chain.max_retained)
        events = KVEvents(place_of(spec), requests, chain.events.self_describing_kv_events)
        self._tier = tier = Tier(spec.tier_name, requests, admission, tenants, events)
        self._jobs = Jobs(requests.engine.world_size)
        self._hints = TierHints(tier, now)
        self._stores = TierStores(tier, self._jobs, self._hints, chain.promote)
        self._stores.is_paused = not spec.may_store
        self._loads: list[LoadJob] = []
        self._handshakes: dict[int, WorkerHandshake] = {}
        self._reported: dict[str, float] = {}
        self._look_at = 0.0
        self._is_news = False
        self._totals: dict[str, int] = {}
        self._warming: Warming | None = None

    def warm(
        self, spec: WarmSpec, target: OffloadingScheduler, or_else: Callable[[], bool]
    ) -> None:
        """Load into a host tier what was used last of this one, once both are open; `or_else` where
        this one does not know it."""
        self._warming = Warming(spec, self._tier, target._tier, self._jobs, self._now, or_else)

    def stop_warming(self) -> None:
        """Load nothing more for no request: the chain has changed."""
        if self._warming is not None:
            self._warming.stop("the chain has changed")

    # -- opening -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Open the tier with its workers' handshakes; those of another connector are ignored."""
        ours = [shake for shake in metadata.values() if isinstance(shake, WorkerHandshake)]
        self._register_workers({handshake.rank: handshake for handshake in ours})

    def _register_workers(
        self, handshakes: Mapping[int, WorkerHandshake], in_step: bool = False
    ) -> None:
        """Take in workers' handshakes; with the last of them the tier opens.

        `in_step`: the engine has begun to serve, so that opening may take a moment only.
        """
        self._handshakes.update(handshakes)
        self._tell_weights()
        known, needed = len(self._handshakes), self._requests.engine.world_size
        if self._tier.has_opened or known < needed:
            return
        ranks = [self._handshakes[rank] for rank in sorted(self._handshakes)]
        try:
            self._open(ranks, in_step)
        except TierUnusable as error:
            self._tier.failed(str(error))
        # The metrics learn of it by a step, which an engine without requests makes for that.
        self._is_news = not in_step

    def _open(self, handshakes: Sequence[WorkerHandshake], in_step: bool) -> None:
        args = self._chain, self._spec, handshakes, in_step, self._tier.evicted
        self._tier.opened(self._opener.open(*args))

    def _tell_weights(self) -> None:
        """Let the requests know what names the weights, if others find what this tier stores."""
        if isinstance(self._spec, StoreSpec):
            first = self._handshakes.get(0)
            self._requests.know_weights("" if first is None else first.weights)

    # -- changes of the chain ----------------------------------------------------------------

    def open_ahead(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Open the tier for these workers, by rank, on the calling thread: nobody uses it yet.
        Raises TierUnusable."""
        self._handshakes = {handshake.rank: handshake for handshake in handshakes}
        self._open(handshakes, in_step=False)
        if not self._tier.usable:  # the change was given up meanwhile
            self.shutdown()

    def retune(self, spec: OffloadingSpec, chain: ChainSpec) -> None:
        """Work by these settings from now on, and by those of its chain; see `Admission`.

        For another capacity all ranks are prepared (`OffloadingWorker.prepare_resize`), and have it
        with the orders of this step. A tier that has yet to open opens so. Does not wait: blocks
        beyond the capacity are evicted in the next steps, or beside them.
        """
        self._tier.tenants.follow(chain.tenants, chain.max_retained)
        self._stores.promote, self._stores.is_paused = chain.promote, not spec.may_store
        self._tier.admission.use(spec, len(chain.tiers) == 1)
        self.manager.retune(spec, lookup_seconds(chain.max_wait))
        if spec.capacity_bytes != self._spec.capacity_bytes:
            opened = self._opener.resize(self._tier.open, spec)
            if self._tier.usable:
                self._tier.open = opened
        self._spec, self._chain = spec, chain
        self._tell_weights()

    def drain(self) -> None:
        """Store and look up nothing more; what is in flight ends."""
        self._spec = self._spec.model_copy(update={"paused": "both"})
        self._stores.is_paused = True
        self._stores.drop_last_offers()
        self.stop_warming()

    # -- state -------------------------------------------------------------------------------

    @property
    def manager(self) -> TierManager:
        return self._tier.open.manager

    @property
    def pool(self) -> SlotPool:
        return self._tier.open.pool

    @property
    def is_up(self) -> bool:
        """Whether the tier is open, and loads or stores now."""
        return self._tier.usable and (self._tier.reads or self._tier.writes)

    @property
    def is_lost(self) -> bool:
        """Whether the tier never loads or stores again."""
        return self._tier.has_opened and not self._tier.usable

    def condition(self) -> tuple[str, str]:
        return self._tier.condition()

    @property
    def block_bytes(self) -> int:
        """Of a block, over all ranks that store a part of it; 0: it is not open."""
        return self._tier.open.block_bytes

    def room(self) -> tuple[int, int]:
        """Bytes that its blocks take, and that it may hold (0: no bound of ours), as of a moment
        ago. May be called by any thread."""
        manager = self.manager
        usage = manager.usage()
        capacity = self._spec.capacity_bytes if usage.capacity is None else usage.capacity
        return usage.used + manager.slots_kept() * self._opener.slot_bytes, capacity

    @property
    def jobs_in_flight(self) -> int:
        """Loads and stores that have not ended on all ranks."""
        return len(self._jobs)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[str, int]:
        return {self._spec.hit_source: num_external_tokens} if num_external_tokens else {}

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All: a load brings whatever the engine has a place for."""
        return tuple(range(len(self._requests.engine.kv_groups)))

    def count(self, **measures: float | list[float]) -> None:
        self._tier.count(**measures)

    def get_kv_connector_stats(self) -> TierStats | None:
        """What was measured since the last call; gauges only where they have changed."""
        tier, manager, now = self._tier, self.manager, self._now()
        if measures := tier.kv_events.take_measures():
            tier.count(**measures)
        if now < self._look_at and tier.stats.is_empty():
            return None
        self._look_at = now + LOOK_SECONDS
        totals = {"evictions": manager.evicted(), "tier_failures": manager.failures()}
        if totals != self._totals:
            tier.count(**(Counter(totals) - Counter(self._totals)))
            self._totals = totals
        used, capacity = self.room()
        gauges = self._jobs.gauges(tier.open.block_bytes) | tier.gauges()
        gauges |= {
            "capacity_bytes": float(capacity),
            "used_bytes": float(used),
            "shared": float(not manager.in_host_memory),
            "retained_blocks": float(len(self._hints)),
        }
        is_empty = gauges == self._reported and tier.stats.is_empty()
        stats, tier.stats = tier.stats, TierStats()
        if is_empty:
            return None
        # A log line of anything reports also how the tier does.
        self._reported = gauges
        stats.add(tier.name, gauges)
        return stats

    def has_pending_push_work(self) -> bool:
        """Whether only a step can report the end of a transfer that will end soon, how the tier
        opened, or events of before a restart."""
        ends_soon = self.manager.in_host_memory or self._jobs.any_loading
        has_news = self._is_news or self._tier.kv_events.is_announcing or self.manager.is_shrinking
        is_warming = self._warming is not None and self._warming.waits
        return (bool(self._jobs) and ends_soon) or has_news or is_warming

    def lookup_times(self, request: Request) -> LookupTimes:
        if (request_state := self._requests.get(request)) is None:
            return NO_LOOKUP_TIMES
        return self._tier.request(request_state).lookup.timer.times

    def why_nothing(self, request: Request) -> str:
        here = self.manager.health()
        request_state = self._requests.get(request)
        tier_request = None if request_state is None else self._tier.request(request_state)
        if not self._tier.usable:
            return "not_open"
        if not (self._tier.reads and here.reads):
            return "down"
        if tier_request is not None and tier_request.recompute:
            return "failed_before"
        if tier_request is not None and tier_request.lookup.is_unanswered:
            return "late"
        if not here.reads_up:
            return "failed"
        return "" if self._tier.tenants.may_keep(tenant_of(request)) else "tenant"

    # -- looking up --------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Begin to look a request up, where the tier can't answer at once."""
        if not (self._tier.usable and self._spec.may_load and self._requests.ready(request)):
            return
        request_state = self._requests.of(request)
        keys = self._requests.keys(request_state)
        if keys and request_state.limits.may_load(self._tier.name):
            self.manager.prefetch_lookup(self._tier.request(request_state).lookup, keys)

    def coverage(self, request_state: RequestState, blocks: range) -> Sequence[int] | None:
        requests, tier_request = self._requests, self._tier.request(request_state)
        timer = tier_request.lookup.timer
        if not self._tier.reads:
            timer.went_down(self._now())
            return [MISSING] * len(blocks)
        asked = range(blocks.start, min(requests.loadable(request_state), blocks.stop))
        if tier_request.recompute or not asked:
            return [MISSING] * len(blocks)
        began = self._now()
        size = len(requests.groups)
        numbers = range(asked.start * size, asked.stop * size)
        keys = requests.keys(request_state)
        parts = self._tier.open.manager.coverage(tier_request.lookup, keys, numbers)
        if parts is None:
            timer.asked(began, self._now())
            return None
        timer.answered(began, self._now())
        if not tier_request.answered:
            tier_request.answered = True
            if tier_request.lookup.is_unanswered:
                self._tier.count(lookup_timeouts=1)
        levels = requests.groups.coverage(parts)
        return [*levels, *[MISSING] * (len(blocks) - len(asked))] if asked != blocks else levels

    def version(self, request_state: RequestState) -> int | None:
        tier_request = self._tier.request(request_state)
        if not self._tier.reads or tier_request.recompute:
            return DOWN
        return self._tier.open.manager.version(
            tier_request.lookup, self._requests.keys(request_state)
        )

    # -- loading -----------------------------------------------------------------------------

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """The request begins without a load from this tier; see `load_blocks`."""
        assert not num_external_tokens, "a tier of ours loads blocks, not tokens"
        self._begins(self._tier.request(self._requests.of(request)), 0)

    def load_blocks(
        self, request_state: RequestState, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """Load this tier's part of a shared load, into the blocks that the request has by now."""
        tier_request = self._tier.request(request_state)
        blocks = [block for part in ranges for block in part]
        numbers, targets = self._parts(request_state, blocks)
        keys = [request_state.keys[number] for number in numbers]
        items = items_of(LoadItem, keys, targets, self.manager.prepare_load(keys))
        # Within what the request may still wait, and what the load is worth.
        seconds = min(request_state.wait_budget.left(), request_state.choice.within)
        name, tag = request_state.request.request_id, self._requests.generation.tag
        place = self.manager.place(request_state.keys, numbers)
        first = None
        if shared.all_or_nothing:
            first = request_state.tables[0][request_state.load_range.start]
        job = LoadJob(self._jobs.next_id(), name, items, seconds, tag, place, first)
        size = len(self._requests.groups)
        of_block = [number // size for number in numbers] if size > 1 else numbers
        step = self._requests.step.number + 1
        self._jobs.begin(PendingLoad(job, tier_request, blocks, of_block, shared), step)
        self._loads.append(job)
        self.load_cost.began(job.job_id, self._tokens(len(blocks)))
        self._begins(tier_request, len(blocks))

    def missed(self, steps: Set[int]) -> None:
        for pending in self._jobs.of_steps(steps, self._requests.step.number + 1):
            job, ranks = pending.job, self._requests.engine.world_size
            if isinstance(pending, PendingLoad):
                self._loads.append(pending.job)
            else:
                self._take_end(job.job_id, JobResult(ranks, {*range(len(job.items))}))

    def _parts(self, request_state: RequestState, blocks: list[int]) -> tuple[list[int], list[int]]:
        """The number of the key, and the paged block, of each part of these blocks that the engine
        has a place for."""
        groups = self._requests.groups
        if groups.is_plain:
            (table,) = request_state.tables
            return blocks, [table[b] for b in blocks]
        numbers: list[int] = []
        targets: list[int] = []
        for block in blocks:
            for part, paged in enumerate(groups.paged(request_state.tables, block)):
                if paged != NULL_BLOCK or not groups.window:
                    numbers.append(block * len(groups) + part)
                    targets.append(paged)
        return numbers, targets

    def _begins(self, tier_request: TierRequest, blocks: int) -> None:
        """The engine begins a request, which loads `blocks` blocks from this tier.

        Requests are counted, not calls: one that waits for room is asked about in every step. As
        in the engine's own metrics of its hits, one that it has preempted does not count again.
        """
        lookup, tier = tier_request.lookup, self._tier
        lookup.cancel()
        if not getattr(tier_request.request_state.request, "num_preemptions", 0):
            is_lookup = tier_request.answered and not tier_request.looked_up
            is_hit = bool(blocks) and not tier_request.hit
            if is_lookup or blocks:
                tokens = self._tokens(blocks)
                tier.count(lookups=int(is_lookup), hits=int(is_hit), hit_tokens=tokens)
                tenant = tenant_of(tier_request.request_state.request)
                self._requests.tenants.count(tenant, tenant_hit_tokens=tokens)
            if is_lookup:
                times = lookup.timer.times
                tier.count(lookup_seconds=[times.answer], lookup_notice_seconds=[times.notice])
            tier_request.looked_up |= is_lookup
            tier_request.hit |= is_hit
        lookup.timer.begin()

    def _load_ended(self, load: PendingLoad) -> None:
        """Take in that a load has ended on all ranks."""
        job, result, tier_request = load.job, load.result, load.tier_request
        failed = {load.of_block[index] for index in result.failed}
        arrived = self._tokens(len(load.blocks) - len(failed))
        excused = result.late or result.outdated
        # Of a worker that was stopped meanwhile it may be hours, of which the tier took no more.
        seconds = min(result.seconds, job.seconds)
        self.load_cost.ended(job.job_id, seconds, not failed, arrived, excused)
        self._tier.count(**self.load_cost.gauges())
        self.manager.complete_load([i.slot for i in job.items])
        lost = [job.items[index].key for index in sorted(result.lost)]
        self.manager.loaded(len(result.failed) < len(job.items), lost)
        self._tier.lost(lost)
        self._hints.lost(lost)
        tier_request.recompute |= bool(result.failed)
        # Loads in waves reverse the order of use: it is restored with the next offer.
        tier_request.order.stale |= not self._stores.promote
        if load.blocks:
            load.shared.notes.part_ended(
                load.blocks[0], min(failed, default=None), len(lost), result.times
            )
        if failed and (self._requests.engine.all_or_nothing_loads or load.shared.all_or_nothing):
            failed.add(0)
        request_state, tenants = tier_request.request_state, self._requests.tenants
        tenant = tenant_of(request_state.request)
        tenants.count(tenant, tenant_loaded_bytes=result.bytes)
        count = partial(self._count_loaded, request_state)
        if (of_use := load.shared.end(load.blocks, failed, count)) is not None:
            request_state.wait_budget.loaded()
            request_state.in_vain = not of_use
            tenants.count(tenant, tenant_load_seconds=self._now() - load.shared.began)

    def _count_loaded(self, request_state: RequestState, blocks: int) -> None:
        tokens, request = self._tokens(blocks), request_state.request
        # As the engine counts what it had cached of a prompt: when that begins first.
        again = bool(getattr(request, "num_preemptions", 0))
        self._tier.count(**{"reloaded_tokens" if again else "loaded_tokens": tokens})
        self._requests.tenants.loaded(tenant_of(request), tokens, again)
        if tokens and not again:
            request_state.cached[self._tier.name] = tokens

    def _tokens(self, blocks: int) -> int:
        return blocks * self._requests.engine.block_tokens

    # -- steps -------------------------------------------------------------------------------

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> OffloadingConnectorMetadata:
        self._is_news = False
        self.load_cost.stepped()
        stores, flush = self._stores.orders(self._requests.step)
        loads, self._loads = self._loads, []
        idle = not scheduler_output.num_scheduled_tokens
        if idle:
            self._look_at = 0.0  # it may be the last step for long
            self.manager.wait_a_moment()
        fills: list[LoadJob] = []
        if self._warming is not None:
            fills = self._warming.orders(idle, self._jobs.any_loading)
        one_writer = self._tier.open.one_writer
        orders = OffloadingConnectorMetadata(loads, stores, fills, flush, idle, one_writer)
        if self.manager.in_host_memory:
            self._shrink(orders)
        return orders

    def _shrink(self, orders: OffloadingConnectorMetadata) -> None:
        """Have slots given back that the host pool has no more: a step's part of it."""
        pool, part = self.pool, self._opener.slot_bytes // self._requests.engine.world_size
        most = 0 if self._jobs.any_into_slots else batch_blocks(max(1, part))
        if moves := self.manager.shrink(most):
            orders.moves = MoveJob(self._jobs.next_id(), [*moves])
            self._jobs.begin(PendingSlots(orders.moves), self._requests.step.number)
        if (slots := pool.take_vacated()) is not None:
            orders.vacated = Vacated(slots, pool.resizes)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self._tier.count(**meta.measures)
        if meta.unusable is not None:
            self._tier.failed(meta.unusable)
        self._register_workers(meta.handshakes, in_step=True)
        self._tier.update(meta.health)
        for job_id, result in meta.jobs.items():
            self._take_end(job_id, result)

    def _take_end(self, job_id: int, result: JobResult) -> None:
        ended = self._jobs.end(job_id, result)
        if isinstance(ended, PendingLoad):
            self._load_ended(ended)
        elif isinstance(ended, PendingStore):
            self._stores.ended(ended)
        elif ended is not None:
            job, whole = ended.job, ended.result
            if isinstance(job, MoveJob):
                self.manager.moved(job.items, whole.failed)
            elif self._warming is not None:
                self._warming.ended(job, whole)

    def take_events(self) -> list[BlockEvent]:
        return self._tier.kv_events.take()

    # -- ends --------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Never again find what was stored so far; stores in flight end unfindable too. Or go on
        with all of it, where the operator configured that weights don't change.

        False: loads of before are still in flight, whose requests may use what they bring.
        """
        # An engine that sleeps gives its memory up next, and these are not read before. A copy
        # in flight is done by then: vLLM waits for its device first.
        self._stores.drop_last_offers()
        if not self._requests.generation.lasts:
            self.weights_changed()
        return not self._jobs.any_loading

    def weights_changed(self) -> None:
        """Begin the next generation, whatever `on_reset` is."""
        self._stores.drop_last_offers()
        self._hints.forget()
        self.manager.reset()
        self.manager.clear(self._requests.generation.renew())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Drop what is kept for a request; its transfers in flight end later.

        `block_ids`: the blocks that it has yet, of each KV cache group. Never holds them back: the
        fence on reuse protects stores in flight.
        """
        request_state = self._requests.get(request)
        if request_state is not None:
            tier_request = self._tier.request(request_state)
            self._stores.request_finished(tier_request, block_ids)
            tier_request.lookup.cancel()
        return False, None

    def shutdown(self) -> None:
        """Release the tier, which has nothing and wants nothing from now on."""
        self._tier.ended()
        self._tier.kv_events.keep_in(None)
        opened, self._tier.open = self._tier.open, NOT_OPEN
        opened.manager.close()
