"""Opening in the background: a store that opens slowly, or can't be opened now, joins later, and
one that is open no more is opened anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, cast

from spec.errors import told
from tiers.concurrency.executors import in_background
from tiers.errors import TierError, TierNotOpen, TierUnavailable, TierUnusable
from tiers.store import Capability, Reaches, StoreWrapper, TierStore, capability

JOIN_SECONDS = 1.0
"""Seconds that a verb waits for a store to open."""

REACH_SECONDS = 0.2
"""Seconds that a start waits for the first answer of a store that is elsewhere."""

FOR_NOW = (TierNotOpen, TierUnavailable, OSError)
"""What `open` raises where another try may succeed."""

logger = logging.getLogger(__name__)


class Opener:
    """Opens a tier's store, and tells once that it can't be had, until it can, and once more where
    one that was open can't be opened anew. Calls of `open` overlap nowhere."""

    def __init__(
        self,
        name: str,
        make: Callable[[], TierStore],
        announce: Callable[[TierStore], None] | None,
    ) -> None:
        """`announce` hears of each store that has opened, in the one process of an engine that
        tells of it; None: in the others."""
        self._name = name
        self._make = make
        self._announce = announce
        self._level = logging.INFO if announce is None else logging.WARNING
        self._has_told = self._was_open = False
        self.reaching: Future[None] = Future()
        """Done when the first store waits for its first answer."""

    def open(self) -> TierStore:
        """Make a store, and have an answer from it if it is elsewhere. Raises what that raises."""
        try:
            store = self._make()
        except FOR_NOW as error:
            self._tell("is unusable for now, and tried again", error)
            raise
        except TierUnusable as error:
            if self._was_open:  # of the first opening whoever asked for it tells
                self._tell("can't be opened anew, and is tried again", error)
            raise
        self._reach(store)
        self._has_told, self._was_open = False, True
        if self._announce is not None:
            self._announce(store)
        return store

    def _reach(self, store: TierStore) -> None:
        elsewhere = capability(store, Reaches)
        if elsewhere is None:
            return
        if not self.reaching.done():
            self.reaching.set_result(None)
        try:
            elsewhere.reach()
        except BaseException as error:
            store.close()
            if isinstance(error, FOR_NOW):
                self._tell("is configured, not reached yet, and tried again", error)
            raise

    def late(self, seconds: float) -> None:
        """The first store has not opened after so long."""
        line = "tier %s: open has not returned after %g s; it joins when it does"
        logger.log(self._level, line, self._name, seconds)

    def lost(self, error: Exception) -> None:
        """A store that was open is open no more."""
        line = "tier %s is open no more, and is opened anew: %s"
        logger.log(self._level, line, self._name, error)

    def _tell(self, what: str, error: Exception) -> None:
        if not self._has_told:
            self._has_told = True
            logger.log(self._level, "tier %s %s: %s", self._name, what, error)


def opened(opening: Future[TierStore], seconds: float) -> TierStore:
    """Return the store that is being opened; wait `seconds` at most. Raises the Exception that
    `open` raised, TierUnusable if it ended its thread otherwise, and TierNotOpen if it has not
    returned."""
    if not wait([opening], seconds).done:
        raise TierNotOpen(f"open has not returned after {seconds:g} s; it joins when it does")
    error = opening.exception()
    if error is not None and not isinstance(error, Exception):
        raise TierUnusable(f"open ended with {told(error)}")
    return opening.result()


def _close_unwanted(opening: Future[TierStore]) -> None:
    with suppress(BaseException):  # nobody is left to hear of it
        opening.result().close()


class Reopening(StoreWrapper):
    """A TierStore that its verbs open. Until one succeeds, each verb raises TierNotOpen and the
    store has no capabilities; from then on it is as the inner store, until that is `lost`."""

    def __init__(self, opener: Opener) -> None:
        """Begins to open it."""
        self._opener = opener
        self._opened: TierStore | None = None
        self._first = self._opening = in_background(opener.open, "open")
        self._closed = False
        # Without it two verbs would open the store twice. Held for no longer than `JOIN_SECONDS`.
        self._lock = threading.Lock()

    def first(self, seconds: float) -> None:
        """Wait for the first opening, `seconds` at most, and less for what is elsewhere. Raises
        what `open` raised, unless that was for now."""
        opening, reaching = self._opening, self._opener.reaching
        first: list[Future[Any]] = [opening, reaching]
        wait(first, seconds, FIRST_COMPLETED)
        if reaching.done() and not wait([opening], REACH_SECONDS).done:
            return
        if not opening.done():
            self._opener.late(seconds)
            return
        with suppress(*FOR_NOW):  # told by the opener
            self._opened = opened(opening, 0)

    @property
    def now(self) -> TierStore | None:
        """The open store, to which verbs go through."""
        return self._opened

    @property
    def is_opening(self) -> bool:
        """Whether the first opening has not ended."""
        return not self._first.done()

    def join(self) -> None:
        """Open the store if it is not open; waits a moment for that. Raises TierNotOpen."""
        _ = self._inner

    def lost(self, store: TierStore, error: Exception) -> bool:
        """This store has said that it is open no more; return whether it was the open one until
        now. Does not wait. Calls overlap nowhere: else two verbs that find one store lost could
        lose the one that came after it, too."""
        if store is not self._opened or self._closed:
            return False
        failed: Future[TierStore] = Future()
        failed.set_exception(error)
        self._opening = failed
        self._opened = None
        with suppress(RuntimeError):  # no thread can be had, as while the interpreter ends
            in_background(store.close, "close")
        return True

    def tell_lost(self, error: Exception) -> None:
        """Tell of it."""
        self._opener.lost(error)

    @property
    def _inner(self) -> TierStore:
        """The store, which a verb that asks for it opens. Raises TierNotOpen, and TierUnusable."""
        if (store := self._opened) is not None:
            return store
        with self._lock:
            if self._opened is None:
                if self._closed:
                    raise TierNotOpen("closed before it could be opened")
                if self._opening.done() and self._opening.exception() is not None:
                    self._opening = in_background(self._opener.open, "open")
                try:
                    self._opened = opened(self._opening, JOIN_SECONDS)
                except FOR_NOW as error:
                    raise TierNotOpen(str(error)) from error
            return self._opened

    def capability(self, kind: type[Capability]) -> Capability | None:
        """As the store, once it is open; does not wait for that."""
        store = self._opened
        return None if store is None or capability(store, kind) is None else cast(Capability, self)

    def _inner_as(self, kind: type[Capability]) -> Capability:
        store = self._opened
        if store is None:  # what needs a capability runs where nothing may wait
            raise TierNotOpen("not open yet")
        found = capability(store, kind)
        if found is None:
            raise TierError(f"the store has no {kind.__name__}")
        return found

    def close(self) -> None:
        """Close the store; one that is being opened is closed as soon as it is open."""
        with self._lock:
            self._closed = True
        store = self._opened
        if store is not None:
            store.close()
        else:
            self._opening.add_done_callback(_close_unwanted)
