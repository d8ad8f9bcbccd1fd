"""PendingUses: uses of blocks that are yet to be written to the index."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat

_MAX_USES = 1 << 16
"""Blocks whose uses are remembered until they are written down; beyond it the oldest are
forgotten."""

AT_ONCE = 512
"""Blocks whose uses one edit writes down, in 2 ms: all processes wait for it."""


class PendingUses:
    """Index keys in the order of their last use. Any thread may record; others are for edits."""

    def __init__(self) -> None:
        self.stamp = 0
        """The last that the index gave, as far as this process knows; what is used from then on was
        used after all that have it or an older one."""
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        # Without it a key could be taken while it moves to the end. Held for memory's time alone.
        self._lock = threading.Lock()

    def record(self, keys: Sequence[bytes]) -> None:
        """Remember a use of each of these index keys, the first key the most recent."""
        with self._lock:
            for key in reversed(keys):
                self._uses[key] = self.stamp
                self._uses.move_to_end(key)
            for _ in repeat(None, len(self._uses) - _MAX_USES):
                self._uses.popitem(last=False)

    def take(self) -> list[bytes]:
        """Remove and return the keys whose uses are the oldest, `AT_ONCE` at most."""
        with self._lock:
            return [self._uses.popitem(last=False)[0] for _ in range(min(AT_ONCE, len(self)))]

    def take_before(self, stamp: float) -> tuple[bytes, int] | None:
        """Remove and return the key whose use is the oldest, and the index's last stamp when it was
        used, if that is less than `stamp`."""
        with self._lock:
            if self._uses and next(iter(self._uses.values())) < stamp:
                return self._uses.popitem(last=False)
            return None

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)
