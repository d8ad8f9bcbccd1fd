"""Opening behind: a store that takes long to open, or can't be for now, joins when it is open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from tiers.concurrency.executors import widen_affinity
from tiers.errors import TierNotOpen, TierUnusable
from tiers.store import Block, StoreWrapper, TierStore

JOIN_SECONDS = 1.0
"""How long a verb waits for a store to be opened."""


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
        """The store, whose owner is the caller. Raises the Exception that `open` raised;
        TierUnusable if it ended its thread otherwise; TierNotOpen while it has not returned."""
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
        """Nobody asks for the store any more: close it, as soon as there is one."""
        with self._lock:
            self._abandoned = True
        if self._store is not None:
            _close(self._store)


def _close(store: TierStore) -> None:
    with suppress(Exception):  # nobody is left whom it could concern
        store.close()


class _NotOpen:
    """A TierStore that does nothing but raise TierNotOpen."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        raise TierNotOpen("not open yet")

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        raise TierNotOpen("not open yet")

    get = put

    def drop(self, keys: Sequence[bytes]) -> None:
        raise TierNotOpen("not open yet")

    def close(self) -> None:
        """Nothing to close."""


_NOT_OPEN = _NotOpen()


class Reopening(StoreWrapper):
    """A TierStore that its verbs open; until one has, every one raises, and it has no capabilities.
    From then on it is as the store."""

    def __init__(self, open_store: Callable[[], TierStore], opening: Opening | None = None) -> None:
        """`opening`: the one under way, or one that has failed."""
        super().__init__(_NOT_OPEN)
        self._open = open_store
        self._opening = opening
        self._closed = False
        # Without it two verbs would open the store twice. Held for no longer than `JOIN_SECONDS`.
        self._lock = threading.Lock()

    def _join(self) -> TierStore:
        if self._inner is not _NOT_OPEN:
            return self._inner
        with self._lock:
            if self._inner is _NOT_OPEN:
                if self._closed:
                    raise TierNotOpen("closed before it could be opened")
                if self._opening is None or self._opening.has_failed:
                    self._opening = Opening(self._open)
                self._inner = self._opening.result(JOIN_SECONDS)
            return self._inner

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store, once it is open."""
        return self._join().has(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store, once it is open."""
        return self._join().put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store, once it is open."""
        return self._join().get(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        """As the store, once it is open."""
        self._join().drop(keys)

    def close(self) -> None:
        """Close the store, also one that is being opened, as soon as it is."""
        with self._lock:
            self._closed = True
        self._inner.close()
        if self._inner is _NOT_OPEN and self._opening is not None:
            self._opening.abandon()
