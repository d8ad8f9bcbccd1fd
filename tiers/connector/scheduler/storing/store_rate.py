"""StoreRate: how fast a tier stores, which says how much may be on its way."""

from __future__ import annotations

import math

HALF_LIFE = 10.0
"""Seconds of storing after which a measurement counts half."""


class StoreRate:
    """Blocks a second of one tier, over all ranks, while it stores; of late counts most.

    Idle time does not count, so that a tier with little to do is not taken to be slow. Used by the
    scheduler's thread alone.
    """

    def __init__(self) -> None:
        self._blocks = self._seconds = 0.0

    def ended(self, blocks: int, seconds: float) -> None:
        """A job has stored so many blocks, in so many seconds on the slowest rank."""
        left = 0.5 ** (seconds / HALF_LIFE)
        # A job that took very long counts no more than the time that is remembered.
        counts = (1 - left) * HALF_LIFE / math.log(2) / seconds if seconds else 1.0
        self._blocks = self._blocks * left + blocks * counts
        self._seconds = self._seconds * left + seconds * counts

    def blocks_in(self, seconds: float) -> float | None:
        """How many blocks it stores in this time; None: nothing was measured."""
        return self._blocks * seconds / self._seconds if self._seconds else None
