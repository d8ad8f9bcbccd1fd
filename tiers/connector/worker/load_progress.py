"""Load: one load in flight on a worker: what has arrived of it, and what its time goes to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tiers.contract.messages import LoadItem, LoadJob, LoadTimes

Numbered = list[tuple[int, LoadItem]]
"""Items of a load, each with its number among them."""


class Laps:
    """What a load spends its time on, from one lap to the next. Used by the load's thread."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spent = dict.fromkeys(LoadTimes._fields, 0.0)

    def lap(self, part: str, queue: float = 0.0) -> None:
        """All since the last lap was spent on `part`, a field of LoadTimes, but for `queue` seconds
        of it at most that were spent waiting."""
        now = time.perf_counter()
        queue = min(queue, now - self._last)
        self._spent["queue"] += queue
        self._spent[part] += now - self._last - queue
        self._last = now

    @property
    def times(self) -> LoadTimes:
        """What has been spent so far."""
        return LoadTimes(**self._spent)


class Load:
    """A load in flight. Nothing is copied after `end`."""

    def __init__(self, job: LoadJob, now: float) -> None:
        self.job = job
        self.until = now + job.seconds
        self.began: float | None = None
        """When its turn came; None: it has not."""
        self.seconds: float | None = None
        """What moving the blocks took, once that is known."""
        self.dropped = False
        """Whether nothing of it was read, since it could not have ended in time."""
        self.outdated = False
        """Whether nothing of it was read, since the weights have changed."""
        self.damaged = 0
        self.laps = Laps()
        self._lost: set[int] = set()
        self._arrived: set[int] = set()
        self._is_over = False
        # Held during copies into the engine's memory. The engine may reuse a load's blocks after
        # `end`, which without the lock could come between the check of `_is_over` and the copy.
        self._lock = threading.Lock()

    def record_missing(self, wave: Numbered, held: Sequence[bool]) -> None:
        """Record the items of a wave that the tier does not have."""
        with self._lock:
            self._lost.update(i for (i, _), ok in zip(wave, held, strict=True) if not ok)

    def copy_in(self, indexes: Sequence[int], copy: Callable[[], None]) -> bool:
        """Call `copy` for these items, unless the load is over; return whether it was not."""
        with self._lock:
            if self._is_over:
                return False
            copy()
            self._arrived.update(indexes)
            return True

    @property
    def arrived(self) -> int:
        """How many items have."""
        return len(self._arrived)

    def end(self) -> tuple[set[int], set[int]]:
        """End the load; return the items that did not arrive, and those of them that the tier does
        not have. Waits for the copy in flight at most."""
        with self._lock:
            self._is_over = True
            failed = set(range(len(self.job.items))) - self._arrived
            return failed, self._lost & failed
