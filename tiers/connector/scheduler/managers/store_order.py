"""StoreOrder: when a store is told again in which order a request's blocks should go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StoreOrder:
    """Whether a store will evict a request's blocks from their tail.

    A store evicts last what was stored last. A prefix that came in several steps is therefore told
    to it again, head last. Doing that with each step of a long answer would take time by the square
    of its length, so it is done when the prefix has doubled, and when the request has ended.
    """

    under_way: int = 0
    """Jobs that are storing its blocks."""
    finished: bool = False
    """Whether the engine is done with the request."""
    stale: bool = False
    """Whether something came after what should be the last to go."""
    _settled: int = 0

    def ended(self, keys: int | None) -> None:
        """A job has ended. `keys`: how many it stored, if those were all keys so far and the store
        took them in one call; else None."""
        self.under_way -= 1
        if keys is None:
            self.stale = True
        else:
            self._settled = keys

    def settle(self, keys: int) -> bool:
        """Whether to tell the tier the order of the first `keys` keys now."""
        over = self.finished and not self.under_way
        if not self.stale or not (over or keys >= 2 * self._settled):
            return False
        self._settled, self.stale = keys, self.under_way > 0
        return True
