"""The worker half of one tier's connector: moves blocks, beside the engine's own work."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from spec.errors import reason_of
from spec.fields import format_size
from spec.offloading import LOADS_AT_ONCE, HostSpec, OffloadingSpec, StoreContext, StoreSpec
from tiers.concurrency.executors import IoExecutor
from tiers.concurrency.numa import bound
from tiers.concurrency.rate_limit import RateLimit
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.loading import Loading
from tiers.connector.worker.namespace_notes import NamespaceNotes
from tiers.connector.worker.storing import Puts
from tiers.contract.block_copier import ENDED, Fence, Gather
from tiers.contract.connector import WorkerConnector
from tiers.contract.messages import (
    JobResult,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StoreItem,
    StoreJob,
    TransferResults,
    WorkerHandshake,
)
from tiers.contract.stats import Measures, merge
from tiers.errors import TierUnusable
from tiers.host.slots import ALIGNMENT, slots_within
from tiers.wrappers.guard import HEALTHY, Guarded, warned
from tiers.wrappers.opening import log_name, open_guarded

logger = logging.getLogger(__name__)

HUNG_CLOSE_SECONDS = 1.0
"""How long a store may take to close whose puts have not returned: it may wait for them."""
MOST_ENDS, MOST_ENDED = 256, 4096
"""Stores whose end a step reports, and blocks of all but the last: more would cost it too much."""


@dataclass
class _Store:
    job: StoreJob
    gather: Gather | None
    future: Future[JobResult]
    is_ours: bool
    """Whether this rank stores the blocks, rather than another that has the same ones."""


class OffloadingWorker(WorkerConnector):
    """One tier, in a worker's process. Called by the engine's thread; transfers run on its own."""

    def __init__(self, tier: OffloadingSpec, host: HostSlots, drain: float) -> None:
        self.tier = name = tier.tier_name
        self.capacity = tier.capacity_bytes
        self._log_name = log_name(tier)
        self._spec = spec = tier if isinstance(tier, StoreSpec) else None
        self._verify = isinstance(tier, HostSpec) and tier.verify == "always"
        self._host = host
        self._drain = drain
        self._store: Guarded | None = None
        self._handshake: WorkerHandshake | None = None
        self._joining: Future[None] | None = None
        self._unusable: str | None = None
        self._closed = self._is_apart = False
        # By job, oldest first. One of `dict` would be slow to tell its first after many have gone.
        self._stores: OrderedDict[int, _Store] = OrderedDict()
        self._moves: dict[int, Future[JobResult]] = {}
        self._begun: OffloadingConnectorMetadata | None = None
        self._fence: Fence = ENDED
        self._ended: dict[int, JobResult] = {}
        self._failed_blocks: set[int] = set()
        self._measures: Measures = {}
        self._sent_handshake = False
        self._totals = Counter[str]()
        self._health = HEALTHY
        self._failed_stores = RepeatedLog(
            logger, f"tier {self._log_name!r}", "stores failed on this worker", logging.ERROR
        )
        self._load_rate = RateLimit(spec.load_rate if spec else None, host.engine.world_size)
        at_once = spec.loads_at_once if spec else LOADS_AT_ONCE
        self._loading = Loading(self._log_name, host, self._load_rate, self._verify, at_once)
        if self._verify or spec is not None:
            host.checksums.are_kept = True
        writers = 1 if host.engine.replicated else host.engine.world_size
        self._rate_limit = RateLimit(spec.store_rate if spec else None, writers)
        self._writer = IoExecutor(1, f"store-{name}")
        self._puts = Puts(host, self._rate_limit, self._writer, in_host=spec is None)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's paged KV and open the tier; one that can't be used is reported."""
        self._host.open(kv_caches)
        self._writer.bind(self._host.copier.cpus)
        if self._spec is None:
            self._handshake = self._host.handshake(self.tier)
            return
        try:
            self._loading.open()
        except TierUnusable as error:
            self._unusable = str(error)
        handshake = self._host.shared_handshake(may_wait=True)
        if handshake is not None:
            self._open(self._spec, handshake)

    def _open(self, spec: StoreSpec, handshake: WorkerHandshake) -> None:
        """Open the store, under the worker's namespace; publish the handshake only afterwards."""
        if self._unusable is None:
            try:
                self._loading.open()
                site = StoreContext(handshake.payload_bytes, self._host.engine.world_size)
                with bound(self._host.copier.cpus):  # a store's threads touch the host pool
                    apart = spec.stores_apart(has_gpu=self._host.copier.pin)
                    store = open_guarded(spec, site, puts_apart=apart)
                if apart and not self._closed:
                    self._is_apart = True
                    self._host.checksums.compute_apart()
                self._loading.serve(store, handshake.namespace)
                notes = NamespaceNotes(spec, self._host.note)
                self._puts.serve(store, handshake.namespace, notes)
                self._store = store
                if self._spec is not None and self._spec is not spec:  # changed meanwhile
                    store.resize(self._spec.capacity_bytes)
                    store.use_deadline(self._spec.deadline)
            except TierUnusable as error:
                self._unusable = str(error)
        self._handshake = handshake
        if self._closed and self._store is not None:
            self._store.close()  # it came after the worker had waited for it

    # -- changes of the chain ----------------------------------------------------------------

    def open_beside(self) -> None:
        """As `register_kv_caches`, beside the steps of an engine that serves; see `opened`."""
        self._host.open({})

    def opened(self) -> str | None:
        """Why the tier can't be used; empty: it can; None: not known yet. Does not wait."""
        return None if self.get_handshake_metadata() is None else self._unusable or ""

    def retune(self, spec: OffloadingSpec) -> None:
        """Work by these settings from now on; another capacity is prepared. Called by the engine's
        thread, before the step begins. Does not wait."""
        before, self.capacity = self.capacity, spec.capacity_bytes
        if not isinstance(spec, StoreSpec):
            if before != self.capacity:
                self._host.resize(self.tier, self.capacity)
            return
        self._spec = spec
        self._rate_limit.change(spec.store_rate)
        self._load_rate.change(spec.load_rate)
        if self._store is not None:
            if before != self.capacity:
                self._store.resize(self.capacity)
            self._store.use_deadline(spec.deadline)

    def prepare_resize(self, spec: OffloadingSpec) -> str:
        """Make sure that the tier can have the capacity of `spec` on this rank; else return the
        reason. Until `retune` or `abort_resize` nothing else changes. May take long; any thread but
        the engine's calls it, for one change of the chain at a time."""
        if not spec.resizes:
            return f"type {spec.type} can't be resized while it is open"
        capacity = spec.capacity_bytes
        part = self._host.payload_bytes + 2 * ALIGNMENT * isinstance(spec, StoreSpec)
        if not slots_within(capacity, part, self._host.engine.world_size):
            return f"capacity {format_size(capacity)} is less than a block of each rank"
        return self._host.prepare_resize(self.tier, capacity) if self._spec is None else ""

    def abort_resize(self) -> None:
        """Give back what was prepared. Does not wait."""
        if self._spec is None:
            self._host.abort_resize()

    def unregister_kv_caches(self) -> None:
        """Wait for the gathers, and end the loads, of which no copy begins any more."""
        _fence([*self._stores.values()])  # a trainer's thread may call this beside a step
        self._loading.halt()

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """What the scheduler must know of this worker; None: the tier is not open yet. One whose
        facts came late is opened beside the steps, since that may take its time."""
        if self._handshake is None and self._spec is not None:
            handshake = self._host.shared_handshake()
            if handshake is not None:
                self._join(self._spec, handshake)
        return self._handshake

    def _join(self, spec: StoreSpec, handshake: WorkerHandshake) -> None:
        if self._joining is None:
            self._joining = self._writer.submit(self._open, spec, handshake)
        elif self._joining.done() and (error := self._joining.exception()) is not None:
            # Else the scheduler would wait for this rank without a word.
            self._unusable = f"it can't be opened: {reason_of(error)}"
            self._handshake = handshake

    # -- loading -----------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        generations = {job.generation for job in self._orders().reqs_to_load}
        if generations:
            # Here all is queued that touches blocks which are to be loaded: zeroing, and the steps
            # of requests that had them. Many runners launch this step before `start_load_kv`. What
            # changed the weights is queued, too: the look of `start_load_kv`, which is this one,
            # would wait for the step.
            self._fence = self._host.copier.fence()
            for generation in generations:
                self._host.watch.loads(generation)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._orders()
        if orders.moves is not None:
            self._moves[orders.moves.job_id] = self._host.move(orders.moves.items)
        if orders.vacated is not None:
            self._host.vacated(*orders.vacated)
        self._loading.begin(orders.reqs_to_load, self._fence)
        self._loading.begin_fills(orders.slots_to_fill)

    @property
    def loading_threads(self) -> int:
        """See `Loading.threads`; for a replay that counts time itself."""
        return self._loading.threads

    def _orders(self) -> OffloadingConnectorMetadata:
        assert isinstance(self._metadata, OffloadingConnectorMetadata), "no step is bound"
        return self._metadata

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """Loads that have ended since the last call, whole or in part; saves hold nothing back.
        Requests to recompute whole are named where blocks can't be."""
        meta = self._orders()
        if meta.idle:
            # Engines may leave `wait_for_save` out of a step that computes nothing.
            self.wait_for_save()
        ended = self._loading.ended(meta.idle)
        self._ended |= {job.job_id: end for job, end in self._loading.ended_fills(meta.idle)}
        results = TransferResults(finished_recving={load.job.request_id for load in ended})
        for job, result, damaged in ended:
            self._note_end(job.job_id, len(job.items), result, "load")
            failed = result.failed
            merge(self._measures, {"load_timeouts": int(result.late), "damaged_blocks": damaged})
            if not self._host.engine.all_or_nothing_loads:
                self._failed_blocks |= {job.items[index].target for index in failed}
                if failed and job.first is not None:
                    self._failed_blocks.add(job.first)
            elif failed:
                results.failed_recving.add(job.request_id)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # -- storing -----------------------------------------------------------------------------

    def wait_for_save(self) -> None:
        """Begin the step's stores: fill the slots, then feed the tier from them. Does not wait for
        the device."""
        meta = self._orders()
        if meta is self._begun:
            return
        self._begun = meta
        is_ours = not (meta.one_writer and self._host.engine.rank)
        watch = self._host.watch
        jobs, may_store = meta.reqs_to_store if watch.may_store else [], watch.adapters.may_store
        true = [job for job in jobs if not job.adapter or may_store(job.adapter)]
        # Also where another rank stores them: a tier in host memory may share the gather.
        gather = self._gather([item for job in true for item in self._puts.in_order(job)])
        if gather is not None and self._host.engine.overwrites_early:
            gather.hold_engine()  # what the next step moves and zeroes first may be read still
        for job in true:
            future = self._puts.begin(job, is_ours)
            self._stores[job.job_id] = _Store(job, gather, future, is_ours)
        if len(true) < len(meta.reqs_to_store):
            self._refuse(job for job in meta.reqs_to_store if job.job_id not in self._stores)

    def _refuse(self, jobs: Iterable[StoreJob]) -> None:
        """End jobs whose blocks may not be what their keys say."""
        for job in jobs:
            future: Future[JobResult] = Future()
            future.set_result(JobResult(1, set(range(len(job.items)))))
            self._stores[job.job_id] = _Store(job, None, future, is_ours=True)

    def _gather(self, items: Sequence[StoreItem]) -> Gather | None:
        """Begin the one gather of a step: each has its launches and waits, however few blocks."""
        try:
            return self._host.gather(items)
        except (RuntimeError, IndexError) as error:  # a device without memory, no such block
            # The slots hold nobody's block then, so that the job ends as failed.
            self._failed_stores.log("tier %r: blocks can't be gathered: %s", self._log_name, error)
            return None

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        flush = kv_connector_metadata.jobs_to_flush
        if self._host.watch.stopped:  # steps that never came may have ordered to flush others
            flush = [*self._stores]
        # The host waits, also where the engine's device would: another connector beside ours may
        # write into these blocks by other means than the engine's stream.
        _fence(self._stores[job_id] for job_id in flush if job_id in self._stores)

    # -- ends --------------------------------------------------------------------------------

    def _note_end(self, job_id: int, blocks: int, result: JobResult, verb: str) -> None:
        self._ended[job_id] = result
        payload = self._host.payload_bytes
        good = blocks - len(result.failed) - result.renewed
        size = result.bytes = good * payload
        past = {"load": "loaded", "store": "stored"}[verb]
        merge(
            self._measures,
            {
                f"{past}_blocks": good,
                f"{past}_bytes": size,
                f"{verb}_failures": 0 if result.outdated else len(result.failed),
                f"{verb}_seconds": [result.seconds] if good else [],
                f"{verb}_size_bytes": [size] if good else [],
            },
        )
        if result.renewed:
            renewed = {"renewed_blocks": result.renewed, "renewed_bytes": result.renewed * payload}
            merge(self._measures, renewed)

    def _outcome(self, store: _Store) -> JobResult:
        error = store.future.exception()
        if error is None:
            return store.future.result()
        self._failed_stores.log("tier %r: a store failed on this worker: %s", self._log_name, error)
        return JobResult(1, set(range(len(store.job.items))))

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Report what ended since the last call, and this worker's handshake once."""
        ended = 0
        for _ in range(MOST_ENDS):
            store = next(iter(self._stores.values()), None)
            if store is None or not store.future.done() or ended >= MOST_ENDED:  # they end in order
                break
            self._stores.popitem(last=False)
            ended += len(store.job.items)
            result = self._outcome(store)
            blocks = len(store.job.items) if store.is_ours else len(result.failed)
            self._note_end(store.job.job_id, blocks, result, "store")
        for job_id in [job_id for job_id, move in self._moves.items() if move.done()]:
            self._ended[job_id] = self._moves.pop(job_id).result()
        if self._store is not None:
            totals = Counter(tier_failures=self._store.failures.total)
            totals["evictions"] = self._store.counts().evicted
            totals["damaged_blocks"] = self._store.damaged()
            merge(self._measures, totals - self._totals)
            self._totals = totals
        meta = OffloadingWorkerMetadata(self._ended, measures=self._measures)
        health = HEALTHY
        if self._store is not None:
            health = warned(self._host.checksums.computed_here, self._store.health)
            if health.is_degraded and health.writes_up:
                self._puts.ask_again()
        health = warned(self._host.copier_warning(), health)
        if why := self._host.watch.stopped:
            health = health._replace(writes=False, writes_up=False, why=why)
        if health != self._health:
            self._health = meta.health[self._host.engine.rank] = health
        handshake = None if self._sent_handshake else self.get_handshake_metadata()
        if handshake is not None:
            meta.handshakes[handshake.rank] = handshake
            meta.unusable = self._unusable
            self._sent_handshake = True
        self._ended, self._measures = {}, {}
        has_news = meta.jobs or meta.handshakes or meta.health or any(meta.measures.values())
        return meta if has_news else None

    def shutdown(self) -> None:
        """Let stores in flight end, for `drain` seconds at most, and release the tier."""
        self._host.watch.close()
        self.detach()
        self._host.close()

    def detach(self) -> None:
        """The same, of an engine that goes on: what all tiers share stays."""
        self._rate_limit.stop()
        self._closed = True
        until = time.monotonic() + self._drain
        in_flight: list[Future[Any]] = [store.future for store in self._stores.values()]
        wait([*in_flight, self._joining] if self._joining else in_flight, self._drain)
        lost = sum(len(s.job.items) for s in self._stores.values() if not s.future.done())
        if lost and self._host.engine.rank == 0:  # the others lose the same ones
            line = "tier %r: %d blocks were in flight into it when the engine ended, and are lost"
            logger.warning(line, self._log_name, lost)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._loading.close(max(0.0, until - time.monotonic()))
        if self._store is not None:
            self._store.close(HUNG_CLOSE_SECONDS if lost else None)
        if self._is_apart:
            self._host.checksums.compute_apart(-1)


def _fence(stores: Iterable[_Store]) -> None:
    """Wait for gathers. That one has failed shows when its bytes are read."""
    for gather in (store.gather for store in stores if store.gather is not None):
        try:
            gather.wait()
        except (RuntimeError, IndexError) as error:
            logger.debug("a gather failed: %s", error)
