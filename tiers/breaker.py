"""The circuit breaker: when a tier that fails is left alone, and when it is tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Call:
    """A call that a breaker let in at `began`, in seconds. `is_trial`: the tier was down then.
    `is_late`: it took longer than its deadline, and counted as failed."""

    began: float
    is_trial: bool
    is_late: bool = False


class Breaker:
    """Closed while calls work; open after a failure; one trial call each time the wait is over.

    A call that has not returned after `deadline` seconds is a failure as soon as anyone asks
    (see `notice_late`), and no trial is made before it returns: what hangs must not take a thread
    after the other. Thread-safe; its lock is never held during I/O. `clock` gives seconds, never
    going back.
    """

    def __init__(
        self,
        retry_after: float,
        retry_after_max: float,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self.deadline = deadline
        self._first = self._wait = retry_after
        self._longest = retry_after_max
        self._clock = clock
        self._retry_at: float | None = None
        self._under_way: set[Call] = set()
        # Without it two callers could both take the one trial, and double the wait twice.
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether calls go through."""
        return self._retry_at is None

    @property
    def wait(self) -> float:
        """Seconds between trials now."""
        return self._wait

    def is_refusing(self) -> bool:
        """Whether a call would be refused now. Takes no trial."""
        with self._lock:
            return self._refuses()

    def _refuses(self) -> bool:
        if self._retry_at is None:
            return False
        return self._clock() < self._retry_at or any(call.is_late for call in self._under_way)

    def enter(self) -> Call | None:
        """Ask to make a call, whose outcome goes to `succeeded` or `failed`; None: refused."""
        with self._lock:
            if self._refuses():
                return None
            now = self._clock()
            call = Call(now, is_trial=self._retry_at is not None)
            if call.is_trial:
                # Others wait for the trial's outcome, at least as long as one may take.
                self._retry_at = now + max(self._wait, self.deadline)
            self._under_way.add(call)
            return call

    def notice_late(self) -> bool:
        """Count calls beyond their deadline as failed; True if that opened the breaker."""
        with self._lock:
            limit = self._clock() - self.deadline
            late = [c for c in self._under_way if c.began < limit and not c.is_late]
            opened = False
            for call in late:
                call.is_late = True
                opened |= self._open(call)
            return opened

    def succeeded(self, call: Call) -> bool:
        """Report that the store answered; True if that closed the breaker."""
        with self._lock:
            self._under_way.discard(call)
            # A call let in before the tier failed says nothing about it now.
            if not call.is_trial or call.is_late or self._retry_at is None:
                return False
            self._retry_at = None
            self._wait = self._first
            return True

    def failed(self, call: Call) -> bool:
        """Report that the store did not answer; True if that opened the breaker."""
        with self._lock:
            self._under_way.discard(call)
            return not call.is_late and self._open(call)

    def leave(self, call: Call | None) -> None:
        """A call, if it was one, ended in a way that says nothing of the store."""
        with self._lock:
            self._under_way -= {call}

    def _open(self, call: Call) -> bool:
        opened = self._retry_at is None
        if call.is_trial and not opened:
            self._wait = min(self._wait * 2, self._longest)
        if opened or call.is_trial:
            self._retry_at = self._clock() + self._wait
        return opened
