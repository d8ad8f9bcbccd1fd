"""Window: how many bytes to request from a server ahead of those that have arrived."""

from __future__ import annotations

LEAST_BYTES = 2 << 20
"""Enough on loopback, and small values need it: 64 loads came at 1.5 GB/s with 512 KiB and at 2.0
with 1 or 2 MiB (values of 64 KiB); at 2.2, 2.8 and 3.1 (256 KiB). More only evicts values from
processor caches: 64 stores of 2 MiB cost 0.31 s of a core per GB with one value in flight, 0.37
with four."""

MOST_BYTES = 8 << 20
"""The bandwidth-delay product of 4 ms at 2 GB/s. A value that is larger goes alone."""


class Window:
    """Twice the bandwidth-delay product of the link: the shortest round trip times the rate. Twice,
    so that a rate limited by the window itself lets the window grow. Threads may report at once."""

    def __init__(self) -> None:
        self._trip: float | None = None
        self._rate = 0.0

    def answered(self, seconds: float) -> None:
        """Report a round trip: seconds from a request to the first byte of its reply."""
        self._trip = seconds if self._trip is None else min(self._trip, seconds)

    def moved(self, count: int, seconds: float) -> None:
        """Report that `count` bytes arrived in `seconds`."""
        rate = count / max(seconds, 1e-6)
        self._rate = rate if rate > self._rate else 0.75 * self._rate + 0.25 * rate

    @property
    def num_bytes(self) -> int:
        """Bytes to have in flight now."""
        needed = 2 * self._rate * (self._trip or 0.0)
        return int(min(max(needed, LEAST_BYTES), MOST_BYTES))
