"""Deadline: until when a verb waits for what hosts share, and for how slow a link."""

from __future__ import annotations

import time

from tiers.store import time_left

SLOWEST = 32 << 20
"""Bytes a second for which a verb that moves blocks gets extra time: half of a gigabit link.
Computing a block again is faster than loading it over a slower link."""


class Deadline:
    """A moment, `seconds` from now, after which waiting ends; it ends sooner where the caller of
    the verb gives it up (see `time_left`)."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return self._ends <= time.monotonic() or not time_left()

    def left(self) -> float:
        """Seconds left, more than zero. Raises TimeoutError if none are."""
        left = min(self._ends - time.monotonic(), time_left())
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def half(self) -> Deadline:
        """A deadline after half of its own time. Raises TimeoutError if none is left."""
        self.left()
        return Deadline((self._ends - time.monotonic()) / 2)
