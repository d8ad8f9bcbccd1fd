"""Opening in the background: a store that opens slowly, or can't be opened now, joins later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

from spec.errors import told
from tiers.concurrency.executors import in_background
from tiers.errors import TierNotOpen, TierUnusable
from tiers.store import Capability, StoreWrapper, TierStore

JOIN_SECONDS = 1.0
"""Seconds that a verb waits for a store to open."""


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
    """A TierStore that its verbs open. Until one succeeds, each verb raises and the store has no
    capabilities; from then on it is as the inner store."""

    def __init__(self, open_store: Callable[[], TierStore], opening: Future[TierStore]) -> None:
        """`opening`: a call of `open_store` that is under way or has failed."""
        self._opened: TierStore | None = None
        self._open = open_store
        self._opening = opening
        self._closed = False
        # Without it two verbs would open the store twice. Held for no longer than `JOIN_SECONDS`.
        self._lock = threading.Lock()

    @property
    def _inner(self) -> TierStore:
        """The store, which a verb that asks for it opens. Raises as `opened`."""
        if self._opened is not None:
            return self._opened
        with self._lock:
            if self._opened is None:
                if self._closed:
                    raise TierNotOpen("closed before it could be opened")
                if self._opening.done() and self._opening.exception() is not None:
                    self._opening = in_background(self._open, "open")
                self._opened = opened(self._opening, JOIN_SECONDS)
            return self._opened

    def capability(self, kind: type[Capability]) -> Capability | None:
        """As the store, once it is open; does not wait for that."""
        return None if self._opened is None else super().capability(kind)

    def _inner_as(self, kind: type[Capability]) -> Capability:
        if self._opened is None:  # what needs a capability runs where nothing may wait
            raise TierNotOpen("not open yet")
        return super()._inner_as(kind)

    def close(self) -> None:
        """Close the store; one that is being opened is closed as soon as it is open."""
        with self._lock:
            self._closed = True
        if self._opened is not None:
            self._opened.close()
        else:
            self._opening.add_done_callback(_close_unwanted)
