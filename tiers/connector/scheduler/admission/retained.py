"""Retained: which blocks of one tier hints keep from eviction, until when, and for whom."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence

from tiers.connector.scheduler.admission.tenant_quotas import Bounds


class Retained:
    """Blocks by key, each until a whole second of the clock. Used by the scheduler's thread alone.

    Each block has one expiry, and expiries share one bucket a second: hints that clients repeat
    take no more memory.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tenants: dict[bytes, str] = {}
        self._until: dict[bytes, int] = {}
        self._ending: dict[int, dict[bytes, None]] = {}
        """The keys of each second."""
        self._seconds: list[int] = []
        """Those seconds, as a heap."""
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: Sequence[bytes], tenant: str, ttl: float, bounds: Bounds) -> list[bytes]:
        """Retain these blocks of a tenant, in order, as far as the bounds go, for `ttl` seconds
        from now, or as long as they are retained already. Returns those that are retained."""
        until = math.ceil(self._now() + ttl)
        before = [key for key in keys if key in self._until]
        room = min(bounds.all - len(self), bounds.one - self._counts[tenant])
        new = [key for key in dict.fromkeys(keys) if key not in self._until][: max(0, room)]
        for key in new:
            self._tenants[key] = tenant
        if new:  # else tenants of whom nothing was ever retained would be remembered for ever
            self._counts[tenant] += len(new)
        for key in (*before, *new):
            self._keep(key, until)
        return [key for key in keys if key in self._until]

    def _keep(self, key: bytes, until: int) -> None:
        before = self._until.get(key, 0)
        if before >= until:
            return
        if before:
            del self._ending[before][key]
        if until not in self._ending:
            self._ending[until] = {}
            heapq.heappush(self._seconds, until)
        self._ending[until][key] = None
        self._until[key] = until

    def remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """Retain these no more; returns those that were."""
        found = [key for key in dict.fromkeys(keys) if key in self._until]
        for key in found:
            del self._ending[self._until.pop(key)][key]
            self._forget_tenant(key)
        return found

    def remove_all(self) -> list[bytes]:
        """Retain nothing any more; returns what was."""
        return self.remove([*self._until])

    def take_ended(self, most: int) -> list[bytes]:
        """Remove and return blocks whose time is over, `most` at most, a prefix's tail first."""
        ended: list[bytes] = []
        now = self._now()
        while self._seconds and self._seconds[0] <= now:
            keys = self._ending[self._seconds[0]]
            while keys and len(ended) < most:
                key, _ = keys.popitem()
                del self._until[key]
                self._forget_tenant(key)
                ended.append(key)
            if keys:
                break
            del self._ending[heapq.heappop(self._seconds)]
        return ended

    def _forget_tenant(self, key: bytes) -> None:
        tenant = self._tenants.pop(key)
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
