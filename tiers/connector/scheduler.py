"""The scheduler half of one tier's connector: what to load, what to store, and when it is done."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tiers.connector.base import (
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
from tiers.connector.manager import TierManager
from tiers.connector.stats import TierStats
from tiers.errors import TierUnusable
from tiers.pool import SlotPool

logger = logging.getLogger(__name__)

GROUP = (0).to_bytes(2, "little")
"""KV cache group in a key; models with one group only, so far."""

OpenManager = Callable[[Sequence[Hello]], tuple[TierManager, SlotPool]]
"""Opens a tier once every worker has said hello. Raises TierUnusable."""


@dataclass
class _RequestState:
    """What the scheduler half knows of a request.

    `keys`: of the full blocks known so far. `block_ids`: its blocks in the paged KV.
    `match`: (first block, blocks) of the last lookup. `offered`: leading blocks that need not be
    offered for storing again. `recompute`: a load of it failed, so it is not loaded again.
    """

    request: Request
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    match: tuple[int, int] = (0, 0)
    offered: int = 0
    recompute: bool = False


@dataclass
class _Pending:
    """A job until every rank has ended it."""

    job: LoadJob | StoreJob
    ranks_left: int
    failed: set[int] = field(default_factory=set)


class OffloadingScheduler:
    """One tier, in the scheduler's process. Nothing here does I/O or waits."""

    def __init__(
        self, tier: str, engine: EngineInfo, open_manager: OpenManager, promote: bool
    ) -> None:
        self.tier = tier
        self.stats = TierStats()
        self._engine = engine
        self._open_manager = open_manager
        self._promote = promote
        self._manager: TierManager | None = None
        self._unusable = False
        self._pool = SlotPool(0)
        self._hellos: dict[int, Hello] = {}
        self._states: dict[str, _RequestState] = {}
        self._pending: dict[int, _Pending] = {}
        self._loads: list[LoadJob] = []
        self.slots_pinned = 0
        self._storing: set[bytes] = set()
        self._reading: dict[int, int] = {}
        self._overwritten: set[int] = set()
        self._job_ids = itertools.count()

    # -- opening -----------------------------------------------------------------------------

    def welcome(self, hellos: Mapping[int, Hello]) -> None:
        """Take what workers say of themselves; with the last of them the tier opens."""
        self._hellos.update(hellos)
        if self._manager or self._unusable or len(self._hellos) < self._engine.world_size:
            return
        try:
            ranks = [self._hellos[rank] for rank in sorted(self._hellos)]
            self._manager, self._pool = self._open_manager(ranks)
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
        state = self._state_of(request)
        first, rest = divmod(num_computed_tokens, self._engine.block_tokens)
        keys = state.keys[first:]
        if rest or not keys or state.recompute:
            return 0, False
        found = self._manager.lookup(request.request_id, first, keys)
        if found is None:
            return None, False
        self.stats.add(self.tier, lookups=1, hits=int(found > 0))
        state.match = (first, found)
        return found * self._engine.block_tokens, found > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks; load into them what was promised for it."""
        state = self._state_of(request)
        state.block_ids = list(blocks.get_block_ids()[0])
        # Another tier may load into these blocks while this one still reads what they held.
        self._overwritten.update(state.block_ids)
        if num_external_tokens == 0 or self._manager is None:
            return
        first, found = state.match
        count = num_external_tokens // self._engine.block_tokens
        assert 0 < count <= found, f"{count} blocks to load of {found} found"
        keys = state.keys[first : first + count]
        slots = self._manager.prepare_load(keys)
        targets = state.block_ids[first : first + count]
        items = [LoadItem(*item) for item in zip(keys, targets, slots, strict=True)]
        job = LoadJob(next(self._job_ids), request.request_id, items)
        self._pending[job.job_id] = _Pending(job, self._engine.world_size)
        self._loads.append(job)

    def _state_of(self, request: Request) -> _RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _RequestState(request)
        ratio = self._engine.block_tokens // self._engine.hash_tokens
        hashes = request.block_hashes
        for block in range(len(state.keys), len(hashes) // ratio):
            state.keys.append(bytes(hashes[(block + 1) * ratio - 1]) + GROUP)
        return state

    # -- storing -----------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Orders for the workers of this step."""
        overwritten, self._overwritten = self._overwritten, set()
        stores: list[StoreJob] = []
        for state, computed in self._scheduled(output, overwritten):
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

    def _scheduled(
        self, output: SchedulerOutput, overwritten: set[int]
    ) -> Iterator[tuple[_RequestState, int]]:
        """Each request this step runs, with its tokens computed when the step is over.

        Blocks that the step writes are added to `overwritten`.
        """
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.block_ids = list(new.block_ids[0])
                overwritten.update(self._written(state, new.num_computed_tokens))
                if not self._promote:
                    state.offered = new.num_computed_tokens // self._engine.block_tokens
                yield state, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._states.get(request_id)
            if state is None:
                continue
            blocks = cached.new_block_ids[i]
            added = list(blocks[0]) if blocks is not None else []
            resumed = request_id in cached.resumed_req_ids
            state.block_ids = added if resumed else state.block_ids + added
            computed = cached.num_computed_tokens[i]
            overwritten.update(self._written(state, computed))
            yield state, computed + output.num_scheduled_tokens.get(request_id, 0)

    def _written(self, state: _RequestState, computed: int) -> list[int]:
        return state.block_ids[computed // self._engine.block_tokens :]

    def _offer(self, state: _RequestState, computed: int) -> StoreJob | None:
        """Store what the step completes: full blocks of known tokens that the tier wants."""
        if self._manager is None or self._unusable:
            return None
        self._state_of(state.request)
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
        if self.slots_pinned >= max(1, self._pool.num_slots // 2) and not (
            self._manager and self._manager.completes_on_gather
        ):
            return None
        claim = self._pool.claim(key)
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
            self._load_ended(self._manager, pending.job, pending.failed)
        else:
            self._store_ended(self._manager, pending.job, pending.failed)

    def _load_ended(self, manager: TierManager, job: LoadJob, failed: set[int]) -> None:
        manager.complete_load([i.key for i in job.items], [i.slot for i in job.items])
        for index in failed:
            manager.discard(job.items[index].key)
        state = self._states.get(job.request_id)
        if failed and state is not None:
            state.recompute = True
        usable = min(failed, default=len(job.items))
        self.stats.add(self.tier, loaded_tokens=usable * self._engine.block_tokens)

    def _store_ended(self, manager: TierManager, job: StoreJob, failed: set[int]) -> None:
        for index, item in enumerate(job.items):
            manager.complete_store(item.key, item.slot, index not in failed)
            self._storing.discard(item.key)
            self._pool.release(item.slot)
            self.slots_pinned -= 1
            if item.source is not None and self._reading.get(item.source) == job.job_id:
                del self._reading[item.source]

    def request_finished(self, request_id: str) -> None:
        """Drop what is kept for a request; its transfers under way end on their own."""
        self._states.pop(request_id, None)
        if self._manager is not None:
            self._manager.forget_request(request_id)

    def close(self) -> None:
        """Release the tier."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
