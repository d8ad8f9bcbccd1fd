"""The worker half of one tier's connector: moves blocks, beside the engine's own work."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import torch

from spec.offloading import StoreSite, StoreSpec
from tiers.connector.base import (
    Copy,
    JobResult,
    LoadItem,
    LoadJob,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StoreJob,
)
from tiers.connector.host import HostSlots
from tiers.connector.stats import Measures, merge
from tiers.errors import TierUnusable
from tiers.guard import Guarded, guard
from tiers.pool import SlotMemory, slot_stride
from tiers.store import Block

logger = logging.getLogger(__name__)

LOADERS = 2
"""Loads under way at once."""
BOUNCE_BYTES = 32 << 20
"""Host memory through which each loader passes blocks that come from a store."""
IDLE_WAIT = 0.002
"""Seconds that a step with nothing to compute may wait for a load, rather than spin."""


class Outcome(NamedTuple):
    """Which items of a job failed, and what moving the others took."""

    failed: set[int]
    seconds: float


@dataclass
class _Load:
    job: LoadJob
    future: Future[Outcome]


@dataclass
class _Store:
    job: StoreJob
    gather: Copy | None
    future: Future[Outcome]


class OffloadingWorker:
    """One tier, in a worker's process. Called by the engine's thread; transfers run on its own."""

    def __init__(self, tier: str, spec: StoreSpec | None, host: HostSlots, drain: float) -> None:
        self.tier = tier
        self._spec = spec
        self._host = host
        self._drain = drain
        self._store: Guarded | None = None
        self._namespace = b""
        self._unusable: str | None = None
        self._loads: list[_Load] = []
        self._stores: list[_Store] = []
        self._ended: dict[int, JobResult] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._measures: Measures = {}
        self._said_hello = False
        self._failures_seen = 0
        self._bounce: list[SlotMemory] = []
        self._loader = ThreadPoolExecutor(LOADERS, thread_name_prefix=f"kvtiers-load-{tier}")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"kvtiers-store-{tier}")

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's paged KV and open the tier; one that can't be used is reported."""
        self._host.open(kv_caches)
        self._namespace = self._host.hello().namespace
        if self._spec is None:
            return
        payload = self._host.payload_bytes
        try:
            site = StoreSite(payload, self._host.engine.world_size)
            self._store = guard(self._spec.open(site), self.tier)
        except TierUnusable as error:
            self._unusable = str(error)
            return
        rows = min(64, max(1, BOUNCE_BYTES // slot_stride(payload)))
        pin = self._host.copier.pin
        # A load that first had to be given its memory would take twice as long.
        self._bounce = [SlotMemory(rows, payload, pin, touch=True) for _ in range(LOADERS)]

    # -- loading -----------------------------------------------------------------------------

    def start_load_kv(self, meta: OffloadingConnectorMetadata) -> None:
        """Begin the step's loads, each behind what the engine has told its device so far."""
        for job in meta.reqs_to_load:
            fence = self._host.copier.fence()
            self._loads.append(_Load(job, self._loader.submit(self._load, job, fence)))

    def _load(self, job: LoadJob, fence: object) -> Outcome:
        began = time.perf_counter()
        resident = [(i, item) for i, item in enumerate(job.items) if item.slot is not None]
        asked = [(i, item) for i, item in enumerate(job.items) if item.slot is None]
        failed = self._load_resident(resident, fence) if resident else set()
        failed |= self._load_stored(asked, fence) if asked else set()
        return Outcome(failed, time.perf_counter() - began)

    def _load_resident(self, items: list[tuple[int, LoadItem]], fence: object) -> set[int]:
        slots = [item.slot for _, item in items if item.slot is not None]
        held = self._host.settle(slots, [item.key for _, item in items])
        good = [pair for pair, ok in zip(items, held, strict=True) if ok]
        self._host.copier.scatter(
            self._host.memory.rows,
            [item.slot for _, item in good if item.slot is not None],
            [item.target for _, item in good],
            fence,
        )
        return {i for i, _ in items} - {i for i, _ in good}

    def _load_stored(self, items: list[tuple[int, LoadItem]], fence: object) -> set[int]:
        if self._store is None:
            return {i for i, _ in items}
        # A loader thread runs one load at a time, so there is a bounce for each.
        bounce = self._bounce.pop()
        try:
            return self._through(bounce, self._store, items, fence)
        finally:
            self._bounce.append(bounce)

    def _through(
        self, bounce: SlotMemory, store: Guarded, items: list[tuple[int, LoadItem]], fence: object
    ) -> set[int]:
        failed: set[int] = set()
        step = bounce.rows.shape[0]
        for start in range(0, len(items), step):
            wave = items[start : start + step]
            got = store.get(
                [
                    Block(self._namespace + item.key, bounce.payload(row))
                    for row, (_, item) in enumerate(wave)
                ]
            )
            rows = [row for row, ok in enumerate(got) if ok]
            self._host.copier.scatter(bounce.rows, rows, [wave[r][1].target for r in rows], fence)
            failed |= {i for (i, _), ok in zip(wave, got, strict=True) if not ok}
            if failed:
                # The engine uses what precedes the first failed block, and recomputes the rest.
                return failed | {i for i, _ in items[start + step :]}
        return failed

    def get_finished(self, meta: OffloadingConnectorMetadata) -> set[str]:
        """Requests whose load has ended since the last call, whole or in part."""
        if meta.idle and self._loads:
            wait([load.future for load in self._loads], IDLE_WAIT, FIRST_COMPLETED)
        ended = [load for load in self._loads if load.future.done()]
        self._loads = [load for load in self._loads if not load.future.done()]
        for load in ended:
            outcome = self._end(load.job.job_id, load.future, len(load.job.items), "load")
            if self._host.engine.loads_whole:
                self._failed_requests |= {load.job.request_id} if outcome.failed else set()
            else:
                self._failed_blocks |= {load.job.items[i].target for i in outcome.failed}
        return {load.job.request_id for load in ended}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Paged blocks that a load left without their KV, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_requests_with_load_errors(self) -> set[str]:
        """Requests whose load failed, since the last call; where blocks can't be named."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    # -- storing -----------------------------------------------------------------------------

    def wait_for_save(self, meta: OffloadingConnectorMetadata) -> None:
        """Begin the step's stores: fill the slots, then feed the tier from them; never waits."""
        for job in meta.reqs_to_store:
            gather = self._host.gather(job.items)
            self._stores.append(_Store(job, gather, self._writer.submit(self._put, job)))

    def _put(self, job: StoreJob) -> Outcome:
        slots = [item.slot for item in job.items]
        began = time.perf_counter()
        held = self._host.settle(slots, [item.key for item in job.items])
        good = [i for i, ok in enumerate(held) if ok]
        if self._spec is not None:
            # The gather is shared with other tiers; only those of host memory have no more to do.
            began = time.perf_counter()
            stored = [False] * len(good)
            if self._store is not None:
                memory = self._host.memory
                stored = self._store.put(
                    [
                        Block(self._namespace + job.items[i].key, memory.payload(slots[i]))
                        for i in good
                    ]
                )
            good = [i for i, ok in zip(good, stored, strict=True) if ok]
        return Outcome(set(range(len(slots))) - set(good), time.perf_counter() - began)

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> None:
        """Wait for gathers from blocks that this step overwrites."""
        flush = set(meta.jobs_to_flush)
        _fence([store for store in self._stores if store.job.job_id in flush])

    def fence_all(self) -> None:
        """Wait for every gather under way."""
        _fence(self._stores)

    # -- ends --------------------------------------------------------------------------------

    def _end(self, job_id: int, future: Future[Outcome], blocks: int, verb: str) -> Outcome:
        error = future.exception()
        if error is not None:
            logger.error("tier %r: a %s failed on this worker: %s", self.tier, verb, error)
            outcome = Outcome(set(range(blocks)), 0.0)
        else:
            outcome = future.result()
        self._ended[job_id] = JobResult(1, outcome.failed, outcome.seconds)
        good = blocks - len(outcome.failed)
        size = good * self._host.payload_bytes
        past = {"load": "loaded", "store": "stored"}[verb]
        merge(
            self._measures,
            {
                f"{past}_blocks": good,
                f"{past}_bytes": size,
                f"{verb}_failures": len(outcome.failed),
                f"{verb}_seconds": [] if error else [outcome.seconds],
                f"{verb}_size_bytes": [] if error else [size],
            },
        )
        return outcome

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """What ended since the last call, and, the first time, who this worker is."""
        for store in [s for s in self._stores if s.future.done()]:
            self._end(store.job.job_id, store.future, len(store.job.items), "store")
            self._stores.remove(store)
        if self._store is not None:
            failures = self._store.failures.total
            merge(self._measures, {"tier_failures": failures - self._failures_seen})
            self._failures_seen = failures
        meta = OffloadingWorkerMetadata(self._ended, measures=self._measures)
        if not self._said_hello:
            hello = self._host.hello()
            meta.hellos[hello.rank] = hello
            meta.unusable = self._unusable
            self._said_hello = True
        self._ended, self._measures = {}, {}
        return meta if meta.jobs or meta.hellos or any(meta.measures.values()) else None

    def close(self) -> None:
        """Let stores under way end, for `drain` seconds at most, and release the tier."""
        wait([store.future for store in self._stores], self._drain)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=True, cancel_futures=True)
        if self._store is not None:
            self._store.close()
        for bounce in self._bounce:
            bounce.close()
        self._host.close()


def _fence(stores: Sequence[_Store]) -> None:
    """Wait for gathers; whoever reads the bytes of one that failed learns of it."""
    for gather in (store.gather for store in stores if store.gather is not None):
        try:
            gather.wait()
        except RuntimeError as error:
            logger.debug("a gather failed: %s", error)
