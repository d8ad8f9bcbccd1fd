"""LockedCounter: counts that any thread adds to."""

from __future__ import annotations

import threading
from collections import Counter


class LockedCounter:
    """How often something happened, by kind. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # a Counter's += reads, then writes: two would count one

    def count(self, kind: str, times: int = 1) -> None:
        """Add to a kind."""
        with self._lock:
            self._counts[kind] += times

    def by_kind(self) -> dict[str, int]:
        """The counts now."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_kind().values())
