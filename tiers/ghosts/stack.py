"""SampledStack: sampled keys by how lately they were used, and the place of each."""

from __future__ import annotations

from tiers.fenwick import Fenwick


class SampledStack:
    """At most `limit` keys, in the order of their last use. Used by one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._moments: dict[int, int] = {}
        self._renumber()

    def __len__(self) -> int:
        return len(self._moments)

    def younger(self, key: int) -> int | None:
        """How many keys were used after this one; None: it is not among those that are kept."""
        moment = self._moments.get(key)
        return None if moment is None else len(self._moments) - self._live.up_to(moment)

    def touch(self, key: int) -> None:
        """Use a key now. The one that was not used for longest is dropped for a new one."""
        before = self._moments.pop(key, None)
        if before is not None:
            self._live.add(before, -1)
        elif len(self._moments) == self._limit:
            self._evict()
        if len(self._live) == 2 * self._limit:
            self._renumber()
        self._keys.append(key)
        self._live.append(1)
        self._moments[key] = len(self._live)

    def _evict(self) -> None:
        while self._moments.get(self._keys[self._oldest - 1]) != self._oldest:
            self._oldest += 1
        del self._moments[self._keys[self._oldest - 1]]
        self._live.add(self._oldest, -1)

    def _renumber(self) -> None:
        """Let the moments of the keys that are kept be 1, 2, ..."""
        self._keys = sorted(self._moments, key=self._moments.__getitem__)
        self._moments = {key: moment for moment, key in enumerate(self._keys, 1)}
        self._live = Fenwick([1] * len(self._keys))
        self._oldest = 1
