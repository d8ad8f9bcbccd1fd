"""RepeatedLog: an event that repeats is one log line at first, then one sum each minute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

MINUTE = 60.0


def call_later(seconds: float, call: Callable[[], None]) -> None:
    """Call later, on a daemon thread. Raises RuntimeError where no thread can be had."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


class LoggedOnce:
    """Logs each warning once, by its message. For one thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[str] = set()

    def warn(self, message: str, *args: object) -> None:
        if message not in self._logged:
            self._logged.add(message)
            self._logger.warning(message, *args, stacklevel=2)


class RepeatedLog:
    """One kind of event: its first `at_once` are logged as they come, further ones are counted and
    summed up each minute until a minute passes without one. Thread-safe; `log` never waits.
    """

    def __init__(
        self,
        logger: logging.Logger,
        where: str,
        what: str,
        level: int = logging.WARNING,
        at_once: int = 1,
        state: Callable[[], str] = str,
        later: Callable[[float, Callable[[], None]], None] = call_later,
    ) -> None:
        """`where` and `what` make the sums: "WHERE: 37 more WHAT in the last minute". `state` ends
        them with how things are then; `later` is called with seconds and what to do after those."""
        self._logger = logger
        self._where = where
        self._what = what
        self._level = level
        self._at_once = at_once
        self._state = state
        self._later = later
        self._events = self._unsaid = 0
        # Without it an event could come between the last sum and the end of the counting, and be
        # reported by neither.
        self._lock = threading.Lock()

    def log(
        self,
        message: str,
        *args: object,
        count: int = 1,
        exc_info: BaseException | None = None,
        level: int | None = None,
    ) -> None:
        """Log the event, or add `count` to the next sum. `level`: of this event's own line."""
        with self._lock:
            self._events += 1
            event = self._events
            if event > self._at_once:
                self._unsaid += count
        if event == 1:
            self._begin_minute()
        if event <= self._at_once:
            at = self._level if level is None else level
            self._logger.log(at, message, *args, exc_info=exc_info, stacklevel=2)

    def _begin_minute(self) -> None:
        try:
            self._later(MINUTE, self._sum_up)
        except RuntimeError:  # nobody would sum up: each event is logged as it comes
            with self._lock:
                self._events = self._unsaid = 0

    def _sum_up(self) -> None:
        with self._lock:
            unsaid, self._unsaid = self._unsaid, 0
            if not unsaid:
                self._events = 0
        if unsaid:
            more = f"{unsaid} more {self._what} in the last minute{self._state()}"
            self._logger.log(self._level, "%s: %s", self._where, more)
            self._begin_minute()
