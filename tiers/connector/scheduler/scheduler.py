"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.coverage import MISSING, usable
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.contract.generation import Generation
from tiers.connector.contract.messages import (
    BlockEvent,
    JobResult,
    LoadItem,
    LoadJob,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StoreItem,
    StoreJob,
    WorkerHandshake,
)
from tiers.connector.contract.protocols import Blocks, ConnectorOutput, Request, SchedulerOutput
from tiers.connector.contract.stats import TierStats
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.shared_load import SharedLoad
from tiers.connector.policy.wait_budget import WaitBudget
from tiers.connector.scheduler.admission import Admission
from tiers.connector.scheduler.jobs import Jobs, PendingLoad, PendingStore
from tiers.connector.scheduler.kv_events import KVEvents
from tiers.connector.scheduler.manager import TierManager
from tiers.connector.scheduler.requests import Offers, RequestState, RequestTable, Scheduled
from tiers.connector.scheduler.store_reservations import FOR_ROOM, StoreReservations
from tiers.connector.scheduler.tenant_quotas import Tenants, tenant_of
from tiers.errors import TierUnusable
from tiers.host.slots import SlotPool
from tiers.wrappers.guard import Health

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRIES = 256
"""Blocks, of all requests, that a step offers again at most: half a millisecond's work."""

OpenManager = Callable[[Sequence[WorkerHandshake], bool], tuple[TierManager, SlotPool]]
"""Opens a tier once every worker has said hello, perhaps in a step. Raises TierUnusable."""


class OffloadingScheduler:
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
    ) -> None:
        """`generation` and `wait_budget` are those of all tiers of a chain; see `RequestTable`."""
        self.tier = tier
        self.load_cost = LoadCost(now)
        self.stats = TierStats()
        self._told: dict[str, float] = {}
        self._engine = engine
        self._open_manager = open_manager
        self._manager: TierManager | None = None
        self._unusable = False
        self._handshakes: dict[int, WorkerHandshake] = {}
        self._jobs = Jobs(engine.world_size, generation)
        self._loads: list[LoadJob] = []
        self._claims = StoreReservations(admission)
        self._wait_budget = wait_budget
        self._health: dict[int, Health] = {}
        self._overwritten: set[int] = set()
        self._last_offers: list[tuple[RequestState, Offers]] = []
        self._tenants = tenants
        self._retries = RETRIES
        self._generation = generation
        self._parts = BlockGroups(engine)
        self._promote = promote
        self._requests = RequestTable(engine, self._parts, self._generation, promote, prompt_only)
        self._kv_events = KVEvents(tier, engine, self._parts, generation)

    # -- opening -----------------------------------------------------------------------------

    def register_workers(
        self, handshakes: Mapping[int, WorkerHandshake], in_step: bool = False
    ) -> None:
        """Take what workers say of themselves; with the last of them the tier opens.

        `in_step`: the engine has begun to serve, so that opening may take a moment only.
        """
        self._handshakes.update(handshakes)
        if self._manager or self._unusable or len(self._handshakes) < self._engine.world_size:
            return
        try:
            ranks = [self._handshakes[rank] for rank in sorted(self._handshakes)]
            self._manager, self._claims.pool = self._open_manager(ranks, in_step)
            self._manager.on_evict = self._evicted
            self._claims.block_bytes = sum(handshake.payload_bytes for handshake in ranks)
        except TierUnusable as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        if not self._unusable:
            logger.error(
                "tier %r is unusable and the chain goes on without it: %s", self.tier, reason
            )
        self._unusable = True

    @property
    def reqs_being_loaded(self) -> set[str]:
        """Requests with a load under way."""
        return self._jobs.requests_loading

    @property
    def blocks_being_stored(self) -> int:
        """Blocks on their way into the tier."""
        return len(self._claims)

    @property
    def pool(self) -> SlotPool:
        """The slots of the chain; none until the tier is open."""
        return self._claims.pool

    @property
    def slots_pinned(self) -> int:
        """Slots that those blocks hold."""
        return self._claims.slots_pinned

    def take_stats(self) -> TierStats:
        """What was measured since the last call; gauges only where they have changed."""
        stats, self.stats = self.stats, TierStats()
        if self._kv_events.evictions:
            stats.add(self.tier, evictions=self._kv_events.evictions)
            self._kv_events.evictions = 0
        gauges = self._under_way()
        if gauges != self._told:
            self._told = gauges
            stats.add(self.tier, **gauges)
        return stats

    def _under_way(self) -> dict[str, float]:
        gauges = self._jobs.gauges(self._claims.block_bytes)
        if self._manager is not None:
            each = [self._manager.health(), *self._health.values()]
            gauges["reads_up"] = float(all(one.reads_up for one in each))
            gauges["writes_up"] = float(all(one.writes_up for one in each))
        return gauges

    @property
    def blocks_held(self) -> int:
        """Blocks that the tier keeps in slots."""
        return 0 if self._manager is None else self._manager.slots_kept()

    @property
    def jobs_under_way(self) -> int:
        """Loads and stores that have not ended on all ranks."""
        return len(self._jobs)

    @property
    def requests_known(self) -> int:
        """Requests that have not finished."""
        return len(self._requests)

    @property
    def group_ids(self) -> tuple[int, ...]:
        """The engine's KV cache groups."""
        return tuple(range(len(self._engine.kv_groups)))

    def must_step(self) -> bool:
        """Whether a transfer will end soon whose end only a step can tell us of."""
        if self._manager is None:
            return False
        return bool(self._jobs) and (self._manager.completes_on_gather or self._jobs.any_loading)

    # -- loading -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones the tier could load; None: ask again."""
        if not self._engine.media.ready(request):
            return None, False  # also where it loads nothing, since its marks come before its KV
        if self._manager is None or not self._is_readable():
            return 0, False
        state = self._requests.state_of(request)
        first, rest = divmod(num_computed_tokens, self._engine.block_tokens)
        stop = self._requests.stop(state, first)
        if rest or stop <= first or state.recompute:
            return 0, False
        found = self._timed(state, partial(self._lookup, self._manager, state, range(first, stop)))
        if found is None:
            return None, False
        if self._engine.drops_last:
            found = max(0, min(found, stop - first) - 1)
        state.match = (first, found)
        return found * self._engine.block_tokens, found > 0

    def _is_readable(self) -> bool:
        """Whether it may be looked up: not where a worker's loads would fail at once."""
        return not self._unusable and all(one.reads for one in self._health.values())

    def _timed(self, state: RequestState, ask: Callable[[], T | None]) -> T | None:
        """Ask the tier; its first answer of a request took so long since it was first asked."""
        now = time.perf_counter()
        asked = now if state.asked is None else state.asked
        answer = ask()
        state.asked = asked if answer is None else None
        if answer is not None and not state.answered:
            state.answered = True
            self.stats.add(self.tier, lookup_seconds=[time.perf_counter() - asked])
        return answer

    def _lookup(self, manager: TierManager, state: RequestState, blocks: range) -> int | None:
        """Leading blocks of these that the tier could load; None: not known yet."""
        if self._parts.window:
            held = self._held(manager, state, blocks)
            return held if held is None else usable(held, self._parts.window)
        start = blocks.start * len(self._parts)
        found = manager.lookup(state.request.request_id, start, state.keys_from(start))
        return found if found is None else found // len(self._parts)

    def _held(
        self, manager: TierManager, state: RequestState, blocks: range
    ) -> Sequence[int] | None:
        size = len(self._parts)
        start = blocks.start * size
        keys = state.keys_from(start)
        parts = manager.held(state.request.request_id, start, keys, len(blocks) * size)
        return None if parts is None else self._parts.held(parts)

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks; load into them what was promised for it."""
        state = self._allocated(request, blocks)
        count = 0
        if num_external_tokens and self._manager is not None:
            first, found = state.match
            count = num_external_tokens // self._engine.block_tokens
            assert 0 < count <= found, f"{count} blocks to load of {found} found"
            self._load(self._manager, state, list(range(first, first + count)), SharedLoad(1))
        self._count(state, count)

    def holds(self, request: Request, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks the tier could load; None: ask again."""
        if not self._engine.media.ready(request):
            return None
        state = self._requests.state_of(request)
        stop = self._requests.stop(state, blocks.start)
        if self._manager is None or not self._is_readable():
            return [MISSING] * len(blocks)
        if state.recompute or stop <= blocks.start:
            return [MISSING] * len(blocks)
        asked = range(blocks.start, min(stop, blocks.stop))
        held = self._timed(state, partial(self._held, self._manager, state, asked))
        return held if held is None else [*held, *[MISSING] * (len(blocks) - len(asked))]

    def load_blocks(
        self, request: Request, blocks: Blocks, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """Note the request's blocks; load into them this tier's part of a shared load."""
        state = self._allocated(request, blocks)
        assert self._manager is not None, "blocks to load from a tier that held none"
        mine = [block for part in ranges for block in part]
        self._load(self._manager, state, mine, shared)
        self._count(state, len(mine))

    def _count(self, state: RequestState, blocks: int) -> None:
        """Count a request that the engine begins, which loads so many blocks from this tier.

        Requests are counted, not calls: one that waits for room is asked about in every step. As
        in the engine's own metrics of its hits, one that it has preempted does not count again.
        """
        if getattr(state.request, "num_preemptions", 0):
            return
        lookup, hit = state.answered and not state.looked_up, bool(blocks) and not state.hit
        if lookup or hit or blocks:
            tokens = blocks * self._engine.block_tokens
            self.stats.add(self.tier, lookups=int(lookup), hits=int(hit), hit_tokens=tokens)
        state.looked_up |= lookup
        state.hit |= hit

    def _allocated(self, request: Request, blocks: Blocks) -> RequestState:
        state = self._requests.state_of(request)
        state.tables = tuple(list(table) for table in blocks.get_block_ids())
        state.asked, state.computed = None, 0
        # Another tier may load into these blocks while this one still reads what they held.
        self._overwritten.update(*state.tables)
        return state

    def _load(
        self, manager: TierManager, state: RequestState, blocks: list[int], shared: SharedLoad
    ) -> None:
        of_block, keys, targets = self._requests.to_load(state, blocks)
        slots = manager.prepare_load(keys)
        items = list(map(LoadItem, keys, targets, slots))
        request_id = state.request.request_id
        job = self._jobs.load(
            request_id,
            items,
            self._wait_budget.left(request_id),
            blocks=blocks,
            of_block=of_block,
            shared=shared,
        )
        self._loads.append(job)
        self.load_cost.began(job.job_id, len(blocks) * self._engine.block_tokens)

    def on_new_request(self, request: Request) -> None:
        """Begin to find out what the tier has of a request, if it can't tell at once."""
        if not self._engine.media.ready(request):
            return
        if self._manager is not None and not self._unusable:
            state = self._requests.state_of(request)
            if state.keys and state.limits.may_load(self.tier):
                self._manager.expect(request.request_id, state.keys)

    # -- storing -----------------------------------------------------------------------------

    def disable_store(self, request: Request) -> None:
        """Never offer its blocks."""
        self._requests.state_of(request).store = False

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Orders for the workers of this step."""
        overwritten, self._overwritten = self._overwritten, set()
        self._retries = RETRIES
        self._claims.admission.intake.look()
        scheduled = self._requests.scheduled(output, overwritten)
        stores = [job for one in scheduled if (job := self._offer(one)) is not None]
        stores += self._store_last(overwritten)
        flush = self._claims.readers(overwritten)
        self._claims.begin(stores)
        loads, self._loads = self._loads, []
        return OffloadingConnectorMetadata(loads, stores, flush, not output.num_scheduled_tokens)

    def _offer(self, scheduled: Scheduled) -> StoreJob | None:
        """Store what the step completes: full blocks of known tokens that the tier wants."""
        state = scheduled.state
        if self._manager is None or not self._may_store(state):
            return None
        manager = self._manager
        items = self._offer_again(manager, scheduled) | self._offer_new(manager, scheduled)
        return self._begin_store(state, items)

    def _may_store(self, state: RequestState) -> bool:
        if self._manager is None or self._unusable or not state.stores:
            return False
        return self._tenants.may_keep(tenant_of(state.request))

    def _begin_store(self, state: RequestState, items: dict[int, StoreItem]) -> StoreJob | None:
        if not items:
            return None
        state.order.under_way += 1
        at_once = len(items) == state.offered * len(self._parts)
        return self._jobs.store(items, tenant_of(state.request), state, at_once=at_once)

    def _store_last(self, overwritten: set[int]) -> list[StoreJob]:
        """Store what requests that have ended since the last step left to offer.

        The engine has taken their blocks back. Those that it gives to others in this step are
        gathered too late; the others are fenced from now on, like all that are being gathered.
        """
        ended, self._last_offers = self._last_offers, []
        jobs: list[StoreJob | None] = []
        for state, (numbers, pairs) in ended:
            assert self._manager is not None, "offers to a tier that is not open"
            safe = [place for place, (_, paged) in enumerate(pairs) if paged not in overwritten]
            items, refused = self._claims.claim(self._manager, [pairs[place] for place in safe])
            reasons = Counter(refused.values())
            self._claims.admission.intake.offered(len(items), reasons)
            self.stats.add(self.tier, **reasons)
            mine = {numbers[safe[place]]: item for place, item in items.items()}
            state.order.finished = True
            jobs.append(self._begin_store(state, mine))
            self._settle(self._manager, state)
        return [job for job in jobs if job is not None]

    def _offer_new(self, manager: TierManager, scheduled: Scheduled) -> dict[int, StoreItem]:
        """What the step completes; what the tier gets of it, by the numbers of its keys."""
        offers = self._requests.offers(scheduled)
        items, refused = self._claims.claim(manager, offers.pairs)
        if items or refused:
            self._claims.admission.intake.offered(len(items), Counter(refused.values()))
        for place, reason in refused.items():
            if reason in FOR_ROOM:
                scheduled.state.refused[offers.numbers[place]] = reason
            else:
                self.stats.add(self.tier, **{reason: 1})
        return {offers.numbers[place]: item for place, item in items.items()}

    def _offer_again(self, manager: TierManager, scheduled: Scheduled) -> dict[int, StoreItem]:
        """What had no room before, head first, while the request runs and so has the blocks."""
        waiting = scheduled.state.refused
        most = min(self._retries, self._claims.room(manager)) if waiting else 0
        if most <= 0:
            return {}
        offers = self._requests.again(scheduled, most)
        self._retries -= len(offers.pairs)
        items, refused = self._claims.claim(manager, offers.pairs)
        taken: Counter[str] = Counter()
        for place, number in enumerate(offers.numbers):
            reason = refused.get(place)
            if reason in FOR_ROOM:
                continue
            was = waiting.pop(number)
            if reason is None:
                taken[was] += 1
            else:
                self.stats.add(self.tier, **{reason: 1})
        self._claims.admission.intake.taken_later(taken)
        return {offers.numbers[place]: item for place, item in items.items()}

    # -- ends --------------------------------------------------------------------------------

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Take in what the workers finished."""
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self.stats.add(self.tier, **meta.measures)
        if meta.unusable is not None:
            self._give_up(meta.unusable)
        self.register_workers(meta.handshakes, in_step=True)
        self._health.update(meta.health)
        self._claims.admission.is_up = all(one.writes for one in self._health.values())
        for job_id, result in meta.jobs.items():
            self._job_ended(job_id, result)

    def _job_ended(self, job_id: int, result: JobResult) -> None:
        ended = self._jobs.end(job_id, result)
        if ended is None:
            return
        assert self._manager is not None
        if isinstance(ended, PendingLoad):
            self._load_ended(self._manager, ended)
        else:
            self._store_ended(self._manager, ended)

    def _load_ended(self, manager: TierManager, load: PendingLoad) -> None:
        job = load.job
        self.load_cost.ended(job.job_id, load.seconds, whole=not load.failed)
        self.stats.add(self.tier, **self.load_cost.gauges())
        manager.complete_load([i.key for i in job.items], [i.slot for i in job.items])
        lost = [job.items[index].key for index in sorted(load.lost)]
        for key in lost:
            manager.discard(key)
        self._kv_events.lost(lost)
        self._tenants.gone(lost)
        state = self._requests.get(job.request_id)
        if state is not None:
            state.recompute |= bool(load.failed)
            # It came in waves, of which the last counts as used last, until it is offered.
            state.order.stale |= not self._promote
        failed = {load.of_block[index] for index in load.failed}
        if failed and self._engine.all_or_nothing_loads:
            failed.add(0)
        if load.shared.end(load.blocks, failed, self._count_loaded):
            self._wait_budget.loaded(job.request_id)

    def _count_loaded(self, blocks: int) -> None:
        self.stats.add(self.tier, loaded_tokens=blocks * self._engine.block_tokens)

    def _store_ended(self, manager: TierManager, store: PendingStore) -> None:
        kept: list[bytes] = []
        self._claims.admission.intake.failed(len(store.failed))
        heads = manager.heads(store.state.keys, store.numbers)
        # The first last, so that it counts as used last: a prefix's head must outlive its tail.
        for index in reversed(range(len(store.job.items))):
            item = store.job.items[index]
            if not self._generation.made(item.key):
                manager.drop(item.key, store.job.generation)
            elif manager.complete_store(
                item.key, item.slot, index not in store.failed, heads.get(item.key)
            ):
                self._kv_events.stored(item.key)
                kept.append(item.key)
            self._claims.end(store.job.job_id, item)
        self._kv_events.tell_stored()
        beyond = self._tenants.kept(store.tenant, kept, self._claims.block_bytes)
        if beyond:
            manager.give_up(beyond)
            self._kv_events.lost(beyond)
        store.state.order.ended(len(store.numbers) if store.at_once else None)
        self._settle(manager, store.state)

    def _settle(self, manager: TierManager, state: RequestState) -> None:
        """Let the head of what was stored in steps be the last to go."""
        keys = state.offered * len(self._parts)
        if state.order.settle(keys):
            manager.settle(state.keys[:keys])

    def _evicted(self, key: bytes) -> None:
        self._kv_events.evicted(key)
        self._tenants.gone((key,))

    def take_events(self) -> list[BlockEvent]:
        """What the tier came to hold and lost since the last call."""
        return self._kv_events.take()

    def reset_cache(self) -> bool:
        """Never again find what was stored so far; stores under way end unfindable too. Or go on
        with all of it, where the operator says that weights don't change.

        False: loads of before are still under way, whose requests may use what they bring.
        """
        # An engine that sleeps gives its memory up next, and these are not read before. A copy
        # under way is done by then: vLLM waits for its device first.
        for state, _ in self._last_offers:
            state.order.finished = True
        self._last_offers.clear()
        if self._generation.lasts:
            return not self.reqs_being_loaded
        if self._manager is not None:
            self._kv_events.lost(self._manager.reset())
        over = self._generation.renew()
        if self._manager is not None:
            self._manager.clear(over)
        self._requests.reset()
        return not self.reqs_being_loaded

    def request_finished(self, request: Request, tables: Sequence[list[int]]) -> None:
        """Drop what is kept for a request; its transfers under way end on their own.

        `tables`: the blocks that it has yet, of each KV cache group.
        """
        request_id = request.request_id
        state = self._requests.get(request_id)
        if state is not None and self._manager is not None:
            offers = self._requests.last_offers(state, tables) if self._may_store(state) else None
            if offers is not None and offers.pairs:
                self._last_offers.append((state, offers))
            else:
                state.order.finished = True
                self._settle(self._manager, state)
        self.stats.add(self.tier, **self._requests.forget(request_id))
        if self._manager is not None:
            self._manager.forget_request(request_id)

    def close(self) -> None:
        """Release the tier."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
