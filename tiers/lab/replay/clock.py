"""The time of a replay, in seconds of its trace: paced by the machine's clock, or counted."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What the replay and its links share. The links' threads sleep by it; the driver moves it."""

    @property
    def is_counted(self) -> bool:
        """Whether time stands while anything real is done."""
        ...

    def begin(self) -> None:
        """Let the trace begin: all that is opened before takes none of its time."""
        ...

    @property
    def sleepers(self) -> int:
        """Threads that sleep now, where time is counted."""
        ...

    @property
    def wakes(self) -> int:
        """Sleeps that were begun or ended so far, where time is counted."""
        ...

    def now(self) -> float:
        """Seconds since the trace began."""
        ...

    def sleep_until(self, moment: float) -> None:
        """Return at that moment, or at once if it is over. Called by the links' threads."""
        ...

    def next_wake(self) -> float | None:
        """When the next of the sleepers wakes, where only `advance` wakes them; else None."""
        ...

    def advance(self, moment: float, poll: bool) -> None:
        """Let time pass until that moment. `poll`: return earlier, if threads may have work."""
        ...

    def stop(self) -> None:
        """Let every thread that sleeps go on."""
        ...


POLL_SECONDS = 0.0003
"""Of the machine: how often a paced replay looks for transfers that have ended."""


class PacedClock:
    """`speed` seconds of the trace pass in each of the machine's: what takes time takes it."""

    is_counted = False

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._began: float | None = None
        self._stopped = threading.Event()
        self.sleepers = self.wakes = 0

    def begin(self) -> None:
        """Let the trace begin."""
        self._began = time.monotonic()

    def now(self) -> float:
        """Seconds since the trace began; zero before."""
        if self._began is None:
            return 0.0
        return (time.monotonic() - self._began) * self._speed

    def sleep_until(self, moment: float) -> None:
        """Sleep on the machine's clock."""
        left = (moment - self.now()) / self._speed
        if left > 0:
            self._stopped.wait(left)

    def next_wake(self) -> float | None:
        """Sleepers wake by themselves."""
        return None

    def advance(self, moment: float, poll: bool) -> None:
        """Sleep, for a moment at most where threads may have work."""
        left = max(0.0, (moment - self.now()) / self._speed)
        time.sleep(min(left, POLL_SECONDS) if poll else left)

    def stop(self) -> None:
        """Let every thread that sleeps go on."""
        self._stopped.set()


class CountedClock:
    """Time stands while anything real is done, and passes when all there is to do is to wait.

    So nothing takes longer than its links say, however slow this machine is, and a replay takes
    as long as its work alone.
    """

    is_counted = True

    def __init__(self) -> None:
        # A sleeper that enters while the driver decides to advance would else be missed.
        self._lock = threading.Lock()
        self._now = 0.0
        self._sleeping: list[tuple[float, int, threading.Event]] = []
        self._numbers = itertools.count()
        self._stopped = False
        self.wakes = 0

    def begin(self) -> None:
        """Time stands at the beginning."""

    @property
    def sleepers(self) -> int:
        """Threads that sleep now."""
        return len(self._sleeping)

    def now(self) -> float:
        """Seconds since the trace began."""
        return self._now

    def sleep_until(self, moment: float) -> None:
        """Wait until the driver has advanced so far."""
        with self._lock:
            if moment <= self._now or self._stopped:
                return
            woken = threading.Event()
            heapq.heappush(self._sleeping, (moment, next(self._numbers), woken))
            self.wakes += 1
        woken.wait()

    def next_wake(self) -> float | None:
        """When the first of the sleepers wakes."""
        with self._lock:
            return self._sleeping[0][0] if self._sleeping else None

    def advance(self, moment: float, poll: bool) -> None:
        """Move on to that moment and wake whoever sleeps no longer."""
        with self._lock:
            self._now = max(self._now, moment)
            while self._sleeping and self._sleeping[0][0] <= self._now:
                self._wake()

    def stop(self) -> None:
        """Wake everybody, from now on at once."""
        with self._lock:
            self._stopped = True
            while self._sleeping:
                self._wake()

    def _wake(self) -> None:
        heapq.heappop(self._sleeping)[2].set()
        self.wakes += 1
