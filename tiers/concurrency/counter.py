"""LockedCounter: counts that any thread adds to."""

from __future__ import annotations

import threading
from collections import Counter


class LockedCounter:
    """Counts events by kind. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # += reads, then writes: two threads could count one event

    def count(self, kind: str, times: int = 1) -> None:
        with self._lock:
            self._counts[kind] += times

    def by_kind(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def take(self) -> int:
        """The sum of all counts, which begin anew."""
        with self._lock:
            taken, self._counts = self._counts.total(), Counter()
        return taken
