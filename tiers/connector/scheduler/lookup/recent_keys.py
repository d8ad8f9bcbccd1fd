"""RecentKeys: what is known to be held, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class RecentKeys:
    """Remembers keys for `seconds` at most and half of it at least, up to `limit` of them.

    In two plain dicts, the younger of which takes the other's place when it is full or old, since
    dicts of bytes alone are nothing that Python's garbage collector looks at. Used by one thread.
    """

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float]) -> None:
        self._half = max(1, limit // 2)
        self._seconds = seconds / 2  # in each of the two
        self._clock = clock
        self._until = clock() + self._seconds
        self._young: dict[bytes, None] = {}
        self._old: dict[bytes, None] = {}

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember these keys from now on."""
        self._age()
        self._young.update(dict.fromkeys(keys))
        if len(self._young) >= self._half:
            self._turn()

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys are remembered."""
        self._age()
        young, old = self._young, self._old
        return [key in young or key in old for key in keys]

    def discard(self, key: bytes) -> None:
        """Forget a key."""
        self._young.pop(key, None)
        self._old.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._young, self._old = {}, {}

    def _age(self) -> None:
        now = self._clock()
        if now >= self._until + self._seconds:
            self.clear()
            self._until = now + self._seconds
        elif now >= self._until:
            self._turn()
            self._until += self._seconds

    def _turn(self) -> None:
        self._young, self._old = {}, self._young
