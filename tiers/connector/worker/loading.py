"""Loading: copies one tier's blocks back to a worker's engine, each load within its time, and, for
no request, into slots of the host pool."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from itertools import compress
from typing import Any, NamedTuple

from spec.offloading import LOADS_AT_ONCE
from tiers.concurrency.executors import BATCH_THREADS, IoExecutor, wait_a_moment
from tiers.concurrency.rate_limit import RateLimit
from tiers.concurrency.repeated_log import LoggedOnce, RepeatedLog
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.weight_watch import WeightVerdict
from tiers.contract.block_copier import ENDED, Copy, Fence
from tiers.contract.generation import space_of
from tiers.contract.messages import JobResult, LoadItem, LoadJob, LoadTimes
from tiers.errors import TierUnusable
from tiers.host.slot_memory import SlotMemory
from tiers.host.slots import slot_stride
from tiers.loading.load_cost import LoadLine
from tiers.store import Block, GatheredBlock, Prefix, Waiting, is_use
from tiers.wrappers.guard import Guarded

logger = logging.getLogger(__name__)

WAVE_BYTES = 32 << 20
"""Bytes that a loader copies at once from the host pool, while it sees to the next ones: `end`, on
the engine's thread, waits for two such waves at most."""
BOUNCES = 2
"""Pieces of memory through which a loader passes a store's blocks: one is read into while the other
is copied."""
READ_BYTES = 16 << 20
"""Bytes of one of them, at most, but for one block."""
DROP_BELOW = 0.5
"""A load is dropped at its turn if it has less than this part of the seconds that loads of its size
took of late: it could not end in time."""
DROP_BELOW_FACTOR = 0.8
"""Each load that is dropped makes that part smaller by this factor, until one has run."""
LANDING_SECONDS = 0.02
"""A load's store must answer so many seconds before the load's end, or a tenth of its time if that
is less: what has come is still copied."""
CLOCK_SKEW_SECONDS = 0.001
"""Seconds that a store's clock may be ahead of ours."""
Numbered = list[tuple[int, LoadItem]]
"""Items of a load, each with its number among them."""


class EndedLoad(NamedTuple):
    """A load that is over. `damaged`: blocks of the host pool that differ from their checksums."""

    job: LoadJob
    result: JobResult
    damaged: int


_WaveRead = tuple[list[bool] | None, float]
"""What came of reading a wave from a store: which items are held, None if there was no time; and
seconds that it waited for `load_rate` before."""


class Piece(NamedTuple):
    """A block of a load to copy: its item's `number`, the `row` of host memory that it lies in, and
    the paged block that it is for."""

    load: Load
    number: int
    row: int
    target: int


class Load:
    """A load in flight, by the clock `now`. Nothing is copied after `end`."""

    def __init__(self, job: LoadJob, now: Callable[[], float]) -> None:
        self.job = job
        self._now = now
        self.until = now() + job.seconds
        self._answer_by = self.until - min(LANDING_SECONDS, job.seconds / 10)
        self.began: float | None = None
        """When its turn came; None: it has not."""
        self.seconds: float | None = None
        """What moving the blocks took, once that is known."""
        self.dropped = False
        """Whether nothing of it was read, since it could not have ended in time."""
        self.outdated = False
        """Whether nothing of it was read, since the weights have changed."""
        self.cut_short = False
        """Whether a store may have had more of it, and no time to say so."""
        self.damaged = 0
        self.spent = dict.fromkeys(LoadTimes._fields, 0.0)
        """What it spends its time on, from one lap to the next."""
        self._last_lap = time.perf_counter()
        self.prefixes: Sequence[Prefix | None] = ()
        """Of each item, once a store is asked."""
        self._lost: set[int] = set()
        self._arrived: set[int] = set()
        self._in_flight: deque[tuple[Sequence[int], Copy]] = deque()
        self.is_over = False
        """Whether no copy of it begins any more."""
        # Held while copies into the engine's memory begin. The engine may reuse a load's blocks
        # after `end`, which without it could come between the check of `is_over` and the copy.
        self._lock = threading.Lock()

    def time_left(self) -> float:
        """Seconds in which a store may answer; none once the load has ended."""
        return 0.0 if self.is_over else self._answer_by - self._now()

    def lap(self, part: str, queue: float = 0.0) -> None:
        """All since the last lap was spent on `part`, a field of LoadTimes, but for `queue` seconds
        of it at most that were spent waiting. Called by the load's thread."""
        now = time.perf_counter()
        queue = min(queue, now - self._last_lap)
        self.spent["queue"] += queue
        self.spent[part] += now - self._last_lap - queue
        self._last_lap = now

    def record_missing(self, numbers: Iterable[int]) -> None:
        """Record the items, by number, that the tier does not have."""
        with self._lock:
            self._lost.update(numbers)

    @staticmethod
    def copy_in(pieces: Sequence[Piece], begin: Callable[[Sequence[Piece]], Copy]) -> None:
        """Begin one copy of these, but for those of loads that are over."""
        by_load: dict[Load, list[int]] = {}
        for piece in pieces:
            by_load.setdefault(piece.load, []).append(piece.number)
        with ExitStack() as locks:
            for load in by_load:
                locks.enter_context(load._lock)
            going = [piece for piece in pieces if not piece.load.is_over]
            if going:
                copy = begin(going)
                for load in dict.fromkeys(piece.load for piece in going):
                    load._in_flight.append((by_load[load], copy))

    @property
    def last_copy(self) -> Copy:
        """The copy that was begun last, of those that have not landed."""
        return self._in_flight[-1][1] if self._in_flight else ENDED

    def land(self, but: int = 0) -> None:
        """Wait for all copies but the last `but`. Raises what made one fail."""
        while len(self._in_flight) > but:
            indexes, copy = self._in_flight[0]
            copy.wait()
            with self._lock:
                self._arrived.update(indexes)
                self._in_flight.popleft()

    @property
    def arrived(self) -> int:
        return len(self._arrived)

    def end(self) -> tuple[set[int], set[int]]:
        """End the load; return the items that did not arrive, and those of them that the tier does
        not have. Waits for the copies in flight at most."""
        with self._lock:
            self.is_over = True
            in_flight = [*self._in_flight]
        for indexes, copy in in_flight:
            with suppress(RuntimeError):  # a device that failed copies no more
                copy.wait()
                self._arrived.update(indexes)
        with self._lock:
            failed = set(range(len(self.job.items))) - self._arrived
            return failed, self._lost & failed


class Loading:
    """The loads and fills of one tier on one worker. The engine's thread calls it; its own threads
    copy, one of them the fills, for which no load waits. `verify`: load blocks of the host pool
    only if they match their checksums.
    """

    def __init__(
        self,
        tier: str,
        host: HostSlots,
        rate_limit: RateLimit,
        verify: bool,
        at_once: int = LOADS_AT_ONCE,
    ) -> None:
        self._tier = tier
        self._at_once = at_once
        """Loads that run; the others wait for their turn."""
        self._host = host
        self._store: Guarded | None = None
        self._namespace = b""
        self._verify = verify
        self._rate_limit = rate_limit
        self._late_log = LoggedOnce(logger)
        where = f"tier {tier!r}"
        self._failed_loads = RepeatedLog(
            logger, where, "loads failed on this worker", logging.ERROR
        )
        self._damage_log = RepeatedLog(logger, where, "blocks were damaged in host memory")
        self._loads: list[tuple[Load, Future[None]]] = []
        self._fills: list[tuple[LoadJob, Future[list[bool]]]] = []
        self._fitted, self._drop_below = LoadLine(), DROP_BELOW
        self._bounces: list[SlotMemory] = []
        self._is_closed = False
        self._threads = IoExecutor(at_once, f"load-{tier}")
        self._readers = IoExecutor(at_once, f"read-{tier}")
        self._filler = IoExecutor(1, f"warm-{tier}")

    def open(self) -> None:
        """Allocate the memory through which stores' blocks pass; the paged KV is registered. Raises
        TierUnusable if memory is short."""
        if self._bounces:
            return
        payload, copier = self._host.payload_bytes, self._host.copier
        self._threads.bind(copier.cpus)
        self._readers.bind(copier.cpus)
        rows = min(64, max(1, READ_BYTES // slot_stride(payload)))
        rows -= rows % BATCH_THREADS if rows > BATCH_THREADS else 0
        near: dict[str, Any] = {"cpus": copier.cpus, "device": copier.device}
        # Touched now: a first load would take twice as long otherwise.
        try:
            for _ in range(self._at_once * BOUNCES):
                self._bounces.append(SlotMemory(rows, payload, copier.pin, True, **near))
        except (TierUnusable, OSError) as error:
            raise TierUnusable(f"there is no memory to load its blocks through: {error}") from error

    def serve(self, store: Guarded, namespace: bytes) -> None:
        """Load from `store` from now on, under the worker's `namespace`."""
        self._namespace = namespace
        self._store = store

    def begin(self, jobs: Sequence[LoadJob], fence: Fence) -> None:
        """Begin loads; they copy once the engine's device has come to `fence`.

        Loads of a few blocks of host memory are copied together, and so end together: one by one
        each would take its waits for the device, and the engine a step for the first to end.
        """
        loads = [Load(job, self._host.now) for job in jobs]
        for group in self._groups(loads):
            verdict = self._host.watch.loads(group[0].job.generation)
            future = self._threads.submit(self._run, group, fence, verdict)
            self._loads += [(load, future) for load in group]

    def _groups(self, loads: Sequence[Load]) -> Iterator[list[Load]]:
        """Which loads run together: those of one generation that one wave copies from the pool."""
        group: list[Load] = []
        size = 0
        for load in loads:
            items = load.job.items
            is_resident = all(item.slot is not None for item in items)
            more = len(items) if is_resident else self._wave + 1  # a store's are read one by one
            is_alike = not group or load.job.generation == group[0].job.generation
            if group and not (is_alike and size + more <= self._wave):
                yield group
                group, size = [], 0
            group.append(load)
            size += more
        if group:
            yield group

    def _run(self, loads: Sequence[Load], fence: Fence, verdict: WeightVerdict) -> None:
        began = self._host.now()
        going: list[Load] = []
        for load in loads:
            if load.is_over:  # its time was, before its turn came
                continue
            load.began = began
            load.lap("queue")
            line = self._fitted.line
            least = 0.0 if line is None else self._drop_below * line.seconds(len(load.job.items))
            if began + least > load.until and self._others_wait():
                # Those are served in time instead.
                load.dropped, load.seconds = True, 0.0
                continue
            going.append(load)
        if going and not verdict.unchanged():  # the engine computes, with the weights it has now
            for load in going:
                load.outdated, load.seconds = True, 0.0
            return
        if going:
            self._load_items(going, fence)
        for load in going:
            load.seconds = self._host.now() - began

    @property
    def threads(self) -> int:
        """Threads that have loads of which `ended` has not told yet."""
        return min(self._at_once, len({future for _, future in self._loads}))

    def _others_wait(self) -> bool:
        """Whether a load waits for its turn behind those that run. Where none does, dropping one
        helps nobody, and paces of before would stay the last word on the tier."""
        return len({future for _, future in self._loads if not future.done()}) > self._at_once

    def _load_items(self, loads: Sequence[Load], fence: Fence) -> None:
        """Load all that these have in the host pool, and what the one load has in a store."""
        self._load_resident(loads, fence)
        load = loads[0]
        stored = [(i, item) for i, item in enumerate(load.job.items) if item.slot is None]
        if stored and self._store is not None:
            # A thread runs one load at a time, so there are bounces for each.
            bounces = [self._bounces.pop() for _ in range(BOUNCES)]
            try:
                self._load_stored(load, self._store, bounces, stored, fence)
            finally:
                with suppress(RuntimeError):
                    load.land()  # else another load could write into what is still copied
                self._bounces += bounces
                if self._is_closed:
                    self._unpin()
        for load in loads:
            load.land()
            load.lap("copy")

    def _load_resident(self, loads: Sequence[Load], fence: Fence) -> None:
        pieces = [
            Piece(load, number, item.slot, item.target)
            for load in loads
            for number, item in enumerate(load.job.items)
            if item.slot is not None
        ]
        # In waves: `end` waits for the copy in flight.
        for start in range(0, len(pieces), self._wave):
            wave = pieces[start : start + self._wave]
            held = self._held(wave)
            if not self._copy_wave(self._host.memory, wave, held, fence):
                return
            for load in loads:
                load.land(but=1)
                load.lap("copy")

    @property
    def _wave(self) -> int:
        """Blocks of the host pool that are copied at once."""
        return max(1, WAVE_BYTES // self._host.memory.rows.stride(0))

    def _held(self, wave: Sequence[Piece]) -> list[bool]:
        """Which of these the host pool has, intact where that is looked at."""
        keys = [piece.load.job.items[piece.number].key for piece in wave]
        held = self._host.wait_and_verify([piece.row for piece in wave], keys)
        for at, piece in enumerate(wave):
            if held[at] and self._verify and not self._host.is_intact(piece.row):
                held[at] = False
                piece.load.damaged += 1
            if not held[at]:
                piece.load.record_missing([piece.number])
        for load in {piece.load for piece in wave}:
            load.lap("check")
        return held

    def _load_stored(
        self,
        load: Load,
        store: Guarded,
        bounces: Sequence[SlotMemory],
        items: Numbered,
        fence: Fence,
    ) -> None:
        """Read wave by wave; a wave is copied while the next one is read, into the bounce of the
        one before."""
        space = space_of(self._namespace, load.job.generation)
        load.prefixes = load.job.place.prefixes(space, len(load.job.items))
        step = bounces[0].rows.shape[0]
        waves = [items[start : start + step] for start in range(0, len(items), step)]
        ahead: Future[_WaveRead] | None = None
        try:
            for number, wave in enumerate(waves):
                bounce = bounces[number % BOUNCES]
                read = ahead.result() if ahead else self._read(load, store, wave, bounce, ENDED)
                held, waited = read
                load.lap("load", waited)
                if held is None:
                    return
                if number + 1 < len(waves) and all(held):
                    then = waves[number + 1], bounces[(number + 1) % BOUNCES], load.last_copy
                    ahead = self._readers.submit(self._read, load, store, *then)
                pieces = [Piece(load, i, row, one.target) for row, (i, one) in enumerate(wave)]
                if not self._copy_wave(bounce, pieces, held, fence):
                    return
                load.land(but=1)
                load.lap("copy")
        finally:
            if ahead is not None:
                wait([ahead])  # else another load could be given the memory that it reads into

    def _read(
        self, load: Load, store: Guarded, wave: Numbered, bounce: SlotMemory, before: Copy
    ) -> _WaveRead:
        """Read a wave into a bounce, once the copy that was begun `before` has left it."""
        before.wait()
        began = time.perf_counter()
        in_time = self._rate_limit.take(len(wave) * self._host.payload_bytes, load.until)
        waited = time.perf_counter() - began
        if not in_time or load.time_left() <= 0:
            load.cut_short = True
            return None, waited
        space = space_of(self._namespace, load.job.generation)
        blocks = [
            GatheredBlock(space + item.key, bounce.payload(row), None, load.prefixes[number])
            for row, (number, item) in enumerate(wave)
        ]
        was_up = store.health.reads
        with Waiting(load.time_left):
            held = store.get(blocks)
        load.cut_short |= not all(held) and load.time_left() < CLOCK_SKEW_SECONDS
        # A tier that failed, was not asked or had no time may have them still.
        if was_up and store.health.reads and not load.cut_short:
            load.record_missing(i for (i, _), ok in zip(wave, held, strict=True) if not ok)
        return held, waited

    def _copy_wave(
        self, memory: SlotMemory, wave: Sequence[Piece], held: Sequence[bool], fence: Fence
    ) -> bool:
        """Begin to copy the held blocks of a wave from their rows; return whether all were held and
        the loads go on."""
        copier, loads = self._host.copier, {piece.load for piece in wave}

        def scatter(pieces: Sequence[Piece]) -> Copy:
            _, _, rows, targets = zip(*pieces, strict=True)
            return copier.scatter(memory.rows, rows, targets, fence)

        fence.wait()  # without a load's lock, for which the engine's thread may wait
        for load in loads:
            load.lap("queue")
        Load.copy_in([*compress(wave, held)], scatter)
        for load in loads:
            load.lap("copy")
        # The engine uses what precedes the first failed block, and recomputes the rest.
        return all(held) and not any(load.is_over for load in loads)

    def ended(self, idle: bool) -> list[EndedLoad]:
        """Return loads that have ended since the last call, done or out of time.

        In an `idle` step it waits a moment for one.
        """
        if idle:
            wait_a_moment([future for _, future in self._loads])
        now = self._host.now()
        over: list[tuple[Load, Future[None]]] = []
        in_flight: list[tuple[Load, Future[None]]] = []
        for load, future in self._loads:
            is_over = future.done() or now >= load.until
            (over if is_over else in_flight).append((load, future))
        self._loads = in_flight
        return [self._end(load, future) for load, future in over]

    def halt(self) -> None:
        """End all loads, after the copies in flight; `ended` says of each what had arrived."""
        for load, _ in self._loads:
            load.end()

    def _end(self, load: Load, future: Future[None]) -> EndedLoad:
        is_done = future.done()
        in_time = is_done and not load.dropped and not load.cut_short
        if is_done and (error := future.exception()) is not None:
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
            self._late_log.warn(
                "tier %r: a load could not end in the %.3g s it had; what had arrived is used. "
                "The metric load_timeouts counts how often",
                self._tier,
                load.job.seconds,
            )
        seconds = load.seconds
        if seconds is None:
            seconds = 0.0 if load.began is None else self._host.now() - load.began
        if load.dropped:
            self._drop_below *= DROP_BELOW_FACTOR  # it may be faster by now
        elif load.arrived:
            self._fitted.add(load.arrived, seconds)
            self._drop_below = DROP_BELOW
        late = bool(failed) and not in_time
        times, outdated = LoadTimes(**load.spent), load.outdated
        result = JobResult(1, failed, seconds, lost, times, late=late, outdated=outdated)
        return EndedLoad(load.job, result, load.damaged)

    # -- into slots --------------------------------------------------------------------------

    def begin_fills(self, jobs: Sequence[LoadJob]) -> None:
        """Begin to load blocks into slots, which hold nothing until that has ended."""
        for job in jobs:
            verdict = self._host.watch.loads(job.generation)
            self._host.empty([item.target for item in job.items])
            self._fills.append((job, self._filler.submit(self._fill, job, verdict)))

    def _fill(self, job: LoadJob, verdict: WeightVerdict) -> list[bool]:
        """Which blocks are in their slots now, verified by the store."""
        host, size = self._host, len(job.items) * self._host.payload_bytes
        if self._store is None or not verdict.unchanged():
            return [False] * len(job.items)
        if not self._rate_limit.take(size, host.now() + job.seconds):
            return [False] * len(job.items)
        space = space_of(self._namespace, job.generation)
        payload = host.memory.payload
        is_use.set(False)  # on the thread of fills alone
        return self._store.get([Block(space + i.key, payload(i.target)) for i in job.items])

    def ended_fills(self, idle: bool) -> list[tuple[LoadJob, JobResult]]:
        """Fills that have ended since the last call, whose slots hold their blocks from now on. In
        an `idle` step it waits a moment for one."""
        if idle:
            wait_a_moment([future for _, future in self._fills])
        over = [fill for fill in self._fills if fill[1].done()]
        self._fills = [fill for fill in self._fills if not fill[1].done()]
        return [(job, self._end_fill(job, future)) for job, future in over]

    def _end_fill(self, job: LoadJob, future: Future[list[bool]]) -> JobResult:
        held = [False] * len(job.items) if future.exception() is not None else future.result()
        filled = [*compress(job.items, held)]
        self._host.filled([item.target for item in filled], [item.key for item in filled])
        return JobResult(1, {index for index, ok in enumerate(held) if not ok})

    def close(self, drain: float) -> None:
        """End all loads and fills; wait for their threads for `drain` seconds at most."""
        self._rate_limit.stop()
        self.halt()
        self._filler.shutdown(wait=False, cancel_futures=True)
        in_flight: list[Future[Any]] = [future for _, future in self._loads]
        wait([*in_flight, *(future for _, future in self._fills)], drain)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False)
        self._is_closed = True
        self._unpin()

    def _unpin(self) -> None:
        """Unpin what no thread reads into. One whose read hangs calls this when that returns, where
        the tier has left a chain that serves on."""
        with suppress(IndexError):  # both may be here
            while True:
                self._bounces.pop(0).close()
