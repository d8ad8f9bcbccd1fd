"""Which pack does a shared or object tier evict? The oldest, past its capacity, by one process.

One of all processes at a bucket holds the lease and evicts; each process knows when the bucket is
full. The holder lists the bucket, piece by piece, and never has its list in memory: it counts bytes
by age, in steps of `GRAIN_SECONDS`. Where more than `HIGH` of the capacity is used, a second
listing deletes the oldest packs: then `LOW` of it is used, and one more of the largest packs has
room, if two of them fit. A pack's age is what the listing says. In a directory a host that reads it
renews its file's time once in `USE_SECONDS`, so the order is that of the last uses as far as hosts'
clocks agree (NFS: the server's clock alone); in an object store it is that of the stores. Nothing
else depends on it.

**The bound** (`Room`). Each process adds what it has put itself to the last count, and puts nothing
beyond the capacity. What it can't know is what others put between two counts: so much there may be
beyond it, if it is more than the tenth that is kept free, until the next round.

What its user may not list or delete stays, and counts for nothing, or as before; a warning names
it. Files and objects that no tier of this kind wrote are left alone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import NamedTuple

from spec.errors import describe_error
from spec.fields import format_size
from spec.offloading import StoreContext
from tiers.block import Buffer
from tiers.concurrency.executors import in_background
from tiers.errors import TierError, TierFull, TierRefused, TierUnusable
from tiers.remote.packs.bucket import Bucket, Listed
from tiers.remote.packs.lease import Count, Lease, Terms
from tiers.remote.packs.pack import record_start

GRAIN_SECONDS = 10.0
HIGH, LOW = 0.95, 0.9
FAILURES = 3
"""Steps in a row that fail, after which a warning says so."""
_CLOSE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Pause(NamedTuple):
    """The pause after a count: at least `seconds`, and at least `times` what the count took."""

    seconds: float
    times: float

    def after(self, took: float) -> float:
        return max(self.seconds, self.times * took)


class Pace(NamedTuple):
    """How often there is upkeep. `beat`: seconds between two beats of its lease. `usual`: the pause
    after a count; `full`: the least pause, for where a put of the holder's own process found no
    room, or half of what is free fills sooner. `deletes`: packs that are deleted in one call."""

    beat: float
    usual: Pause
    full: Pause
    deletes: int


class Room:
    """What this process may put between two counts. Many threads put. `count`: the last one that is
    known. `wake` is set where a put finds no room, and whoever evicts need not wait."""

    def __init__(self, capacity: int | None) -> None:
        """`capacity` in bytes, over all hosts; None: there is no end of it."""
        self.capacity = math.inf if capacity is None else capacity
        self.count, self.wake = Count(), threading.Event()
        self._own = self._own_before = self._putting = 0
        """Bytes put by this process since the last count, between the two before, and in flight."""
        self._lock = threading.Lock()

    def admits(self, size: int) -> bool:
        """Whether so many bytes may be put now; their put then `ends`."""
        with self._lock:
            known = self.count.used + self._own_before + self._own + self._putting
            if known + size <= self.capacity:
                self._putting += size
                return True
        self.wake.set()
        return False

    def ends(self, size: int, stored: bool) -> None:
        """A put of so many bytes has ended. Until now no count need have them."""
        with self._lock:
            self._putting -= size
            self._own += size * stored

    def learn(self, count: Count) -> None:
        with self._lock:
            if count.round != self.count.round:
                # A count misses what was put while it went on.
                self._own_before, self._own = self._own, 0
            self.count = count


class Evictor:
    """Keeps a bucket below its capacity, with the other processes that have it open."""

    def __init__(
        self,
        bucket: Bucket,
        capacity: int | None,
        lease: Lease,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` in bytes, over all hosts; None: nothing is evicted."""
        self._bucket, self._capacity, self.room = bucket, capacity, Room(capacity)
        self._lease, self._pace, self._clock = lease, pace, clock
        self._next_beat = self._next_round = self._soonest_round = 0.0
        self._counted_at: float | None = None
        """When this process has counted last, of those times that it held the lease."""
        self._lasts = math.inf
        """Seconds in which half of what is free fills, if as fast as before the last count."""
        self._refused = self._refused_now = self._barred = ""
        """What this process's user may not list or delete, of the last round and of this one; and
        what it may not do with the lease."""
        self._left: Exception | None = None
        """Why a pack of this round was left that should have gone."""
        self._failures, self._failed = 0, ""
        """Steps that failed in a row, since the last round, and why the last one did."""
        self._stopped = threading.Event()

    def start(self) -> Callable[[], None]:
        """Begin on a thread of its own; what ends it. Raises RuntimeError."""
        ended = in_background(self._run, "evictor")

        def close() -> None:
            self._stopped.set()
            self.room.wake.set()
            wait([ended], _CLOSE_SECONDS)

        return close

    def warning(self) -> str:
        """What the holder of the lease can't evict, or evicts beyond another capacity than ours.
        The scheduler's process is asked, and the holder is another as a rule."""
        count, ours = self.room.count, self._capacity or 0
        if refused := self._barred or self._refused:
            return (
                f"not all can be evicted: {refused}; let the one user, group or credentials of "
                "all engines list and delete all there"
            )
        if self._capacity is not None and self._failures >= FAILURES:
            return (
                f"nothing can be evicted: {self._failed}; let all there be listed and deleted, "
                "and see that the process has memory"
            )
        if count.is_hindered:
            return (
                "the process that evicts for all can't list or delete all there; let the one user, "
                "group or credentials of all engines do so, and see kvtiers doctor"
            )
        if not count.round or count.capacity == ours:
            return ""
        theirs, own = (format_size(size) if size else "none" for size in (count.capacity, ours))
        return (
            f"an engine with capacity {theirs} evicts for all there, and this one has {own}; let "
            "all engines say the same"
        )

    def step(self) -> float:
        """Do what is due now; seconds until something else is. Raises TierError, OSError and
        MemoryError."""
        if self.room.wake.is_set():
            self.room.wake.clear()
            self._next_round = self._soonest_round
        try:
            is_due = self._beat() and self._clock() >= self._next_round
            if is_due:
                self._timed_round()
        except (TierError, OSError, MemoryError) as error:
            self._failures, self._failed = self._failures + 1, str(error) or describe_error(error)
            if self._failures == FAILURES:
                self._lease.count = self._lease.count._replace(is_hindered=1)
            raise
        is_held = self._lease.is_held
        if is_due or not is_held:
            self._failures = 0
        due = min(self._next_beat, self._next_round) if is_held else self._next_beat
        return max(0.0, due - self._clock())

    def _timed_round(self) -> None:
        """Raises TierError, OSError."""
        began = self._clock()
        try:
            self._round()
        finally:
            ended = self._clock()
            usual = self._pace.usual.after(ended - began)
            self._soonest_round = ended + self._pace.full.after(ended - began)
            self._next_round = max(self._soonest_round, ended + min(self._lasts, usual))

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                seconds = self.step()
            # Its tier is down, which its verbs say, or no memory is left to list what it has.
            except (TierError, OSError, MemoryError) as error:
                logger.debug("the upkeep of %s: %s", self._bucket.describe(), error)
                seconds = self._pace.beat
            if self.room.wake.wait(seconds):
                self._stopped.wait(self._pace.full.seconds)
        with suppress(TierError, OSError):
            self._lease.resign()

    def _beat(self, count: Count | None = None) -> bool:
        """Renew or watch the lease, if it is due or there is a count to say; whether it is held.
        Raises TierError, OSError."""
        if count or self._clock() >= self._next_beat:
            self._next_beat = self._clock() + self._pace.beat
            try:
                self._lease.beat(count)
            except TierRefused as error:
                self._barred = str(error)
            else:
                self._barred = ""
            self.room.learn(self._lease.count)
            if not self._lease.is_held:
                self._refused, self._counted_at = "", None
        return self._lease.is_held and not self._stopped.is_set()

    def _round(self) -> None:
        """Count, and evict what is too much. Ends early where the lease is lost. Raises TierError,
        OSError: in the end, why a pack could not be deleted."""
        ages: Counter[int] = Counter()
        largest, self._refused_now, self._left = 0, "", None
        before, began, self._lasts = self._lease.count.used, self._clock(), math.inf
        for packs in self._listed():
            for pack in packs:
                ages[_age(pack)] += pack.size
                largest = max(largest, pack.size)
        used, most = ages.total(), self.room.capacity
        grown = used - before
        # Else what just does not fit would be refused for ever, and nothing evicted.
        fits = most - (largest if 2 * largest <= most else 0)
        if used > min(HIGH * most, fits):
            used -= self._evict(ages, used - min(int(LOW * most), fits))
        if self._capacity and self._counted_at is not None and grown > 0:
            self._lasts = (began - self._counted_at) * (most - used) / 2 / grown
        self._refused = self._refused_now
        if self._beat():
            self._counted_at = began
            number = self._lease.count.round + 1
            is_stuck = self._left is not None and self._failures >= FAILURES
            is_hindered = int(self._refused != "" or is_stuck)
            if is_hindered and not used:  # what may not be listed is not empty
                number, used = number - 1, before
            self._beat(Count(number, used, self._capacity or 0, is_hindered))
        if self._left is not None:
            raise self._left

    def _evict(self, ages: Counter[int], excess: float) -> int:
        """Delete the oldest packs, of so many bytes; how many bytes they had. Raises TierError,
        OSError of the listing."""
        older = 0
        for last in sorted(ages):
            older += ages[last]
            if older >= excess:
                break
        freed, spare = 0, excess - (older - ages[last])  # of the last grain, some are enough
        for packs in self._listed():
            old = [pack for pack in packs if _age(pack) <= last]
            for start in range(0, len(old), self._pace.deletes):
                some = []
                for pack in old[start : start + self._pace.deletes]:
                    if _age(pack) < last or spare > 0:
                        some.append(pack)
                        spare -= pack.size * (_age(pack) == last)
                if self._deleted(some):
                    freed += sum(pack.size for pack in some)
                else:
                    spare += sum(pack.size for pack in some if _age(pack) == last)
        return freed

    def _deleted(self, packs: Sequence[Listed]) -> bool:
        """Delete them, if they can be, and this process's user may."""
        try:
            self._bucket.delete([pack.name for pack in packs])
        except TierRefused as error:
            self._note(error)
            return False
        except (TierError, OSError) as error:  # where all is down the next beat raises
            self._left = error
            return False
        return True

    def _listed(self) -> Iterator[Sequence[Listed]]:
        """All packs, as long as the lease is held. Raises TierError, OSError."""
        for packs in self._bucket.list(self._note):
            if not self._beat():
                return
            yield packs

    def _note(self, error: TierRefused) -> None:
        self._refused_now = str(error)


def _age(pack: Listed) -> int:
    """Its last use, or when it was stored, in grains since the epoch, by the clock of whoever set
    it."""
    return int(pack.modified // GRAIN_SECONDS)


def require_room(place: str, capacity: int | None, site: StoreContext) -> None:
    """Raises TierUnusable where a capacity has less than one block of each process."""
    least = site.num_ranks * record_start(1, site.payload_bytes)
    if capacity is not None and capacity < least:
        raise TierUnusable(
            f"{place}: capacity {format_size(capacity)} is less than one block of "
            f"each of {site.num_ranks} process(es); set at least {least}B"
        )


class KeptBucket:
    """A `Bucket` that is kept below a capacity, with all processes that have it open."""

    def __init__(self, bucket: Bucket, capacity: int | None, terms: Terms, pace: Pace) -> None:
        """`bucket` is its own. `capacity` in bytes; None: only what dead writers left is removed.
        Raises RuntimeError where a thread can't be had."""
        self._bucket = bucket
        evictor = Evictor(bucket, capacity, Lease(terms, pace.beat), pace)
        self._room, self._end_upkeep = evictor.room, evictor.start()
        self.read, self.delete, self.list = bucket.read, bucket.delete, bucket.list
        self.describe, self.warning = bucket.describe, evictor.warning

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        size = sum(map(len, parts))
        if not self._room.admits(size):
            raise TierFull(f"{self.describe()} is full; packs are being evicted")
        stored = False
        try:
            stored = self._bucket.put(name, parts)
        finally:
            self._room.ends(size, stored)
        return stored

    def close(self) -> None:
        self._end_upkeep()
        self._bucket.close()
