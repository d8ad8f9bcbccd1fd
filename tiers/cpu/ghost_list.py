"""GhostList: the keys evicted last, without their blocks."""

from __future__ import annotations


class GhostList:
    """Remembers the last `keys` keys, half of them at least, without their blocks.

    In two plain dicts, the younger of which takes the other's place when it is full, since dicts
    of bytes alone are nothing that Python's garbage collector looks at.
    """

    def __init__(self, keys: int) -> None:
        self._half = max(1, keys // 2)
        self._young: dict[bytes, None] = {}
        self._old: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        """Add a key."""
        self._young[key] = None
        if len(self._young) >= self._half:
            self._young, self._old = {}, self._young

    def take(self, key: bytes) -> bool:
        """Remove a key; return whether it was there."""
        found = self._young.pop(key, self) is None
        return self._old.pop(key, self) is None or found

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
