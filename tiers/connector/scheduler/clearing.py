"""Clearing: drops a store's blocks in the background, a few at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import groupby, repeat
from operator import itemgetter

from tiers.concurrency.executors import IoExecutor, is_ending
from tiers.contract.generation import space_of
from tiers.store import Clear, TierStore, capability


class Clearing:
    """Blocks that one engine drops from a store. Asked by the scheduler's thread, done on another,
    so that no lookup waits for it.

    Of a generation that is over it drops the blocks of this engine: nobody else makes their keys.
    Those without a generation stay: replicas, and this engine after a restart, have the same keys.
    """

    STEP = 256
    """Blocks that are dropped at once."""
    PAUSE = 0.005
    """Seconds between two steps, for other threads and for who else stores."""
    DEADLINE = 10.0
    """Seconds that closing waits for what is to be dropped."""
    REMEMBERED = 1 << 18
    """Keys of the generation remembered where the store can't be cleared of one by its name, and
    keys that wait to be dropped; of more, the oldest are left to the store's eviction or time to
    live."""

    def __init__(self, store: TierStore, namespaces: Sequence[bytes]) -> None:
        self._store = store
        self._namespaces = namespaces
        self._stored: deque[bytes] = deque(maxlen=self.REMEMBERED)
        self._dropping: deque[tuple[bytes, bytes]] = deque(maxlen=self.REMEMBERED)
        self._takes_all = False
        """Whether what is to be dropped by now is taken by work that has yet to begin."""
        self._in_flight: list[Future[None]] = []
        self._is_closing = threading.Event()
        self._thread = IoExecutor(1, "clear")

    def stored(self, keys: Iterable[bytes], generation: bytes) -> None:
        """Note blocks that are dropped with their generation."""
        if generation and capability(self._store, Clear) is None:
            self._stored.extend(keys)

    def drop(self, keys: Iterable[bytes], generation: bytes) -> None:
        """Drop these blocks of a generation, together with others that wait: a tenant at its quota
        has some dropped with each job that ends, and those may be more than steps can be."""
        self._dropping.extend((generation, key) for key in keys)
        if not self._takes_all:
            self._takes_all = True
            self._begin(self._drop_all)

    def clear(self, generation: bytes) -> None:
        """Drop what this engine has stored in a generation, which is over."""
        if not generation:
            return
        keys = list(self._stored)
        self._stored.clear()
        store = capability(self._store, Clear)
        if store is None:
            self.drop(keys, generation)
            return
        for namespace in self._namespaces:
            space = space_of(namespace, generation)
            self._begin(partial(self._clear_space, store, space))

    def _begin(self, work: Callable[[], None]) -> None:
        self._in_flight = [future for future in self._in_flight if not future.done()]
        self._in_flight.append(self._thread.submit(work))

    def _drop_all(self) -> None:
        """Drop what waits by now; what comes meanwhile is left to the next, so that others have
        their turn between."""
        self._takes_all = False  # first, or what comes right now would wait for nobody
        left = len(self._dropping)
        while left:
            count = min(left, self.STEP)
            left -= count
            some = [self._dropping.popleft() for _ in repeat(None, count)]
            for generation, keys in groupby(some, key=itemgetter(0)):
                spaces = [space_of(namespace, generation) for namespace in self._namespaces]
                dropped = [key for _, key in keys]
                self._store.drop([space + key for space in spaces for key in dropped])
            if self._is_closing.wait(self.PAUSE):
                return

    def _clear_space(self, store: Clear, space: bytes) -> None:
        while store.clear(space) and not self._is_closing.wait(self.PAUSE):
            pass

    def close(self, generation: bytes) -> None:
        """Drop what is to be dropped, the engine's last generation too, as far as time allows."""
        if not is_ending():  # a process that ends without having closed its engine has no threads
            self.clear(generation)
        wait(self._in_flight, self.DEADLINE)
        self._is_closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
