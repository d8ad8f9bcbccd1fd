"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

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
    StoreJob,
)
from tiers.connector.generation import Generation
from tiers.connector.load_meter import LoadMeter
from tiers.connector.manager import TierManager
from tiers.connector.parts import NOTHING, Parts
from tiers.connector.policy import usable
from tiers.connector.requests import RequestState, RequestTable, Scheduled
from tiers.connector.shared_load import SharedLoad
from tiers.connector.stats import TierStats
from tiers.connector.storing import Storing
from tiers.errors import TierUnusable
from tiers.pool import SlotPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

OpenManager = Callable[[Sequence[Hello]], tuple[TierManager, SlotPool]]
"""Opens a tier once every worker has said hello. Raises TierUnusable."""


@dataclass
class _Pending:
    """A job until every rank has ended it.

    Of a load: the `blocks` of the request that it brings, in which of them each of its items is,
    and what load it is a part of. `failed`: items.
    """

    job: LoadJob | StoreJob
    ranks_left: int
    blocks: list[int] = field(default_factory=list)
    of_block: list[int] = field(default_factory=list)
    shared: SharedLoad = field(default_factory=lambda: SharedLoad(1))
    failed: set[int] = field(default_factory=set)
    seconds: float = 0.0


class OffloadingScheduler:
    """One tier, in the scheduler's process. Nothing here does I/O or waits."""

    def __init__(
        self,
        tier: str,
        engine: EngineInfo,
        open_manager: OpenManager,
        promote: bool,
        generation: Generation,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`generation` is that of all tiers of a chain; any of them may renew it."""
        self.tier = tier
        self.load_meter = LoadMeter(now)
        self.stats = TierStats()
        self._told: dict[str, float] = {}
        self._evictions = 0
        self._newly_held: list[bytes] = []
        self._engine = engine
        self._open_manager = open_manager
        self._manager: TierManager | None = None
        self._unusable = False
        self._hellos: dict[int, Hello] = {}
        self._pending: dict[int, _Pending] = {}
        self._loads: list[LoadJob] = []
        self._storing = Storing()
        self._overwritten: set[int] = set()
        self._job_ids = itertools.count()
        self._generation = generation
        self._parts = Parts(engine)
        self._requests = RequestTable(engine, self._parts, self._generation, promote)
        self._events: list[BlockEvent] = []

    # -- opening -----------------------------------------------------------------------------

    def welcome(self, hellos: Mapping[int, Hello]) -> None:
        """Take what workers say of themselves; with the last of them the tier opens."""
        self._hellos.update(hellos)
        if self._manager or self._unusable or len(self._hellos) < self._engine.world_size:
            return
        try:
            ranks = [self._hellos[rank] for rank in sorted(self._hellos)]
            self._manager, self._storing.pool = self._open_manager(ranks)
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
    def pool(self) -> SlotPool:
        """The slots of the chain; none until the tier is open."""
        return self._storing.pool

    @property
    def slots_pinned(self) -> int:
        """Slots that those blocks hold."""
        return self._storing.slots_pinned

    def take_stats(self) -> TierStats:
        """What was measured since the last call; gauges only where they have changed."""
        stats, self.stats = self.stats, TierStats()
        if self._evictions:
            stats.add(self.tier, evictions=self._evictions)
            self._evictions = 0
        gauges = self._under_way()
        if gauges != self._told:
            self._told = gauges
            stats.add(self.tier, **gauges)
        return stats

    def _under_way(self) -> dict[str, float]:
        size = sum(hello.payload_bytes for hello in self._hellos.values())
        names = ("loading_jobs", "loading_bytes", "storing_jobs", "storing_bytes")
        gauges = dict.fromkeys(names, 0.0)
        for job in (pending.job for pending in self._pending.values()):
            verb = "loading" if isinstance(job, LoadJob) else "storing"
            gauges[f"{verb}_jobs"] += 1
            gauges[f"{verb}_bytes"] += len(job.items) * size
        return gauges

    @property
    def jobs_under_way(self) -> int:
        """Loads and stores that have not ended on all ranks."""
        return len(self._pending)

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
        stop = self._requests.stop(state, first)
        if rest or stop <= first or state.recompute:
            return 0, False
        found = self._timed(state, partial(self._lookup, self._manager, state, range(first, stop)))
        if found is None:
            return None, False
        self.count_lookup(found > 0)
        state.match = (first, found)
        return found * self._engine.block_tokens, found > 0

    def _timed(self, state: RequestState, ask: Callable[[], T | None]) -> T | None:
        """Ask the tier; its answer, once there is one, took so long since it was first asked."""
        now = time.perf_counter()
        asked = now if state.asked is None else state.asked
        answer = ask()
        state.asked = asked if answer is None else None
        if answer is not None:
            self.stats.add(self.tier, lookup_seconds=[time.perf_counter() - asked])
        return answer

    def _lookup(self, manager: TierManager, state: RequestState, blocks: range) -> int | None:
        """Leading blocks of these that the tier could load; None: not known yet."""
        if self._parts.window:
            held = self._held(manager, state, blocks)
            return held if held is None else usable(held, self._parts.window)
        start = blocks.start * len(self._parts)
        found = manager.lookup(state.request.request_id, start, state.keys[start:])
        return found if found is None else found // len(self._parts)

    def _held(
        self, manager: TierManager, state: RequestState, blocks: range
    ) -> Sequence[int] | None:
        size = len(self._parts)
        start = blocks.start * size
        parts = manager.held(
            state.request.request_id, start, state.keys[start:], len(blocks) * size
        )
        return None if parts is None else self._parts.held(parts)

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

    def holds(self, request: Request, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks the tier could load; None: ask again."""
        state = self._requests.state_of(request)
        stop = self._requests.stop(state, blocks.start)
        if self._manager is None or self._unusable or state.recompute or stop <= blocks.start:
            return [NOTHING] * len(blocks)
        asked = range(blocks.start, min(stop, blocks.stop))
        held = self._timed(state, partial(self._held, self._manager, state, asked))
        return held if held is None else [*held, *[NOTHING] * (len(blocks) - len(asked))]

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
        state.tables = tuple(list(table) for table in blocks.get_block_ids())
        state.asked = None
        # Another tier may load into these blocks while this one still reads what they held.
        self._overwritten.update(*state.tables)
        return state

    def _load(
        self, manager: TierManager, state: RequestState, blocks: list[int], shared: SharedLoad
    ) -> None:
        of_block, keys, targets = self._requests.to_load(state, blocks)
        slots = manager.prepare_load(keys)
        items = list(map(LoadItem, keys, targets, slots))
        job = LoadJob(next(self._job_ids), state.request.request_id, items)
        pending = _Pending(job, self._engine.world_size, blocks, of_block, shared)
        self._pending[job.job_id] = pending
        self._loads.append(job)
        self.load_meter.began(job.job_id, len(blocks) * self._engine.block_tokens)

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
        scheduled = self._requests.scheduled(output, overwritten)
        stores = [job for one in scheduled if (job := self._offer(one)) is not None]
        flush = self._storing.readers(overwritten)
        self._storing.begin(stores)
        loads, self._loads = self._loads, []
        return OffloadingConnectorMetadata(loads, stores, flush, not output.num_scheduled_tokens)

    def _offer(self, scheduled: Scheduled) -> StoreJob | None:
        """Store what the step completes: full blocks of known tokens that the tier wants."""
        if self._manager is None or self._unusable or not scheduled.state.store:
            return None
        items, dropped = self._storing.claim(self._manager, self._requests.offers(scheduled))
        if dropped:
            self.stats.add(self.tier, store_dropped=dropped)
        if not items:
            return None
        job = StoreJob(next(self._job_ids), items)
        self._pending[job.job_id] = _Pending(job, self._engine.world_size)
        return job

    # -- ends --------------------------------------------------------------------------------

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Take in what the workers finished."""
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, OffloadingWorkerMetadata):
            return
        self.stats.add(self.tier, **meta.measures)
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
        pending.seconds = max(pending.seconds, result.seconds)
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
        self.load_meter.ended(job.job_id, pending.seconds, whole=not pending.failed)
        self.stats.add(self.tier, **self.load_meter.gauges())
        manager.complete_load([i.key for i in job.items], [i.slot for i in job.items])
        for index in pending.failed:
            manager.discard(job.items[index].key)
        self._note(False, [job.items[index].key for index in sorted(pending.failed)])
        state = self._requests.get(job.request_id)
        if pending.failed and state is not None:
            state.recompute = True
        failed = {pending.of_block[index] for index in pending.failed}
        if failed and self._engine.loads_whole:
            failed.add(0)
        pending.shared.end(pending.blocks, failed, self._count_loaded)

    def _count_loaded(self, blocks: int) -> None:
        self.stats.add(self.tier, loaded_tokens=blocks * self._engine.block_tokens)

    def _store_ended(self, manager: TierManager, job: StoreJob, failed: set[int]) -> None:
        # The first last, so that it counts as used last: a prefix's head must outlive its tail.
        for index in reversed(range(len(job.items))):
            item = job.items[index]
            if not self._generation.made(item.key):
                manager.drop(item.key)
            elif manager.complete_store(item.key, item.slot, index not in failed):
                self._newly_held.append(item.key)
            self._storing.end(job.job_id, item)
        self._tell_held()

    def _tell_held(self) -> None:
        held, self._newly_held = self._newly_held[::-1], []
        self._note(True, held)

    def _evicted(self, key: bytes) -> None:
        self._evictions += 1
        if self._engine.kv_events:
            # It may have come with the very job that is being ended.
            self._tell_held()
            self._note(False, [key])

    def _note(self, stored: bool, keys: Sequence[bytes]) -> None:
        # Keys of before a reset are of no interest: the engine itself says that all is cleared.
        if not self._engine.kv_events:
            return
        hashes: dict[int, list[bytes]] = {}
        for key in keys:
            if self._generation.made(key):
                block_hash, group = self._parts.hash_of(key)
                hashes.setdefault(group, []).append(block_hash)
        groups = self._engine.kv_groups
        for group, found in sorted(hashes.items()):
            name = group if len(groups) > 1 else None
            tokens = groups[group].tokens
            self._events.append(BlockEvent(self.tier, stored, tuple(found), tokens, name))

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
