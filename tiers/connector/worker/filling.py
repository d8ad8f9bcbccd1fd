"""Filling: loads blocks of one tier's store into slots of the host pool, for no request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

from tiers.concurrency.executors import IoExecutor, wait_a_moment
from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.weight_watch import WeightVerdict
from tiers.contract.generation import space_of
from tiers.contract.messages import JobResult, LoadJob
from tiers.store import Block
from tiers.wrappers.guard import Guarded


class Filling:
    """The fills of one tier on one worker, on a thread of their own: no load waits for them. The
    engine's thread calls it."""

    def __init__(self, tier: str, host: HostSlots, rate_limit: RateLimit) -> None:
        self._host, self._rate_limit = host, rate_limit
        self._store: Guarded | None = None
        self._namespace = b""
        self._fills: list[tuple[LoadJob, Future[list[bool]]]] = []
        # Begun now: in the midst of traffic no thread may be had.
        self._thread = IoExecutor(1, f"warm-{tier}")

    def serve(self, store: Guarded, namespace: bytes) -> None:
        """Load from `store` from now on, under the worker's `namespace`."""
        self._namespace = namespace
        self._store = store

    def begin(self, jobs: Sequence[LoadJob]) -> None:
        """Begin fills. Their slots hold nothing until they have ended."""
        for job in jobs:
            verdict = self._host.watch.loads(job.generation)
            self._host.empty([item.target for item in job.items])
            self._fills.append((job, self._thread.submit(self._fill, job, verdict)))

    def _fill(self, job: LoadJob, verdict: WeightVerdict) -> list[bool]:
        """Which blocks are in their slots now, verified by the store."""
        host = self._host
        if self._store is None or not verdict.unchanged():
            return [False] * len(job.items)
        if not self._rate_limit.take(len(job.items) * host.payload_bytes, host.now() + job.seconds):
            return [False] * len(job.items)
        space = space_of(self._namespace, job.generation)
        payload = host.memory.payload
        return self._store.get([Block(space + i.key, payload(i.target)) for i in job.items])

    def ended(self, is_idle: bool) -> list[tuple[LoadJob, JobResult]]:
        """Fills that have ended since the last call, whose slots hold their blocks from now on. In
        an idle step it waits a moment for one."""
        if is_idle:
            wait_a_moment([future for _, future in self._fills])
        over = [fill for fill in self._fills if fill[1].done()]
        self._fills = [fill for fill in self._fills if not fill[1].done()]
        return [(job, self._end(job, future)) for job, future in over]

    def _end(self, job: LoadJob, future: Future[list[bool]]) -> JobResult:
        held = [False] * len(job.items) if future.exception() is not None else future.result()
        filled = [item for item, ok in zip(job.items, held, strict=True) if ok]
        self._host.filled([item.target for item in filled], [item.key for item in filled])
        return JobResult(1, {index for index, ok in enumerate(held) if not ok})

    def close(self, drain: float) -> None:
        """End; wait for what is in flight for `drain` seconds at most."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([future for _, future in self._fills], drain)
