"""The time of a replay, in seconds of its trace, which is counted."""

from __future__ import annotations

import heapq
import itertools
import threading


class Clock:
    """Counted time: it stands while anything real is done, and passes when nothing is left to do
    but to wait. The links' threads sleep by it; the engine moves it.

    So nothing takes longer than its links say, however slow this machine is, and a replay takes
    as long as its work alone.
    """

    def __init__(self) -> None:
        # A sleeper that enters while the engine decides to advance would else be missed.
        self._lock = threading.Lock()
        self._now = 0.0
        self._sleeping: list[tuple[float, int, threading.Event]] = []
        self._numbers = itertools.count()
        self._stopped = False
        self.wakes = 0
        """Sleeps that were begun or ended by now."""

    @property
    def sleepers(self) -> int:
        return len(self._sleeping)

    def now(self) -> float:
        """Seconds since the trace began."""
        return self._now

    def sleep_until(self, moment: float) -> None:
        """Return at that moment, or at once if it is over. Called by the links' threads."""
        with self._lock:
            if moment <= self._now or self._stopped:
                return
            woken = threading.Event()
            heapq.heappush(self._sleeping, (moment, next(self._numbers), woken))
            self.wakes += 1
        woken.wait()

    def next_wake(self) -> float | None:
        """When the next of the sleepers wakes; None: none sleeps."""
        with self._lock:
            return self._sleeping[0][0] if self._sleeping else None

    def advance(self, moment: float) -> None:
        """Let time pass until that moment."""
        with self._lock:
            self._now = max(self._now, moment)
            while self._sleeping and self._sleeping[0][0] <= self._now:
                self._wake()

    def stop(self) -> None:
        """Wake every sleeper, from now on at once."""
        with self._lock:
            self._stopped = True
            while self._sleeping:
                self._wake()

    def _wake(self) -> None:
        heapq.heappop(self._sleeping)[2].set()
        self.wakes += 1
