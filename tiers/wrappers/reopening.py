"""Opening in the background: a store that opens slowly, or can't be opened now, joins later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from tiers.concurrency.executors import widen_affinity
from tiers.errors import TierNotOpen, TierUnusable
from tiers.store import Capability, StoreWrapper, TierStore

JOIN_SECONDS = 1.0
"""Seconds that a verb waits for a store to open."""


class Opening:
    """One call of a store's `open`, on a thread of its own."""

    def __init__(self, open_store: Callable[[], TierStore]) -> None:
        self._open = open_store
        self._ended = threading.Event()
        self._store: TierStore | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        # Without it a store could be opened just as it is abandoned, and never be closed.
        self._lock = threading.Lock()
        # A daemon: an open that hangs must not keep the process from its end.
        threading.Thread(target=self._run, name="kvtiers-open", daemon=True).start()

    def _run(self) -> None:
        widen_affinity()
        try:
            store = self._open()
        except BaseException as error:  # noqa: BLE001 - `result` raises it where it is asked for
            self._error = error
        else:
            with self._lock:
                self._store = store
                unwanted = self._abandoned
            if unwanted:
                _close(store)
        self._ended.set()

    def result(self, seconds: float) -> TierStore:
        """Return the store, which the caller owns; wait `seconds` at most. Raises the Exception
        that `open` raised, TierUnusable if it ended its thread otherwise, and TierNotOpen if it
        has not returned."""
        if not self._ended.wait(seconds):
            raise TierNotOpen(f"open has not returned after {seconds:g} s; it joins when it does")
        if isinstance(self._error, Exception):
            raise self._error
        if self._store is None:
            raise TierUnusable(f"open ended with {type(self._error).__name__}: {self._error}")
        return self._store

    @property
    def has_failed(self) -> bool:
        """Whether `open` has raised."""
        return self._error is not None

    def abandon(self) -> None:
        """Close the store as soon as it is open: nobody will ask for it."""
        with self._lock:
            self._abandoned = True
        if self._store is not None:
            _close(self._store)


def _close(store: TierStore) -> None:
    with suppress(Exception):  # nobody is left to hear of it
        store.close()


class Reopening(StoreWrapper):
    """A TierStore that its verbs open. Until one succeeds, each verb raises and the store has no
    capabilities; from then on it is as the inner store."""

    def __init__(self, open_store: Callable[[], TierStore], opening: Opening | None = None) -> None:
        """`opening`: one that is under way or has failed."""
        self._opened: TierStore | None = None
        self._open = open_store
        self._opening = opening
        self._closed = False
        # Without it two verbs would open the store twice. Held for no longer than `JOIN_SECONDS`.
        self._lock = threading.Lock()

    @property
    def _inner(self) -> TierStore:
        """The store, which a verb that asks for it opens. Raises as `Opening.result`."""
        if self._opened is not None:
            return self._opened
        with self._lock:
            if self._opened is None:
                if self._closed:
                    raise TierNotOpen("closed before it could be opened")
                if self._opening is None or self._opening.has_failed:
                    self._opening = Opening(self._open)
                self._opened = self._opening.result(JOIN_SECONDS)
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
        elif self._opening is not None:
            self._opening.abandon()
