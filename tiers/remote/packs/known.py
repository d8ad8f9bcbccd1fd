"""Indexes of packs that were met of late, so that they are not read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from tiers.block import digest
from tiers.remote.packs.pack import Index

MOST = 4096
"""Indexes, of a KiB each at most."""
SECONDS = 60.0
"""How long one is believed: a pack never changes, but may be gone."""


class KnownPacks:
    """Remembers indexes by the key of their first block, for `SECONDS` at most and half of that at
    least. That a pack was missing is not remembered. Thread-safe.

    In two dicts, the younger of which takes the other's place when it is full or old.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + SECONDS / 2
        self._young: dict[bytes, Index] = {}
        self._old: dict[bytes, Index] = {}
        # Without it two threads that turn the dicts would lose what one has added meanwhile.
        self._lock = threading.Lock()

    def add(self, key: bytes, index: Index) -> None:
        with self._lock:
            self._age()
            self._young[key] = index
            if len(self._young) >= MOST // 2:
                self._turn()

    def get(self, key: bytes) -> Index | None:
        with self._lock:
            self._age()
            return self._young.get(key) or self._old.get(key)

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._young.pop(key, None)
                self._old.pop(key, None)

    def packs_with(self, keys: Iterable[bytes]) -> set[bytes]:
        """The first keys of those known packs that have one of these blocks."""
        with self._lock:
            known = [*self._old.items(), *self._young.items()]
        wanted = set(map(digest, keys))
        return {first for first, index in known if not wanted.isdisjoint(index.each())}

    def _age(self) -> None:
        now = self._clock()
        if now >= self._until + SECONDS / 2:
            self._young = {}
        if now >= self._until:
            self._turn()
            self._until = now + SECONDS / 2

    def _turn(self) -> None:
        self._young, self._old = {}, self._young
