"""Time in tests: a clock that stands still, and waiting for other threads."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Seconds that pass only when a test sets `now`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def wait_for(done: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once `done()` is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not done after {seconds} s"
        time.sleep(0.001)
