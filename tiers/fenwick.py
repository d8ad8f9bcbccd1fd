"""Fenwick: counts in order, whose sums up to a place cost the logarithm of their number."""

from __future__ import annotations

from collections.abc import Iterable


class Fenwick:
    """A Fenwick tree that grows at its end; places count from 1. Used by one thread.

    Over moments of use it gives positions in an LRU stack; Bennett and Kruskal, "LRU stack
    processing", 1975.
    """

    def __init__(self, counts: Iterable[int] = ()) -> None:
        self._tree = [0]
        for count in counts:
            self.append(count)

    def __len__(self) -> int:
        """The last place."""
        return len(self._tree) - 1

    def append(self, count: int) -> None:
        """Add a place behind the last one."""
        tree = self._tree
        place, below = len(tree), 1
        while not place & below:
            count += tree[place - below]
            below <<= 1
        tree.append(count)

    def add(self, place: int, count: int) -> None:
        tree = self._tree
        last = len(tree)
        while place < last:
            tree[place] += count
            place += place & -place

    def up_to(self, place: int) -> int:
        tree, total = self._tree, 0
        while place:
            total += tree[place]
            place &= place - 1
        return total
