"""SampledStack: sampled keys by how lately they were used, and the place of each."""

from __future__ import annotations

from array import array


class SampledStack:
    """At most `limit` keys, in the order of their last use. Used by one thread.

    A Fenwick tree over moments of use counts the keys that were used later; Bennett and Kruskal,
    LRU stack processing, 1975.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._moments: dict[int, int] = {}
        self._size = 2 * limit
        self._keys: list[int] = []
        self._tree = array("i", bytes(4 * (self._size + 1)))
        self._oldest = 0

    def __len__(self) -> int:
        return len(self._moments)

    def younger(self, key: int) -> int | None:
        """How many keys were used after this one; None: it is not among those that are kept."""
        moment = self._moments.get(key)
        if moment is None:
            return None
        tree, older = self._tree, 0
        moment += 1
        while moment:
            older += tree[moment]
            moment &= moment - 1
        return len(self._moments) - older

    def touch(self, key: int) -> None:
        """Use a key now. The one that was not used for longest goes for a new one."""
        before = self._moments.pop(key, None)
        if before is not None:
            self._add(before, -1)
        elif len(self._moments) == self._limit:
            self._evict()
        if len(self._keys) == self._size:
            self._renumber()
        self._moments[key] = len(self._keys)
        self._keys.append(key)
        self._add(len(self._keys) - 1, 1)

    def _evict(self) -> None:
        while self._moments.get(self._keys[self._oldest]) != self._oldest:
            self._oldest += 1
        del self._moments[self._keys[self._oldest]]
        self._add(self._oldest, -1)

    def _renumber(self) -> None:
        live = sorted(self._moments.items(), key=lambda item: item[1])
        self._keys = [key for key, _ in live]
        self._moments = {key: moment for moment, key in enumerate(self._keys)}
        self._oldest = 0
        self._tree = array("i", bytes(4 * (self._size + 1)))
        for moment in range(len(live)):
            self._add(moment, 1)

    def _add(self, moment: int, count: int) -> None:
        tree, size = self._tree, self._size
        moment += 1
        while moment <= size:
            tree[moment] += count
            moment += moment & -moment
