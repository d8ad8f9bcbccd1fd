"""KVTiersStore: a store of ours as a secondary tier of vLLM's own offloading.

vLLM has the blocks of all ranks as rows of host memory. A row is one record here. It asks the store
for one block at a time, and waits without a limit for what it was promised, so that a load which
takes too long is reported as failed here, and no thread touches its row from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from spec.errors import describe_error
from spec.offloading import StoreContext, StoreSpec
from spec.registry import make_tier
from tiers.block import copy, digest
from tiers.concurrency.executors import IoExecutor, close_result
from tiers.connector.policy.request_params import MEASURING
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.connector.scheduler.tier import state_of
from tiers.connector.scheduler.tier_manager import TierManager
from tiers.connector.worker.namespace_notes import NamespaceNotes
from tiers.contract.generation import Generation, space_of
from tiers.contract.stats import STATE, STATE_MEANS, STATES
from tiers.engine.vllm_hosting import HostingEngine
from tiers.errors import RecordError, TierUnusable
from tiers.host.slot_memory import SlotMemory
from tiers.store import Block, LocalIndex, batch_blocks, capability
from tiers.wrappers.guard import Guarded
from tiers.wrappers.opening import log_name, open_guarded

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = logging.getLogger(__name__)

READERS = 2
"""Parts of loads that are read at once."""
PART_BYTES = 4 << 20
"""Of rows that are copied and moved at once: they stay in the processor's caches between the two.
At 32 MiB a batch of 128 MiB took half as much more processor time. Rows that a store reads itself
are moved in whole batches, of 32 MiB: blocks of 2 MiB at 8.9 GB/s, in such parts at 5.5."""
LOCKS = 8
"""Of a job: so many of its rows may be copied or checksummed at once."""
LOOKED_UP = 512
"""Blocks of a prompt that are looked up in an index at once."""
LOAD_SECONDS = 5.0
"""Seconds after which a block that is still being loaded is a miss."""
STORE_SECONDS = 10.0
"""Seconds after which a row that still waits to be stored is given back to vLLM."""
DRAIN_SECONDS = 10.0
"""Seconds for stores in flight to end when the engine shuts down."""
HOSTED_STATE = f"vllm:kvtiers_hosted_{STATE}"
"""Not the name of a chain's own: vLLM would register that twice, beside a KVTiersConnector."""
_HAS_BYTES = "transfer_bytes" in {one.name for one in fields(JobResult)}
"""Whether this vLLM takes the bytes of a transfer, as 0.31 and later do."""

Pairs = Sequence[tuple[bytes, int]]
"""Keys, and the row of each."""


class RowJob:
    """A transfer between rows of vLLM's host memory and the store, in parts. `lanes`: the threads'
    calls that take them. `arrived`: keys of blocks that are where they should be."""

    def __init__(self, job: TransferJob, pairs: Pairs, tag: bytes, part_blocks: int) -> None:
        """`tag`: the generation of the keys."""
        self.job = job
        self.pairs = pairs
        self.tag = tag
        starts = range(0, len(pairs), part_blocks)
        self.parts = deque(pairs[start : start + part_blocks] for start in starts)
        self.arrived: set[bytes] = set()
        self.began = time.monotonic()
        self.lanes: list[Future[None]] = []
        self.is_over = False
        self._locks = [threading.Lock() for _ in range(LOCKS)]

    def copy(self, row: int, source: memoryview, target: memoryview) -> bool:
        """Copy from or to a row; return whether the job still has it."""
        with self._locks[row % LOCKS]:
            if not self.is_over:
                copy(target, source)
            return not self.is_over

    def checksum(self, row: int, payload: memoryview) -> bytes:
        """The digest of a row. Raises RecordError once the job has it no more."""
        with self._locks[row % LOCKS]:
            if self.is_over:
                raise RecordError("vLLM has taken the row back")
            return digest(payload)

    def arrive(self, names: Iterable[bytes]) -> bool:
        """Note these, while anyone waits for them; return whether the job still has its rows."""
        with self._locks[0]:
            if not self.is_over:
                self.arrived.update(names)
            return not self.is_over

    def has_ended(self, now: float) -> bool:
        """Whether all is done, or will not be waited for any longer."""
        limit = LOAD_SECONDS if self.job.is_promotion else STORE_SECONDS
        is_late = self.is_over or now > self.began + limit
        return is_late or all(lane.done() for lane in self.lanes)

    def end(self) -> None:
        """Copy no row any more: vLLM uses them for others. Waits for copies of single rows."""
        self.is_over = True
        for lock in self._locks:
            with lock:
                pass  # who takes it from now on sees the end
        for lane in self.lanes:
            lane.cancel()

    def outcome(self) -> BaseException | bool:
        """Whether all parts were tried, or what went wrong."""
        if not all(lane.done() and not lane.cancelled() for lane in self.lanes):
            return False
        return next(filter(None, (lane.exception() for lane in self.lanes)), True)


class RowBlock(Block):
    """A block that is stored straight from its row, which vLLM gives to no other before the job is
    reported. A store that is too late for that may write another block's bytes, but not under a
    checksum of theirs: the record is damaged then."""

    _job: RowJob
    _row: int

    def __new__(cls, key: bytes, payload: memoryview, job: RowJob, row: int) -> RowBlock:
        self = super().__new__(cls, key, payload.toreadonly())
        self._job, self._row = job, row
        return self

    @property
    def checksum(self) -> bytes:
        """As it is read for the store, and still in the processor's caches. Raises RecordError."""
        return self._job.checksum(self._row, self.payload)

    def checksum_of_copy(self) -> None:
        """Who has the copy computes it, since here others would wait for the interpreter's lock."""
        if self._job.is_over:
            raise RecordError("vLLM has taken the row back")

    def readonly(self) -> RowBlock:
        return self

    def has_changed(self) -> bool:
        """Whether what was read until now may be another block's."""
        return self._job.is_over


@dataclass
class TierLookups:
    """The answers of the store for one request. `known`: by key, whether it holds the block.
    `wanted`: keys to ask for at the end of the step. `asked`: keys in flight. `promised`: hits that
    the request has not run with yet, and whether each was loaded. `stored`: in the order of the
    prompt. `is_stale`: its blocks are from before a reset."""

    known: dict[bytes, bool] = field(default_factory=dict)
    wanted: dict[bytes, None] = field(default_factory=dict)
    asked: dict[bytes, None] = field(default_factory=dict)
    promised: dict[bytes, bool] = field(default_factory=dict)
    lookup: Lookup = field(default_factory=Lookup)
    stored: dict[bytes, int] = field(default_factory=dict)
    parts: int = 0
    is_stale: bool = False

    def is_new(self, name: bytes) -> bool:
        return name not in self.known and name not in self.wanted and name not in self.asked


class KVTiersStore(SecondaryTierManager):  # type: ignore[misc]
    """Looks up, loads and stores rows in one store. vLLM calls every member from one thread at a
    time, and none of them waits for the store but `shutdown`."""

    medium = Medium.STORAGE
    cache_hit_source: Any

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        store: Mapping[str, Any] | StoreSpec,
        salt: str = "",
        trust_client_ids: bool = False,
        locality: str | None = None,
        engine: HostingEngine | None = None,
        **of_vllm: Any,
    ) -> None:
        """`store`: the settings of one tier of a chain. `salt`, `trust_client_ids`: as in a chain.
        `of_vllm`: what else this vLLM gives its tiers. Raises ValueError for an engine or a store
        that can't be served."""
        spec = (
            store
            if isinstance(store, StoreSpec)
            else make_tier(store["type"], cast("Mapping[object, object]", store))
        )
        if not isinstance(spec, StoreSpec):
            raise ValueError(f"{spec.type} is no store: give vLLM's cpu_bytes_to_use instead")
        refuse_unhosted(spec)
        super().__init__(offloading_spec, primary_kv_view, spec.tier_name, **of_vllm)
        self.locality = None if locality is None else Locality(locality)
        if hasattr(self, "cache_hit_source"):  # vLLM 0.32 and later
            self.cache_hit_source = type(self.cache_hit_source)(spec.hit_source)
        self._spec = spec
        self._engine = engine or HostingEngine(offloading_spec, salt, trust_client_ids)
        self._row_bytes = int(cast(Any, primary_kv_view.strides)[0])
        self._rows = primary_kv_view.cast("B")
        self._half = max(1, len(primary_kv_view) // 2)
        self._has_events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] = []
        self._generation = Generation()
        self._requests: dict[str, TierLookups] = {}
        self._jobs: dict[int, RowJob] = {}
        self._store: Guarded | None = None
        self._has_index = False
        self._notes: NamespaceNotes | None = None
        self._manager = TierManager()
        self._opening: Future[Guarded | None] | None = None
        self._opener = IoExecutor(1, "open")
        self._reader = IoExecutor(READERS, "fetch")
        self._writer = IoExecutor(1, "store")
        self._put_blocks = most = batch_blocks(self._row_bytes)
        self._part_blocks = min(most, PART_BYTES // self._row_bytes) or 1
        self._scratch = threading.local()
        self._reported = ""
        self._join()
        if self._opening is not None:
            wait([self._opening])
            self._join()

    def _join(self) -> None:
        """Open the store in the background once the namespace is known, then use it."""
        if self._opening is None:
            if self._engine.namespace():
                self._opening = self._opener.submit(self._open)
        elif self._store is None and self._opening.done():
            self._store = self._opening.result()
            if self._store is not None:
                namespaces = [self._engine.namespace()]
                note = self._engine.note(self._row_bytes)
                of_all = self._row_bytes // note.block_tokens
                self._notes = NamespaceNotes(self._spec, note, of_all)
                self._keep_note(b"")
                self._manager = StoreManager(self._store, namespaces, self._generation)

    def _keep_note(self, generation: bytes) -> None:
        """Have a note kept of what a generation is stored under."""
        if self._notes is not None:
            self._notes.begin(space_of(self._engine.namespace(), generation), not generation)

    def _open(self) -> Guarded | None:
        try:
            apart = self._spec.stores_apart(has_gpu=not current_platform.is_cpu())
            return open_guarded(self._spec, StoreContext(self._row_bytes), puts_apart=apart)
        except TierUnusable as error:
            name = log_name(self._spec)
            logger.error("tier %r is unusable; host memory serves alone: %s", name, error)
            return None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        means = f"As vllm:kvtiers_{STATE}, of a hosted tier. {STATE_MEANS}"
        return {HOSTED_STATE: OffloadingGaugeMetadata(means, ("tier", "state"))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Report the state where it has changed."""
        state = "refused" if self._opening is not None and self._opening.done() else "opening"
        if self._store is not None:
            state = state_of([self._store.health]) if self._engine.serves else "down"
        if state == self._reported:
            return None
        self._reported, stats = state, OffloadingConnectorStats()
        for name in STATES:
            stats.set_gauge(HOSTED_STATE, float(name == state), (self._spec.tier_name, name))
        return stats

    # -- loading -----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if not req_context.req_id.startswith(MEASURING):
            self._requests[req_context.req_id] = TierLookups()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from memory, or look the block up behind this step with all that it asked for."""
        request = self._requests.get(req_context.req_id)
        if request is None or self._store is None or self._engine.is_outdated:
            return LookupResult.MISS
        name = self._generation.key(key)
        if request.is_new(name):
            if self._has_index:
                self._look_ahead(request, key, req_context)
            else:
                request.wanted[name] = None  # with all that the step asks for
        is_held = request.known.get(name)
        if is_held is None:
            return LookupResult.RETRY
        return self._promise(request, name) if is_held else LookupResult.MISS

    def _look_ahead(self, request: TierLookups, key: OffloadKey, context: ReqContext) -> None:
        """Look a block up in the store's index, and those around it, which are asked for next: vLLM
        asks for one at a time, and a look costs as much as fifty names."""
        places = getattr(context, "_offload_key_positions", {})  # vLLM lists a prompt nowhere else
        keys = [key]
        if key in places:
            keys = [*places]
            start = keys.index(key) // LOOKED_UP * LOOKED_UP  # with windows the last is asked first
            keys = keys[start : start + LOOKED_UP]
        names = [*filter(request.is_new, map(self._generation.key, keys))]
        # By themselves: the answers to what the request has asked for may be half there.
        lookup = Lookup()
        answers = self._manager.coverage(lookup, names, range(len(names)))
        if answers is None:  # it is in memory no more
            lookup.cancel()
            request.wanted.update(dict.fromkeys(names))
        else:
            request.known.update(zip(names, answers, strict=True))

    def _promise(self, request: TierLookups, name: bytes) -> LookupResult:
        """Promise a block that the store holds, each once and no more than fit in half of the rows,
        until the request runs: vLLM evicts what it was promised for what it is promised next."""
        promised = request.promised
        if promised.get(name, len(promised) >= self._half):
            return LookupResult.MISS
        promised[name] = False
        return LookupResult.HIT

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._join()
        if not self._has_index and self._store is not None:  # to ask takes longer than a lookup
            self._has_index = capability(self._store, LocalIndex) is not None
        for request_id in context.new_req_ids:
            if request_id in self._requests:
                self._requests[request_id].promised.clear()
        for request in self._requests.values():
            if request.wanted or request.asked:
                self._ask(request)
        self._engine.end_step()

    def _ask(self, request: TierLookups) -> None:
        if not request.asked:
            request.asked, request.wanted = request.wanted, {}
        names = list(request.asked)
        answers = self._manager.coverage(request.lookup, names, range(len(names)))
        if answers is None:
            return
        request.known.update(zip(names, answers, strict=True))
        request.asked, request.lookup = {}, Lookup()  # the next question is about other keys

    def submit_load(self, job_metadata: TransferJob) -> None:
        pairs = self._pairs(job_metadata)
        if request := self._requests.get(job_metadata.req_context.req_id):
            request.promised.update((name, True) for name, _ in pairs)
        self._begin(job_metadata, pairs, self._part_blocks, self._reader, self._load, READERS)

    def _load(self, job: RowJob, store: Guarded) -> None:
        with suppress(IndexError):  # all are taken
            while True:
                some = job.parts.popleft()
                blocks = self._blocks(job, some)
                answers = zip(some, store.get(blocks), blocks, strict=True)
                arrived = [
                    name
                    for (name, row), is_loaded, block in answers
                    if is_loaded and job.copy(row, block.payload, self._row(row))
                ]
                job.arrive(arrived)

    # -- storing -----------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        request = self._requests.get(job_metadata.req_context.req_id)
        pairs: list[tuple[bytes, int]] = []
        if request is not None and not request.is_stale and not self._engine.is_outdated:
            pairs = self._pairs(job_metadata)
            missing = self._manager.touch_and_list_missing([name for name, _ in pairs])
            pairs = [pair for pair, wanted in zip(pairs, missing, strict=True) if wanted]
            request.stored.update(pairs)
            request.parts += -(-len(pairs) // self._put_blocks)
        storing = sum(len(job.pairs) for job in self._jobs.values() if not job.job.is_promotion)
        # Stores may hold half of all rows; the others are left to loads and to vLLM.
        pairs = pairs[: max(0, self._half - storing)]
        if pairs:
            self._keep_note(self._generation.tag)
        self._begin(job_metadata, pairs, self._put_blocks, self._writer, self._put, 1)

    def _put(self, job: RowJob, store: Guarded) -> None:
        for some in job.parts:
            space = space_of(self._engine.namespace(), job.tag)
            blocks = [RowBlock(space + name, self._row(row), job, row) for name, row in some]
            if job.is_over:
                return
            held = store.put(blocks)
            arrived = [name for (name, _), is_held in zip(some, held, strict=True) if is_held]
            if not job.arrive(arrived) and job.tag:
                # Of a generation, which nobody else has. Other blocks may be those that another
                # engine has stored meanwhile; one of ours that is damaged goes when it is read.
                store.drop([block.key for block in blocks])

    # -- both --------------------------------------------------------------------------------

    def _pairs(self, job: TransferJob) -> list[tuple[bytes, int]]:
        """The keys and rows of a job by their places in the prompt: vLLM names group by group."""
        rows = getattr(job, "chunk_ids", None)
        rows = cast(Any, job).block_ids if rows is None else rows  # vLLM before 0.30
        place_of = getattr(job.req_context, "get_offload_key_position", lambda key: None)
        pairs = [
            (place_of(key) or 0, key, int(row)) for key, row in zip(job.keys, rows, strict=True)
        ]
        pairs.sort(key=lambda pair: pair[0])
        return [(self._generation.key(key), row) for _, key, row in pairs]

    def _begin(
        self,
        job: TransferJob,
        pairs: Pairs,
        part_blocks: int,
        threads: IoExecutor,
        transfer: Callable[[RowJob, Guarded], None],
        lanes: int,
    ) -> None:
        made = self._jobs[job.job_id] = RowJob(job, pairs, self._generation.tag, part_blocks)
        if (store := self._store) is None:
            return
        unchanged = self._engine.looked()

        def run() -> None:
            if unchanged():  # else its blocks are of other weights
                transfer(made, store)

        made.lanes += [threads.submit(run) for _ in range(min(lanes, len(made.parts)))]

    def _blocks(self, job: RowJob, some: Pairs) -> list[Block]:
        """Blocks of these names over this thread's memory."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = SlotMemory(self._part_blocks, self._row_bytes, pin=False)
        space = space_of(self._engine.namespace(), job.tag)
        payloads = map(self._scratch.memory.payload, range(len(some)))
        return [Block(space + name, to) for (name, _), to in zip(some, payloads, strict=False)]

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the transfers that have ended, or have taken too long."""
        now = time.monotonic()
        ended = [job for job in self._jobs.values() if job.has_ended(now)]
        return [self._ended(job, now) for job in ended]

    def _ended(self, job: RowJob, now: float) -> JobResult:
        is_done = job.outcome()
        job.end()
        del self._jobs[job.job.job_id]
        if isinstance(is_done, BaseException):
            logger.error("tier %r lost a transfer: %s", self.tier_type, describe_error(is_done))
        keys = [(key, self._generation.key(key)) for key in job.job.keys]
        arrived = [key for key, name in keys if name in job.arrived]
        if job.job.is_promotion:
            failed = [name for _, name in keys if name not in job.arrived]
            request = self._requests.get(job.job.req_context.req_id, TierLookups())
            request.known.update(dict.fromkeys(failed, False))
            if is_done and job.tag == self._generation.tag:
                for name in failed:
                    self._manager.discard(name)
                self._note([key for key, name in keys if name not in job.arrived], removed=True)
            success = len(arrived) == len(keys)
        else:
            self._stored(job, arrived)
            success = job.arrived.issuperset(name for name, _ in job.pairs)
        result = JobResult(job.job.job_id, success, arrived, now - job.began)
        if _HAS_BYTES:
            result.transfer_bytes = len(job.arrived) * self._row_bytes
        return result

    def _stored(self, job: RowJob, arrived: list[OffloadKey]) -> None:
        if job.tag == self._generation.tag:
            self._manager.stored(list(job.arrived))
            self._note(arrived, removed=False)
        elif job.tag:  # blocks without one stay: other engines may use them
            self._manager.drop(list(job.arrived), job.tag)

    def _note(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys and self._has_events:
            event = OffloadingEvent(keys, Medium.STORAGE, removed, locality=self.locality)
            self._events.append(event)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.touch_prefix([self._generation.key(key) for key in keys])

    # -- ends --------------------------------------------------------------------------------

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is None:
            return
        request.lookup.cancel()
        if request.parts > 1:  # its first block is to be the last one that is evicted
            self._manager.touch_prefix(list(request.stored))

    def drain_jobs(self) -> None:
        """Begin a new generation: vLLM calls this when it is reset, and at no other time."""
        for job in self._jobs.values():
            job.end()
        for request_id, request in self._requests.items():
            request.lookup.cancel()
            self._requests[request_id] = TierLookups(is_stale=True)
        self._engine.reset()
        self._manager.reset()
        self._manager.clear(self._generation.renew())

    def shutdown(self) -> None:
        """Wait for stores in flight, `DRAIN_SECONDS` at most, and close the store."""
        stores = (job.lanes for job in self._jobs.values() if not job.job.is_promotion)
        wait([*chain.from_iterable(stores)], DRAIN_SECONDS)
        for job in self._jobs.values():
            job.end()
        for executor in (self._opener, self._reader, self._writer):
            executor.shutdown(wait=False)
        if self._store is None and self._opening is not None:
            self._opening.add_done_callback(close_result)
        self._manager.close()
        self._rows = memoryview(b"")


UNHOSTED = {
    *("store_threshold", "max_inflight", "store_rate", "load_rate", "write_budget", "verify"),
    *("admission", "paused", "loads_at_once"),
}
"""Settings of a tier that decide about loads and stores: here vLLM decides about those."""


def refuse_unhosted(tier: Any) -> None:
    """Raise ValueError for settings of a tier that vLLM's OffloadingConnector does not obey."""
    if unhosted := tier.model_dump(include=UNHOSTED, exclude_defaults=True):
        raise ValueError(
            f"tier {tier.tier_name!r} has {', '.join(unhosted)}, which vLLM's OffloadingConnector "
            "does not obey; leave that out, or use KVTiersConnector"
        )
