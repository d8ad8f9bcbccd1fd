"""Window: how many bytes to ask a server for ahead of what has arrived."""

from __future__ import annotations

LEAST_BYTES = 512 << 10
"""Enough on loopback, where more only pushes what is moved out of the processor's caches: 64 stores
of 2 MiB cost 0.31 s of a core per GB with up to 1 MiB under way, 0.37 with 8 MiB."""

MOST_BYTES = 8 << 20
"""What a way of 4 ms holds at 2 GB/s. Where one value is larger, that one."""


class Window:
    """Twice what the way to the server holds: the shortest round trip times the rate.

    Twice, so that a rate which the window itself held down shows and the window grows. Several
    threads may tell it at once: each number is replaced whole, and a lost one does no harm.
    """

    def __init__(self) -> None:
        self._trip: float | None = None
        self._rate = 0.0

    def answered(self, seconds: float) -> None:
        """Tell that the first byte of a reply came this long after it was asked for."""
        self._trip = seconds if self._trip is None else min(self._trip, seconds)

    def moved(self, count: int, seconds: float) -> None:
        """Tell that so many bytes arrived in that time."""
        rate = count / max(seconds, 1e-6)
        self._rate = rate if rate > self._rate else 0.75 * self._rate + 0.25 * rate

    @property
    def num_bytes(self) -> int:
        """How many bytes to have under way now."""
        needed = 2 * self._rate * (self._trip or 0.0)
        return int(min(max(needed, LEAST_BYTES), MOST_BYTES))
