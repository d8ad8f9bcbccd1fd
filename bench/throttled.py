"""A tier in memory behind a link of a given bandwidth and latency."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

from tests.support.faulty_stores import Pace, SlowStore
from tiers.store import TierStore
from tiers.testing import GivenSpec


class Link:
    """Passes the bytes of loads one after the other, `bandwidth` a second; each load, and each
    lookup, takes `latency` besides. Stores pass freely, so that only loading differs.

    Both may be changed while it is used.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self._free_at = 0.0
        self._lock = threading.Lock()  # two that read the same end would pass at once

    def delay(self, verb: str, num_bytes: int) -> float:
        """Seconds until the bytes of this call have passed."""
        if verb not in ("has", "get"):
            return 0.0
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(now, self._free_at) + num_bytes / self.bandwidth
            return self._free_at + self.latency - now


class ThrottledSpec(GivenSpec):
    """A tier behind a link. If it is `indexed`, it knows at once what it holds, as a disk does."""

    is_prompt: ClassVar[bool] = True

    indexed: bool = True

    def behind(self, link: Link, store: TierStore) -> ThrottledSpec:
        """Put the store behind the link; others may use both, too."""
        return self.over(SlowStore(store, Pace(link.delay), indexed=self.indexed))
