"""The upkeep of a shared directory: one process of all evicts, and each knows when it is full.

The holder of the lease walks the directory, folder by folder, and never has its list in memory: it
counts bytes by age, in steps of `GRAIN_SECONDS`. Beyond `HIGH` of the capacity a second walk
deletes what is older than the age at which `LOW` of it would be left; one more of the largest packs
then has room, if two of them fit. A pack's age is its `mtime`, which a host that reads it renews
once in `USE_SECONDS`, so the order is that of the last uses as far as hosts' clocks agree (NFS: the
server's clock alone). Nothing else depends on it.

**The bound.** Each process adds what it has put itself to the last count, and puts nothing beyond
the capacity. What it can't know is what others put between two counts: so much there may be beyond
it, if it is more than the tenth that is kept free, until the next round.

What its user may not read or remove stays, and counts for nothing; a warning names it.

A file under a temporary name, or an empty folder, goes once the holder has watched it unchanged
for `TEMPORARY_SECONDS` of its own clock. Files that no tier of this kind wrote are left alone.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from typing import NamedTuple, TypeVar

from spec.fields import format_size
from tiers.concurrency.executors import in_background
from tiers.remote.directory_files import TEMPORARY, fan_out, files, namespaces, unlink
from tiers.remote.lease import Count, Lease
from tiers.remote.packs.pack import key_of

BEAT_SECONDS = 5.0
ROUND_SECONDS = 10.0
"""Between two counts at least; a count that takes longer is followed by as long a pause."""
IDLE_ROUND_SECONDS = 600.0
"""The same where there is no capacity to keep, and only leftovers to remove."""
FULL_SECONDS = 1.0
"""Between two counts where a put of the holder's own process found no room."""
TEMPORARY_SECONDS = 600.0
GRAIN_SECONDS = 10.0
HIGH, LOW = 0.95, 0.9
_CLOSE_SECONDS = 1.0
_FILES_BETWEEN_BEATS = 1000

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Pack(NamedTuple):
    path: str
    size: int
    age: int
    """Its last use, in grains since the epoch, by the clock of whoever set it."""


class Evictor:
    """Keeps a directory below its capacity, with the other processes that have it open."""

    def __init__(
        self,
        path: str,
        capacity: int | None,
        lease: Lease,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` in bytes, over all hosts; None: nothing is evicted."""
        self._path, self._capacity = path, capacity
        self._lease, self._clock = lease, clock
        self._next_beat = self._next_round = 0.0
        self._watched: dict[str, tuple[int, int, float]] = {}
        self._refused = ""
        """What this process's user may not read or remove, since the last round began."""
        self._count = Count()
        self._own = self._own_before = self._putting = 0
        """Bytes put by this process since the last count, between the two before, and in flight."""
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # of the counts: many threads put

    def start(self) -> Callable[[], None]:
        """Begin on a thread of its own; what ends it. Raises RuntimeError."""
        ended = in_background(self._run, "evictor")

        def close() -> None:
            self._stopped.set()
            self._wake.set()
            wait([ended], _CLOSE_SECONDS)

        return close

    def admits(self, size: int) -> bool:
        """Whether so many bytes may be put now; their put then `ends`."""
        if self._capacity is None:
            return True
        with self._lock:
            known = self._count.used + self._own_before + self._own + self._putting
            if known + size <= self._capacity:
                self._putting += size
                return True
        self._wake.set()
        return False

    def ends(self, size: int, stored: bool) -> None:
        """A put of so many bytes has ended. Until now no count need have them."""
        if self._capacity is not None:
            with self._lock:
                self._putting -= size
                self._own += size * stored

    def warning(self) -> str:
        """What the holder of the lease can't evict, or evicts beyond another capacity than ours."""
        count, ours = self._count, self._capacity or 0
        if self._refused:
            return (
                f"it may not read or remove all of {self._refused}, which is not evicted; let the "
                "directory's group, or the one user of all engines, in there"
            )
        if not count.round or count.capacity == ours:
            return ""
        theirs, own = (format_size(size) if size else "none" for size in (count.capacity, ours))
        return (
            f"an engine with capacity {theirs} evicts for all on its directory, and this one has "
            f"{own}; let all engines on it say the same"
        )

    def step(self) -> float:
        """Do what is due now; seconds until something else is. Raises OSError."""
        held = self._beat()
        if held and self._clock() >= self._next_round:
            began = self._clock()
            self._round()
            least = IDLE_ROUND_SECONDS if self._capacity is None else ROUND_SECONDS
            self._next_round = self._clock() + max(least, self._clock() - began)
        return max(0.0, self._next_beat - self._clock())

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                seconds = self.step()
            except OSError as error:  # its tier is down, which its verbs say
                logger.debug("shared directory %s: %s", self._path, error)
                seconds = BEAT_SECONDS
            if self._wake.wait(seconds):
                self._wake.clear()
                self._next_round = 0.0  # a put found no room
                self._stopped.wait(FULL_SECONDS)
        with suppress(OSError):
            self._lease.resign()

    def _beat(self) -> bool:
        """Renew or watch the lease, if it is time to; whether it is held. Raises OSError."""
        if self._clock() >= self._next_beat:
            self._next_beat = self._clock() + BEAT_SECONDS
            self._lease.beat()
            self._learn(self._lease.count)
        return self._lease.is_held and not self._stopped.is_set()

    def _learn(self, count: Count) -> None:
        with self._lock:
            if count.round != self._count.round:
                # A count misses what was put while it went on.
                self._own_before, self._own = self._own, 0
            self._count = count

    def _round(self) -> None:
        """Count, and evict what is too much. Ends early where the lease is lost. Raises OSError."""
        ages: Counter[int] = Counter()
        largest, self._refused = 0, ""
        for pack in self._walk(leftovers=True):
            ages[pack.age] += pack.size
            largest = max(largest, pack.size)
        used = ages.total()
        if self._capacity is not None:
            # Else what just does not fit would be refused for ever, and nothing evicted.
            fits = self._capacity - (largest if 2 * largest <= self._capacity else 0)
            if used > min(HIGH * self._capacity, fits):
                used -= self._evict(ages, used - min(int(LOW * self._capacity), fits))
        if self._beat():
            number = self._lease.count.round + 1
            self._lease.count = Count(number, used, self._capacity or 0)
            self._next_beat = 0.0
            self._beat()

    def _evict(self, ages: Counter[int], excess: int) -> int:
        """Delete the oldest packs, of so many bytes; how many bytes they had. Raises OSError."""
        older = 0
        for last in sorted(ages):
            older += ages[last]
            if older >= excess:
                break
        freed, before = 0, older - ages[last]
        spare = excess - before  # of the last grain, some are enough
        for pack in self._walk():
            if pack.age > last or (pack.age == last and spare <= 0):
                continue
            if self._remove(pack.path):
                freed += pack.size
                if pack.age == last:
                    spare -= pack.size
        return freed

    def _walk(self, leftovers: bool = False) -> Iterator[_Pack]:
        """All packs, as long as the lease is held; `leftovers`: watch and remove those, too."""
        seen: dict[str, tuple[int, int, float]] = {}
        for folder in self._folders():
            if not self._beat():
                return
            is_empty = True
            of_folder = self._allowed(files(f"{self._path}/{folder}"))
            for number, (file, found) in enumerate(of_folder):
                is_empty = False
                if not number % _FILES_BETWEEN_BEATS and not self._beat():
                    return
                path = f"{self._path}/{folder}/{file}"
                if leftovers and file.startswith(TEMPORARY):
                    self._watch(path, found, seen)
                elif key_of(f"{folder}/{file}") is not None:
                    yield _Pack(path, found.st_size, int(found.st_mtime // GRAIN_SECONDS))
            if leftovers and is_empty:
                with suppress(OSError):  # somebody puts into it, or has removed it
                    path = f"{self._path}/{folder}"
                    self._watch(path, os.stat(path), seen)
        if leftovers:
            self._watched = seen

    def _watch(
        self, path: str, found: os.stat_result, seen: dict[str, tuple[int, int, float]]
    ) -> None:
        size, changed, since = self._watched.get(path, (0, 0, 0.0))
        now = self._clock()
        if (size, changed) != (found.st_size, found.st_mtime_ns):
            since = now
        if now - since < TEMPORARY_SECONDS:
            seen[path] = found.st_size, found.st_mtime_ns, since
        elif stat.S_ISDIR(found.st_mode):
            os.rmdir(path)
        else:
            self._remove(path)

    def _folders(self) -> Iterator[str]:
        for space in namespaces(self._path):
            yield from self._allowed(fan_out(self._path, [space]))

    def _allowed(self, some: Iterator[T]) -> Iterator[T]:
        """These, up to a folder that this process's user may not read."""
        try:
            yield from some
        except PermissionError as error:
            self._refused = str(error.filename or self._path)

    def _remove(self, path: str) -> bool:
        """Remove a file, if this process's user may. Raises OSError."""
        try:
            unlink(path)
        except PermissionError:
            self._refused = path
            return False
        return True
