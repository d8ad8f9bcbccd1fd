"""Remembered: what was announced and lies in no file, kept in memory until the tier evicts it.

No other engine announces it, so that its tokens are left out: 34 bytes a block, and some 50 a run.
"""

from __future__ import annotations

from collections import deque

from tiers.connector.scheduler.inventory.runs import Run, pack, unpack
from tiers.contract.block_events import UNKNOWN

SEGMENT_BYTES = 256 << 10
"""Bytes that are looked through in one go: 7,500 blocks of long runs."""
MAX_BYTES = 64 << 20
"""Bytes beyond which nothing is added: 1.9 million blocks of long runs."""


class Remembered:
    """Runs without their origin, packed, oldest first; used by one thread."""

    def __init__(self) -> None:
        self._closed: deque[bytes] = deque()
        self._open = bytearray()
        self._bytes = 0

    def add(self, run: Run) -> bool:
        """Add a run; False: there is no room, or its keys have several lengths."""
        try:
            packed = pack(run._replace(parent=None, origin=UNKNOWN))
        except ValueError:
            return False
        if self._bytes + len(packed) > MAX_BYTES:
            return False
        if len(self._open) + len(packed) > SEGMENT_BYTES:
            self.rotate()
        self._open += packed
        self._bytes += len(packed)
        return True

    def rotate(self) -> int:
        """Close what is being added to; how many times `take` has something to give."""
        if self._open:
            self._closed.append(bytes(self._open))
            self._open.clear()
        return len(self._closed)

    def take(self) -> list[Run]:
        """Take the oldest runs out, to add again those that are still held."""
        taken = self._closed.popleft()
        self._bytes -= len(taken)
        return list(unpack(taken))
