"""RecentDict: what was met of late, for a while and up to a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentDict(Generic[K, V]):
    """Remembers items for `seconds` at most and half of that at least, up to `limit` of them.
    Thread-safe.

    In two plain dicts, the younger of which takes the other's place when it is full or old, since
    Python's garbage collector does not look into dicts of bytes alone before 3.14.
    """

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float]) -> None:
        self._half = max(1, limit // 2)
        self._seconds = seconds / 2  # in each of the two
        self._clock = clock
        self._until = clock() + self._seconds
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        # Without it two threads that turn the dicts would lose what one has added meanwhile.
        self._lock = threading.Lock()

    def update(self, items: Mapping[K, V]) -> None:
        """Remember these from now on."""
        with self._lock:
            self._age()
            self._young.update(items)
            if len(self._young) >= self._half:
                self._turn()

    def known(self, keys: Iterable[K]) -> list[bool]:
        with self._lock:
            self._age()
            young, old = self._young, self._old
            return [key in young or key in old for key in keys]

    def get(self, key: K) -> V | None:
        with self._lock:
            self._age()
            return self._young.get(key, self._old.get(key))

    def items(self) -> list[tuple[K, V]]:
        with self._lock:
            return [*self._old.items(), *self._young.items()]

    def discard(self, keys: Iterable[K]) -> None:
        with self._lock:
            for key in keys:
                self._young.pop(key, None)
                self._old.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._young, self._old = {}, {}

    def _age(self) -> None:
        now = self._clock()
        if now >= self._until + self._seconds:
            self._young, self._old = {}, {}
            self._until = now + self._seconds
        elif now >= self._until:
            self._turn()
            self._until += self._seconds

    def _turn(self) -> None:
        self._young, self._old = {}, self._young
