"""Breaker: the circuit breaker that decides when a failed tier is left alone, and when tried."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

RETRY_AFTER = 1.0
"""Seconds until a failed tier is tried again; doubled by each trial that fails."""

RETRY_AFTER_MAX = 30.0
"""Most seconds between two trials."""


@dataclass(eq=False)
class Call:
    """A call that a breaker allowed at `began`, in seconds. `is_trial`: the breaker was open then.
    `is_late`: the call exceeded its deadline, and counts as failed."""

    began: float
    is_trial: bool
    is_late: bool = False


class Breaker:
    """Closed while calls work; open after a failure; allows one trial when a wait is over.

    A call that has not returned after `deadline` seconds counts as failed once `notice_late` is
    called. No trial is allowed before it returns: a tier that hangs must not take one thread after
    another. A call that is given up before anything has come shows little: those in a row that took
    `deadline` together are a failure. Thread-safe; the lock is never held during I/O. `clock`
    returns monotonic seconds.
    """

    def __init__(
        self,
        retry_after: float,
        retry_after_max: float,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self.deadline = deadline
        self._first = self.wait = retry_after
        """`wait`: seconds from a failed trial to the next, as of now."""
        self._longest = retry_after_max
        self._clock = clock
        self._retry_at: float | None = None
        self._in_flight: set[Call] = set()
        self._in_vain = 0.0
        # Without it two callers could both get the trial, and double the wait twice.
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether calls go through."""
        return self._retry_at is None

    def is_refusing(self) -> bool:
        """Whether a call would be refused now. Does not use up a trial."""
        if self.is_closed:  # asked several times a request: without the lock
            return False
        with self._lock:
            return self._refuses()

    def _refuses(self) -> bool:
        if self._retry_at is None:
            return False
        return self._clock() < self._retry_at or any(call.is_late for call in self._in_flight)

    def enter(self) -> Call | None:
        """Begin a call; report its end to `succeeded`, `failed`, `given_up` or `leave`. None: it is
        refused."""
        with self._lock:
            if self._refuses():
                return None
            now = self._clock()
            call = Call(now, is_trial=self._retry_at is not None)
            if call.is_trial:
                # Other calls are refused until the trial ends, or its deadline is over.
                self._retry_at = now + max(self.wait, self.deadline)
            self._in_flight.add(call)
            return call

    def left(self, call: Call) -> float:
        """Seconds until this call is late."""
        return call.began + self.deadline - self._clock()

    def notice_late(self) -> bool:
        """Count calls that exceeded their deadline as failed; True if that opened the breaker."""
        if not self._in_flight:
            return False
        with self._lock:
            limit = self._clock() - self.deadline
            late = [c for c in self._in_flight if c.began < limit and not c.is_late]
            opened = False
            for call in late:
                call.is_late = True
                opened |= self._open(call)
            return opened

    def succeeded(self, call: Call) -> bool:
        """Report that the store answered; True if that closed the breaker."""
        with self._lock:
            self._in_flight.discard(call)
            self._in_vain = 0.0
            # A call from before the failure shows nothing of the tier now.
            if not call.is_trial or call.is_late or self._retry_at is None:
                return False
            self._retry_at = None
            self.wait = self._first
            return True

    def failed(self, call: Call) -> bool:
        """Report that the store did not answer; True if that opened the breaker."""
        with self._lock:
            self._in_flight.discard(call)
            return not call.is_late and self._open(call)

    def given_up(self, call: Call) -> bool:
        """Report that the caller gave it up, and nothing had come; True if that opened the breaker.
        A trial has failed then."""
        with self._lock:
            self._in_flight.discard(call)
            if call.is_late:
                return False
            self._in_vain += self._clock() - call.began
            if not call.is_trial and self._in_vain < self.deadline:
                return False
            self._in_vain = 0.0
            return self._open(call)

    def leave(self, call: Call | None) -> None:
        """Report an end of a call, if any, that shows nothing of the store."""
        with self._lock:
            self._in_flight -= {call}

    def _open(self, call: Call) -> bool:
        opened = self._retry_at is None
        if call.is_trial and not opened:
            self.wait = min(self.wait * 2, self._longest)
        if opened or call.is_trial:
            self._retry_at = self._clock() + self.wait
        return opened
