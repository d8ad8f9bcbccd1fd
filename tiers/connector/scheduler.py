"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tiers.connector.base import (
    BlockEvent,
    Blocks,
    ConnectorOutput,
    EngineInfo,
    Hello,
    JobResult,
    LoadItem,
    LoadJob,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    Request,
    SchedulerOutput,
    StoreItem,
    StoreJob,
)
from tiers.connector.generation import Generation
from tiers.connector.manager import TierManager
from tiers.connector.requests import GROUP, RequestState, RequestTable
from tiers.connector.shared_load import SharedLoad
from tiers.connector.stats import TierStats
from tiers.errors import TierUnusable
from tiers.pool import SlotPool

logger = logging.getLogger(__name__)

OpenManager = Callable[[Sequence[Hello]], tuple[TierManager, SlotPool]]
"""Opens a tier once every worker has said hello. Raises TierUnusable."""


@dataclass
class _Pending:
    """A job until every rank has ended it.

    Of a load: `blocks` are its items' indexes in the request, `shared` is what it is a part of.
    """

    job: LoadJob | StoreJob
    ranks_left: int
    failed: set[int] = field(default_factory=set)
    blocks: list[int] = field(default_factory=list)
    shared: SharedLoad = field(default_factory=lambda: SharedLoad(1))


class OffloadingScheduler:
    """One tier, in the scheduler's process. Nothing here does I/O or waits."""

    def __init__(
        self, tier: str, engine: EngineInfo, open_manager: OpenManager, promote: bool
    ) -> None:
        self.tier = tier
        self.stats = TierStats()
        self._engine = engine
        self._open_manager = open_manager
        self._manager: TierManager | None = None
        self._unusable = False
        self.pool = SlotPool(0)
        self._hellos: dict[int, Hello] = {}
        self._pending: dict[int, _Pending] = {}
        self._loads: list[LoadJob] = []
        self.slots_pinned = 0
        self._storing: set[bytes] = set()
        self._reading: dict[int, int] = {}
        self._overwritten: set[int] = set()
        self._job_ids = itertools.count()
        self._generation = Generation()
        self._requests = RequestTable(engine, self._generation, promote)
        self._events: list[BlockEvent] = []

    # -- opening -----------------------------------------------------------------------------

    def welcome(self, hellos: Mapping[int, Hello]) -> None:
        """Take what workers say of themselves; with the last of them the tier opens."""
        self._hellos.update(hellos)
        if self._manager or self._unusable or len(self._hellos) < self._engine.world_size:
            return
        try:
            ranks = [self._hellos[rank] for rank in sorted(self._hellos)]
            self._manager, self.pool = self._open_manager(ranks)
            self._manager.on_evict = self._evicted
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
        jobs = (pending.job for pending in self._pending.values())
        return {job.request_id for job in jobs if isinstance(job, LoadJob)}

    @property
    def blocks_being_stored(self) -> int:
        """Blocks on their way into the tier."""
        return len(self._storing)

    @property
    def jobs_under_way(self) -> int:
        """Loads and stores that have not ended on all ranks."""
        return len(self._pending)

    @property
    def requests_known(self) -> int:
        """Requests that have not finished."""
        return len(self._requests)

    def must_step(self) -> bool:
        """Whether a transfer will end soon whose end only a step can tell us of."""
        if self._manager is None:
            return False
        return any(
            self._manager.completes_on_gather or isinstance(pending.job, LoadJob)
            for pending in self._pending.values()
        )

    # -- loading -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones the tier could load; None: ask again."""
        if self._manager is None or self._unusable:
            return 0, False
        state = self._requests.state_of(request)
        first, rest = divmod(num_computed_tokens, self._engine.block_tokens)
        keys = state.keys[first:]
        if rest or not keys or state.recompute:
            return 0, False
        found = self._manager.lookup(request.request_id, first, keys)
        if found is None:
            return None, False
        self.count_lookup(found > 0)
        state.match = (first, found)
        return found * self._engine.block_tokens, found > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks; load into them what was promised for it."""
        state = self._allocated(request, blocks)
        if num_external_tokens == 0 or self._manager is None:
            return
        first, found = state.match
        count = num_external_tokens // self._engine.block_tokens
        assert 0 < count <= found, f"{count} blocks to load of {found} found"
        self._load(self._manager, state, list(range(first, first + count)), SharedLoad(1))

    def holds(self, request: Request, blocks: range) -> list[bool] | None:
        """Which of these blocks the tier could load; None: ask again."""
        state = self._requests.state_of(request)
        keys = state.keys[blocks.start :]
        if self._manager is None or self._unusable or state.recompute or len(keys) < len(blocks):
            return [False] * len(blocks)
        return self._manager.held(request.request_id, blocks.start, keys, len(blocks))

    def count_lookup(self, hit: bool) -> None:
        """Count that the tier has answered for a request."""
        self.stats.add(self.tier, lookups=1, hits=int(hit))

    def load_blocks(
        self, request: Request, blocks: Blocks, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """Note the request's blocks; load into them this tier's part of a shared load."""
        state = self._allocated(request, blocks)
        assert self._manager is not None, "blocks to load from a tier that held none"
        self._load(self._manager, state, [block for part in ranges for block in part], shared)

    def _allocated(self, request: Request, blocks: Blocks) -> RequestState:
        state = self._requests.state_of(request)
        state.block_ids = list(blocks.get_block_ids()[0])
        # Another tier may load into these blocks while this one still reads what they held.
        self._overwritten.update(state.block_ids)
        return state

    def _load(
        self, manager: TierManager, state: RequestState, blocks: list[int], shared: SharedLoad
    ) -> None:
        keys = [state.keys[block] for block in blocks]
        targets = [state.block_ids[block] for block in blocks]
        slots = manager.prepare_load(keys)
        items = [LoadItem(*item) for item in zip(keys, targets, slots, strict=True)]
        job = LoadJob(next(self._job_ids), state.request.request_id, items)
        pending = _Pending(job, self._engine.world_size, blocks=blocks, shared=shared)
        self._pending[job.job_id] = pending
        self._loads.append(job)

    def on_new_request(self, request: Request) -> None:
        """Begin to find out what the tier has of a request, if it can't tell at once."""
        if self._manager is not None and not self._unusable:
            state = self._requests.state_of(request)
            if state.keys:
                self._manager.expect(request.request_id, state.keys)

    # -- storing -----------------------------------------------------------------------------

    def withhold(self, request: Request) -> None:
        """Never offer its blocks."""
        self._requests.state_of(request).store = False

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Orders for the workers of this step."""
        overwritten, self._overwritten = self._overwritten, set()
        stores: list[StoreJob] = []
        for state, computed in self._requests.scheduled(output, overwritten):
            job = self._offer(state, computed)
            if job is not None:
                stores.append(job)
        flush = {self._reading[b] for b in overwritten & self._reading.keys()}
        loads, self._loads = self._loads, []
        for store in stores:
            for item in store.items:
                if item.source is not None:
                    self._reading[item.source] = store.job_id
        return OffloadingConnectorMetadata(
            loads, stores, sorted(flush), not output.num_scheduled_tokens
        )

    def _offer(self, state: RequestState, computed: int) -> StoreJob | None:
        """Store what the step completes: full blocks of known tokens that the tier wants."""
        if self._manager is None or self._unusable or not state.store:
            return None
        self._requests.state_of(state.request)
        first = state.offered
        last = min(len(state.keys), computed // self._engine.block_tokens, len(state.block_ids))
        if last <= first:
            return None
        state.offered = last
        keys = state.keys[first:last]
        items: list[StoreItem] = []
        for block, (key, wanted) in enumerate(zip(keys, self._manager.wants(keys), strict=True)):
            if not wanted or key in self._storing:
                continue
            item = self._take_slot(key, state.block_ids[first + block])
            if item is None:
                self.stats.add(self.tier, store_dropped=1)
                continue
            items.append(item)
        if not items:
            return None
        self._storing.update(item.key for item in items)
        job = StoreJob(next(self._job_ids), items)
        self._pending[job.job_id] = _Pending(job, self._engine.world_size)
        return job

    def _take_slot(self, key: bytes, source: int) -> StoreItem | None:
        # A tier that lags behind may not hold all slots, or it would starve the others.
        if self.slots_pinned >= max(1, self.pool.num_slots // 2) and not (
            self._manager and self._manager.completes_on_gather
        ):
            return None
        claim = self.pool.claim(key)
        if claim is None:
            return None
        self.slots_pinned += 1
        return StoreItem(key, claim.slot, source if claim.fresh else None)

    # -- ends --------------------------------------------------------------------------------

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Take in what the workers finished."""
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self.stats.add(self.tier, **meta.counters)
        self.welcome(meta.hellos)
        if meta.unusable is not None:
            self._give_up(meta.unusable)
        for job_id, result in meta.jobs.items():
            self._job_ended(job_id, result)

    def _job_ended(self, job_id: int, result: JobResult) -> None:
        pending = self._pending.get(job_id)
        if pending is None:
            return
        pending.failed |= result.failed
        pending.ranks_left -= result.ranks
        if pending.ranks_left > 0:
            return
        del self._pending[job_id]
        assert self._manager is not None
        if isinstance(pending.job, LoadJob):
            self._load_ended(self._manager, pending.job, pending)
        else:
            self._store_ended(self._manager, pending.job, pending.failed)

    def _load_ended(self, manager: TierManager, job: LoadJob, pending: _Pending) -> None:
        manager.complete_load([i.key for i in job.items], [i.slot for i in job.items])
        for index in pending.failed:
            manager.discard(job.items[index].key)
        self._note(False, [job.items[index].key for index in sorted(pending.failed)])
        state = self._requests.get(job.request_id)
        if pending.failed and state is not None:
            state.recompute = True
        failed = [pending.blocks[index] for index in pending.failed]
        pending.shared.end(pending.blocks, failed, self._count_loaded)

    def _count_loaded(self, blocks: int) -> None:
        self.stats.add(self.tier, loaded_tokens=blocks * self._engine.block_tokens)

    def _store_ended(self, manager: TierManager, job: StoreJob, failed: set[int]) -> None:
        held: list[bytes] = []
        for index, item in enumerate(job.items):
            if not self._generation.made(item.key):
                manager.drop(item.key)
            elif manager.complete_store(item.key, item.slot, index not in failed):
                held.append(item.key)
            self._storing.discard(item.key)
            self.pool.release(item.slot)
            self.slots_pinned -= 1
            if item.source is not None and self._reading.get(item.source) == job.job_id:
                del self._reading[item.source]
        self._note(True, held)

    def _evicted(self, key: bytes) -> None:
        self.stats.add(self.tier, evictions=1)
        self._note(False, [key])

    def _note(self, stored: bool, keys: Sequence[bytes]) -> None:
        # Keys of before a reset are of no interest: the engine itself says that all is cleared.
        if not self._engine.kv_events:
            return
        blocks = [self._generation.block(key) for key in keys if self._generation.made(key)]
        hashes = tuple(block[: -len(GROUP)] for block in blocks)
        if hashes:
            self._events.append(BlockEvent(self.tier, stored, hashes, self._engine.block_tokens))

    def take_events(self) -> list[BlockEvent]:
        """What the tier came to hold and lost since the last call."""
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> bool:
        """Never again find what was stored so far; stores under way end unfindable too.

        False: loads of before are still under way, whose requests may use what they bring.
        """
        if self._manager is not None:
            self._note(False, self._manager.reset())
        self._generation.renew()
        self._requests.reset()
        return not self.reqs_being_loaded

    def request_finished(self, request_id: str) -> None:
        """Drop what is kept for a request; its transfers under way end on their own."""
        self._requests.forget(request_id)
        if self._manager is not None:
            self._manager.forget_request(request_id)

    def close(self) -> None:
        """Release the tier."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
