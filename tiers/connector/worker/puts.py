"""Puts: feeds a tier's store from the host pool, in batches, at the rate that the tier may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.weight_watch import WeightVerdict
from tiers.contract.generation import space_of
from tiers.contract.messages import JobResult, StoreItem, StoreJob
from tiers.store import GatheredBlock, batch_blocks
from tiers.wrappers.guard import Guarded


class _QueuedPut(NamedTuple):
    """A job in the queue. `is_ours`: this rank stores its blocks. `verdict`: on the weights that
    computed them."""

    job: StoreJob
    is_ours: bool
    verdict: WeightVerdict

    def goes_with(self, other: _QueuedPut) -> bool:
        """Whether one put can take both."""
        if self.verdict.waits_for_others():
            return False
        return self.is_ours == other.is_ours and self.job.generation == other.job.generation


class Puts:
    """Puts jobs' blocks into one tier's store, in order, on the tier's writer thread.

    Small jobs that wait at the same time go into the store by one put: a block or two of each
    request that decodes would cost it a transaction or a round trip each.

    Where the engine takes events it also notes which blocks the store had before: those were told
    by the engine that stored them, and a tier that engines share is told once. One rank notes it
    for all, since a block is one event.
    """

    def __init__(
        self, host: HostSlots, rate_limit: RateLimit, writer: Executor, in_host: bool
    ) -> None:
        """`in_host`: the tier is in host memory, where gathered blocks are stored."""
        self._host = host
        self._rate_limit = rate_limit
        self._writer = writer
        self._in_host = in_host
        self._looks = host.engine.kv_events and host.engine.rank == 0
        self._store: Guarded | None = None
        self._namespace = b""
        self._waiting: deque[_QueuedPut] = deque()
        # Blocks so far: the engine's thread counts those queued, the writer's those taken.
        self._queued = self._taken = 0
        self._results: dict[int, JobResult] = {}

    def serve(self, store: Guarded, namespace: bytes) -> None:
        """Put into `store` from now on, under the worker's `namespace`."""
        self._namespace = namespace
        self._store = store

    def begin(self, job: StoreJob, is_ours: bool) -> Future[JobResult]:
        """Queue a job; its future raises what made its gather fail. Does not wait."""
        self._queued += len(job.items)
        verdict = self._host.watch.stores(job.generation)
        self._waiting.append(_QueuedPut(job, is_ours, verdict))
        return self._writer.submit(self._end, job.job_id)

    def _end(self, job_id: int) -> JobResult:
        """Put the jobs that wait, unless this one was put with those before it."""
        if job_id not in self._results:
            self._put_next()
        return self._results.pop(job_id)

    def _put_next(self) -> None:
        first = self._take()
        began = self._host.now()
        jobs = [(first.job, self._gathered(first))]
        stored, known, renewed = [True] * len(jobs[0][1]), set[bytes](), 0
        if not self._in_host and first.is_ours:
            # The gather is shared with other tiers; only those of host memory have no more to do.
            began = self._host.now()
            jobs += self._more(first)
            items = [job.items[i] for job, gathered in jobs for i in gathered]
            before = self._renewed()
            stored, known = self._put(first.job.generation, items)
            renewed = self._renewed() - before
        seconds = (self._host.now() - began) / max(1, len(stored))
        answers = iter(stored)
        for job, gathered in jobs:
            good = {i for i in gathered if next(answers)}
            had = {i for i in good if job.items[i].key in known}
            failed = set(range(len(job.items))) - good
            own = min(renewed, len(good))
            renewed -= own
            result = JobResult(1, failed, seconds * len(gathered), already_stored=had, renewed=own)
            self._results[job.job_id] = result

    def _renewed(self) -> int:
        """Blocks so far that the store had already; this thread alone puts into it."""
        return 0 if self._store is None else self._store.counts().renewed

    def _gathered(self, waiting: _QueuedPut) -> list[int]:
        """Wait for the job's gather; return which items are in their slots then. Those of other
        weights than their keys stand for count as failed: what only this engine finds goes with
        the generation, and what others find must be right on all ranks."""
        items, verdict = waiting.job.items, waiting.verdict
        held = self._host.wait_and_verify([item.slot for item in items], [i.key for i in items])
        unchanged = verdict.unchanged() if self._in_host else verdict.unchanged_everywhere()
        return [i for i, ok in enumerate(held) if ok and unchanged]

    def _more(self, first: _QueuedPut) -> list[tuple[StoreJob, list[int]]]:
        """Take the next jobs from the queue that one put takes with `first`, an eighth of what
        waits at most. Blocks make room for others when their put has ended, and a tier that lags
        must not run dry until those come: by taking all, a replay dropped 75% of them for 62%."""
        more: list[tuple[StoreJob, list[int]]] = []
        own = len(first.job.items)
        waiting = own + self._queued - self._taken
        room = min(batch_blocks(self._host.payload_bytes), waiting // 8) - own
        while self._waiting and self._waiting[0].goes_with(first):
            job = self._waiting[0].job
            room -= len(job.items)
            if room < 0:
                break
            try:
                more.append((job, self._gathered(self._waiting[0])))
            except (RuntimeError, IndexError):
                break  # it fails alone, in its turn
            self._take()
        return more

    def _take(self) -> _QueuedPut:
        taken = self._waiting.popleft()
        self._taken += len(taken.job.items)
        return taken

    def _put(self, generation: bytes, items: Sequence[StoreItem]) -> tuple[list[bool], set[bytes]]:
        """Put these items; which are held now, and the keys that were before."""
        stored: list[bool] = []
        known: set[bytes] = set()
        if self._store is None:
            return [False] * len(items), known
        space = space_of(self._namespace, generation)
        memory, size = self._host.memory, self._host.payload_bytes
        step = batch_blocks(size)
        for start in range(0, len(items), step):
            part = items[start : start + step]
            names = [space + item.key for item in part]
            if self._looks:
                had = self._store.has(names)
                known.update(item.key for item, was in zip(part, had, strict=True) if was)
            self._rate_limit.take(len(part) * size)
            slots = [item.slot for item in part]
            payloads = map(memory.payload, slots)
            checksums = self._host.checksums(slots)
            stored += self._store.put([*map(GatheredBlock, names, payloads, checksums)])
        return stored, known
