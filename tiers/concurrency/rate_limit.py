"""RateLimit: spreads a thread's transfers over time."""

from __future__ import annotations

import math
import threading
import time


class RateLimit:
    """At most a `shares`-th of `rate` bytes a second, over all threads that take from it; without
    a rate, as they come.

    A transfer goes at once where the ones before it have had their time, so that one alone is
    never slowed down; it is those behind it that pay for it.
    """

    def __init__(self, rate: float | None, shares: int = 1) -> None:
        self.rate = rate / shares if rate else None
        self._free_at = 0.0
        self._stopped = threading.Event()
        # Of two threads each must find the time that the other has taken.
        self._lock = threading.Lock()

    def take(self, size: int, until: float = math.inf) -> bool:
        """Wait until so many bytes may be moved. False, at once: that is not before `until`, in
        seconds of the monotonic clock."""
        if self.rate is None:
            return True
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            if begin >= until:
                return False
            self._free_at = begin + size / self.rate
        self._stopped.wait(begin - time.monotonic())
        return True

    def stop(self) -> None:
        """Hold nobody back any more."""
        self._stopped.set()
