"""Loading: copies one tier's blocks back to a worker's engine, each load within its time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from tiers.concurrency.executors import io_executor, wait_a_moment
from tiers.concurrency.rate_limit import RateLimit
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.contract.generation import space_of
from tiers.connector.contract.messages import JobResult, LoadItem, LoadJob, LoadTimes
from tiers.connector.worker.host_slots import HostSlots
from tiers.errors import TierUnusable
from tiers.host.memory import SlotMemory, slot_stride
from tiers.store import Block
from tiers.wrappers.guard import Guarded

logger = logging.getLogger(__name__)

LOADERS = 2
"""Loads under way at once."""
WAVE_BYTES = 32 << 20
"""Bytes that a loader copies at once, and the memory through which it passes stores' blocks."""
_Numbered = list[tuple[int, LoadItem]]


class Ended(NamedTuple):
    """A load that is over. `damaged`: blocks of the host pool that differ from their checksums."""

    job: LoadJob
    result: JobResult
    in_time: bool
    damaged: int


class _Laps:
    """What a load spends its time on, from one lap to the next. Used by the load's thread."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spent = dict.fromkeys(LoadTimes._fields, 0.0)

    def lap(self, part: str) -> None:
        """All since the last lap was spent on `part`, a field of LoadTimes."""
        now = time.perf_counter()
        self._spent[part] += now - self._last
        self._last = now

    @property
    def times(self) -> LoadTimes:
        """What has been spent so far."""
        return LoadTimes(**self._spent)


class _Load:
    """A load under way. Nothing is copied after `end`."""

    def __init__(self, job: LoadJob, now: float) -> None:
        self.job = job
        self.until = now + job.seconds
        self.seconds = job.seconds
        """What moving the blocks took, once that is known."""
        self.damaged = 0
        self.laps = _Laps()
        self._lost: set[int] = set()
        self._arrived: set[int] = set()
        self._is_over = False
        # Held during copies into the engine's memory. The engine may reuse a load's blocks after
        # `end`, which without the lock could come between the check of `_is_over` and the copy.
        self._lock = threading.Lock()

    def record_missing(self, wave: _Numbered, held: Sequence[bool]) -> None:
        """Record the items of a wave that the tier does not have."""
        with self._lock:
            self._lost.update(i for (i, _), ok in zip(wave, held, strict=True) if not ok)

    def copy_in(self, indexes: Sequence[int], copy: Callable[[], None]) -> bool:
        """Call `copy` for these items, unless the load is over; return whether it was not."""
        with self._lock:
            if self._is_over:
                return False
            copy()
            self._arrived.update(indexes)
            return True

    def end(self) -> tuple[set[int], set[int]]:
        """End the load; return the items that did not arrive, and those of them that the tier does
        not have. Waits for the copy under way at most."""
        with self._lock:
            self._is_over = True
            failed = set(range(len(self.job.items))) - self._arrived
            return failed, self._lost & failed


class Loading:
    """The loads of one tier on one worker. The engine's thread calls it; its own threads copy.
    `verify`: load blocks of the host pool only if they match their checksums.
    """

    def __init__(self, tier: str, host: HostSlots, rate_limit: RateLimit, verify: bool) -> None:
        self._tier = tier
        self._host = host
        self._store: Guarded | None = None
        self._namespace = b""
        self._verify = verify
        self._rate_limit = rate_limit
        self._said_late = False
        where = f"tier {tier!r}"
        self._failed_loads = RepeatedLog(
            logger, where, "loads failed on this worker", logging.ERROR
        )
        self._damage_log = RepeatedLog(logger, where, "blocks were damaged in host memory")
        self._loads: list[tuple[_Load, Future[None]]] = []
        self._bounce: list[SlotMemory] = []
        self._threads = io_executor(LOADERS, f"load-{tier}")

    def open(self) -> None:
        """Allocate the memory through which stores' blocks pass; the paged KV is registered. Raises
        TierUnusable if memory is short."""
        payload, copier = self._host.payload_bytes, self._host.copier
        rows = min(64, max(1, WAVE_BYTES // slot_stride(payload)))
        # Touched now: a first load would take twice as long otherwise.
        self._bounce = []
        try:
            for _ in range(LOADERS):
                self._bounce.append(SlotMemory(rows, payload, copier.pin, touch=True))
        except (TierUnusable, OSError) as error:
            raise TierUnusable(f"there is no memory to load its blocks through: {error}") from error

    def serve(self, store: Guarded, namespace: bytes) -> None:
        """Load from `store` from now on, under the worker's `namespace`."""
        self._namespace = namespace
        self._store = store

    def begin(self, jobs: Sequence[LoadJob]) -> None:
        """Begin loads; each copies after the work queued on the engine's device so far."""
        for job in jobs:
            load, fence = _Load(job, self._host.now()), self._host.copier.fence()
            self._loads.append((load, self._threads.submit(self._run, load, fence)))

    def _run(self, load: _Load, fence: object) -> None:
        began = self._host.now()
        load.laps.lap("queue")
        self._load_items(load, fence)
        load.seconds = self._host.now() - began

    def _load_items(self, load: _Load, fence: object) -> None:
        numbered = list(enumerate(load.job.items))
        resident = [pair for pair in numbered if pair[1].slot is not None]
        stored = [pair for pair in numbered if pair[1].slot is None]
        if resident:
            self._load_resident(load, resident, fence)
        if not stored or self._store is None:
            return
        # A thread runs one load at a time, so there is a bounce for each.
        bounce = self._bounce.pop()
        try:
            self._load_stored(load, self._store, bounce, stored, fence)
        finally:
            self._bounce.append(bounce)

    def _load_resident(self, load: _Load, items: _Numbered, fence: object) -> None:
        memory = self._host.memory
        # In waves: `end` waits for the copy under way.
        step = max(1, WAVE_BYTES // memory.rows.stride(0))
        for start in range(0, len(items), step):
            wave = items[start : start + step]
            slots = [item.slot for _, item in wave if item.slot is not None]
            held = self._held(load, wave, slots)
            load.laps.lap("check")
            load.record_missing(wave, held)
            if not self._copy_wave(load, memory, slots, wave, held, fence):
                return

    def _held(self, load: _Load, items: _Numbered, slots: Sequence[int]) -> list[bool]:
        held = self._host.wait_and_verify(slots, [item.key for _, item in items])
        if not self._verify:
            return held
        intact = [ok and self._host.is_intact(s) for s, ok in zip(slots, held, strict=True)]
        load.damaged += sum(held) - sum(intact)
        return intact

    def _load_stored(
        self, load: _Load, store: Guarded, bounce: SlotMemory, items: _Numbered, fence: object
    ) -> None:
        step = bounce.rows.shape[0]
        space = space_of(self._namespace, load.job.generation)
        for start in range(0, len(items), step):
            wave = items[start : start + step]
            if not self._rate_limit.take(len(wave) * self._host.payload_bytes, load.until):
                return
            load.laps.lap("queue")
            blocks = [
                Block(space + item.key, bounce.payload(row)) for row, (_, item) in enumerate(wave)
            ]
            was_up = store.health.reads
            got = store.get(blocks)
            load.laps.lap("load")
            # A tier that failed or was not asked may have them still.
            if was_up and store.health.reads:
                load.record_missing(wave, got)
            if not self._copy_wave(load, bounce, range(len(wave)), wave, got, fence):
                return

    def _copy_wave(
        self,
        load: _Load,
        memory: SlotMemory,
        rows: Sequence[int],
        wave: _Numbered,
        held: Sequence[bool],
        fence: object,
    ) -> bool:
        """Copy the held items of a wave from their rows; return whether all were held and the load
        goes on."""
        good = [place for place, ok in enumerate(held) if ok]
        sources = [rows[place] for place in good]
        targets = [wave[place][1].target for place in good]
        copier = self._host.copier
        goes_on = load.copy_in(
            [wave[place][0] for place in good],
            lambda: copier.scatter(memory.rows, sources, targets, fence),
        )
        load.laps.lap("copy")
        # The engine uses what precedes the first failed block, and recomputes the rest.
        return goes_on and all(held)

    def ended(self, idle: bool) -> list[Ended]:
        """Return loads that have ended since the last call, done or out of time.

        In an `idle` step it waits a moment for one.
        """
        if idle:
            wait_a_moment([future for _, future in self._loads])
        now = self._host.now()
        over: list[tuple[_Load, Future[None]]] = []
        under_way: list[tuple[_Load, Future[None]]] = []
        for load, future in self._loads:
            is_over = future.done() or now >= load.until
            (over if is_over else under_way).append((load, future))
        self._loads = under_way
        return [self._end(load, future) for load, future in over]

    def halt(self) -> None:
        """End all loads, after the copies under way; `ended` says of each what had arrived."""
        for load, _ in self._loads:
            load.end()

    def _end(self, load: _Load, future: Future[None]) -> Ended:
        in_time = future.done()
        if not in_time:
            future.cancel()
        elif (error := future.exception()) is not None:
            self._failed_loads.log("tier %r: a load failed on this worker: %s", self._tier, error)
        failed, lost = load.end()
        if load.damaged:
            self._damage_log.log(
                "tier %r: %d block(s) were damaged in host memory; they are computed again",
                self._tier,
                load.damaged,
                count=load.damaged,
            )
        if failed and not in_time:
            self._log_late(load.job.seconds)
        result = JobResult(1, failed, load.seconds, lost, load.laps.times)
        return Ended(load.job, result, in_time, load.damaged)

    def _log_late(self, seconds: float) -> None:
        if not self._said_late:
            self._said_late = True
            logger.warning(
                "tier %r: a load took longer than the %.3g s it had; what had arrived is used. "
                "The metric load_timeouts counts how often",
                self._tier,
                seconds,
            )

    def close(self, drain: float) -> None:
        """End all loads; wait for their threads for `drain` seconds at most."""
        self._rate_limit.stop()
        self.halt()
        for _, future in self._loads:
            future.cancel()
        wait([future for _, future in self._loads], drain)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for bounce in self._bounce:
            bounce.close()
