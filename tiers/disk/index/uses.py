"""PendingUses: uses of blocks that are yet to be written to the index."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat

_MAX_USES = 1 << 16
"""Uses remembered until they are written down; beyond it the oldest are forgotten."""

AT_ONCE = 512
"""Blocks whose uses one edit writes down, in 2 ms: all processes wait for it."""

_READ_AT_ONCE = 8 * AT_ONCE


class PendingUses:
    """Index keys in the order of their use. Any thread may record; one at a time takes, in an edit.
    Needs no lock: a deque takes or gives its items in one step."""

    def __init__(self) -> None:
        self._keys: deque[bytes] = deque(maxlen=_MAX_USES)

    def record(self, keys: Sequence[bytes]) -> None:
        """Remember a use of each of these index keys, the first key the most recent."""
        self._keys.extend(reversed(keys))

    def take(self) -> list[bytes]:
        """Remove and return the oldest uses, `AT_ONCE` blocks at most; each block once, at its
        last use."""
        uses: dict[bytes, None] = {}
        for _ in repeat(None, min(len(self._keys), _READ_AT_ONCE)):
            key = self._keys.popleft()
            uses.pop(key, None)
            uses[key] = None
            if len(uses) == AT_ONCE:
                break
        return list(uses)

    def __len__(self) -> int:
        return len(self._keys)
