"""RateLimit: bounds the throughput of transfers."""

from __future__ import annotations

import math
import threading
import time


class RateLimit:
    """Limits throughput to rate/shares bytes per second over all callers; None: unlimited.

    A transfer starts at once if the earlier ones have used up their time, so that a single one is
    never slowed down; those after it wait for its time. Thread-safe.
    """

    def __init__(self, rate: float | None, shares: int = 1) -> None:
        self._shares = shares
        self.change(rate)
        self._free_at = 0.0
        self._stopped = threading.Event()
        # Without it two threads could take the same time.
        self._lock = threading.Lock()

    def change(self, rate: float | None) -> None:
        """Limit what comes from now on to `rate`, over all callers of all shares."""
        self.rate = rate / self._shares if rate else None

    def take(self, size: int, until: float = math.inf) -> bool:
        """Block until `size` bytes may be moved, and return True. Returns False at once if that
        would be after `until` (`time.monotonic()`)."""
        rate = self.rate
        if rate is None:
            return True
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            if begin >= until:
                return False
            self._free_at = begin + size / rate
        self._stopped.wait(begin - time.monotonic())
        return True

    def stop(self) -> None:
        """Let all callers go on now, and limit nobody from now on."""
        self._stopped.set()
