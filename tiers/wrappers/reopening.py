"""Opening in the background: a store that opens slowly, or can't be opened now, joins later, and
one that is open no more is opened anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from spec.errors import describe_error, reason_of
from tiers.breaker import RETRY_AFTER, RETRY_AFTER_MAX
from tiers.concurrency.executors import in_background, settle
from tiers.errors import TierNotOpen, TierUnavailable, TierUnusable
from tiers.store import Reaches, TierStore, capability

REACH_SECONDS = 0.2
"""Seconds that a start waits for the first answer of a store that is elsewhere."""

FOR_NOW = (TierNotOpen, TierUnavailable, OSError)
"""What `open` raises where another try may succeed."""

logger = logging.getLogger(__name__)


class Reopening:
    """Has a thread of its own open a store: again and again until it is open, and anew when it is
    `lost`. One log line says that it can't be opened, until it can."""

    def __init__(
        self, name: str, make: Callable[[], TierStore], announce: Callable[[TierStore], None] | None
    ) -> None:
        """Begins to open it. `announce` is called with each store that has opened, in the one
        process of an engine that announces it; None: in the others."""
        self._name = name
        self._make = make
        self._announce = announce
        self._level = logging.INFO if announce is None else logging.WARNING
        self.now: TierStore | None = None
        """The open store; None: there is none now."""
        self._first: Future[BaseException | None] = Future()
        self._reaching: Future[None] = Future()
        self.why = ""
        """Why it is not open: the last error."""
        self._has_logged = self._was_open = self._is_late = False
        self._closed, self._wanted = threading.Event(), threading.Event()
        # Without it a store that opens while its tier is closed would stay open.
        self._lock = threading.Lock()
        in_background(self._run, "open")

    def first(self, seconds: float) -> None:
        """Wait for the first opening, `seconds` at most, and less for a store that is elsewhere.
        Raises what `open` raised, unless that was for now."""
        first: list[Future[Any]] = [self._first, self._reaching]
        wait(first, seconds, FIRST_COMPLETED)
        if self._reaching.done():
            wait([self._first], REACH_SECONDS)
        self._is_late = True
        if not self._first.done():
            if not self._reaching.done():
                line = "tier %s: open has not returned after %g s; it joins when it does"
                logger.log(self._level, line, self._name, seconds)
            return
        error = self._first.result()
        if error is not None and not isinstance(error, FOR_NOW):
            self.close()
            if isinstance(error, Exception):
                raise error
            raise TierUnusable(f"open ended with {describe_error(error)}")

    @property
    def is_opening(self) -> bool:
        return not self._first.done()

    def lost(self, store: TierStore | None, error: Exception) -> bool:
        """Note that this store has reported that it is open no more; return whether it was the open
        one until now. Does not wait."""
        with self._lock:
            if store is None or store is not self.now or self._closed.is_set():
                return False
            self.now = None
        self.why = reason_of(error)
        line = "tier %s is open no more, and is opened anew: %s"
        logger.log(self._level, line, self._name, self.why)
        with suppress(RuntimeError):  # no thread can be had, as while the interpreter ends
            in_background(store.close, "close")
        self._wanted.set()
        return True

    def _run(self) -> None:
        pause = RETRY_AFTER
        while not self._closed.is_set():
            opening: Future[None] = Future()
            settle(opening, self._open)
            error = opening.exception()
            if error is not None:
                self._log_failure(error)
            if not self._first.done():
                self._first.set_result(error)
            if error is None:
                self._wanted.wait()
                self._wanted.clear()
            self._closed.wait(pause)
            pause = RETRY_AFTER if error is None else min(2 * pause, RETRY_AFTER_MAX)

    def _open(self) -> None:
        """Make a store, have an answer from it if it is elsewhere, and let verbs go to it."""
        store = self._make()
        with ExitStack() as unless_used:
            unless_used.callback(close_quietly, store)
            if (elsewhere := capability(store, Reaches)) is not None:
                if not self._reaching.done():
                    self._reaching.set_result(None)
                elsewhere.reach()
            with self._lock:
                if self._closed.is_set():
                    return
                unless_used.pop_all()
                self.now = store
        self._has_logged, self._was_open = False, True
        if self._announce is not None:
            told: Future[None] = Future()
            settle(told, partial(self._announce, store))
            if (error := told.exception()) is not None:  # it is open all the same
                line = "tier %s is open, and can't be described: %s"
                logger.warning(line, self._name, describe_error(error))

    def _log_failure(self, error: BaseException) -> None:
        self.why = describe_error(error)
        what = f"can't be opened{' anew' if self._was_open else ''}, and is tried again"
        if isinstance(error, FOR_NOW):
            what = "is unusable for now, and tried again"
            if self._reaching.done():
                what = "is configured, not reached yet, and tried again"
        elif not self._is_late:
            return  # whoever waits for the first opening reports it
        if not self._has_logged:
            self._has_logged = True
            logger.log(self._level, "tier %s %s: %s", self._name, what, reason_of(error))

    def close(self) -> None:
        """Close the store; one that is being opened is closed as soon as it is open."""
        with self._lock:
            self._closed.set()
            store = self.now
        self._wanted.set()
        if store is not None:
            store.close()


def close_quietly(store: TierStore) -> None:
    with suppress(BaseException):  # nobody is left to report it to
        store.close()
