"""TierModel: a tier of several sizes, as its sampled keys show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

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


PARTS = 8
"""Of the sample; how much their estimates differ tells the error of the whole."""


FEW = 64
"""Keys that are worth a rest: they take a third of a millisecond."""
COUNTED = 1 << 18
"""Blocks whose requests a tier counts for its threshold."""


class Sampled(NamedTuple):
    """The sampled blocks of a request, by 64 bits of their hashes: those that the prompt asked
    for, in order, and all, those of the answer included. `hot`: how many of `asked` are counted
    exactly, and so not here."""

    asked: Sequence[int]
    stored: Sequence[int]
    hot: int


class Estimate(NamedTuple):
    """Parts of the prompts' blocks: those that a tier has when they are asked for, with twice the
    standard error; and those stored, answers included."""

    hits: float
    error: float
    stores: float


def _parts(keys: Sequence[int], rest: Callable[[], None]) -> Iterator[Sequence[int]]:
    for start in range(0, len(keys), FEW):
        yield keys[start : start + FEW]
        rest()


@dataclass
class _Size:
    """Counts for one capacity: `bound` is that of the sample."""

    bound: float
    hits: list[float]
    stores: float = 0.0


class TierModel:
    """One tier, stored to from each block's `threshold`-th request on, LRU, inclusive.

    A request is touched from its tail to its head, so that any size holds whole prefixes, and all
    its places are taken before any of its blocks is touched. SHARDS (Waldspurger et al., FAST 2015)
    at a rate that keeps the sample of the largest size within `limit` keys, adjusted by the count
    that is expected. Used by one thread.
    """

    def __init__(self, capacities: Sequence[int], threshold: int, limit: int) -> None:
        """`capacities`: in blocks."""
        self.rate = min(1.0, limit / max(capacities))
        self._threshold = threshold
        self._stack = SampledStack(limit)
        self._sizes = [_Size(c * self.rate, [0.0] * PARTS) for c in capacities]
        self._asked = [0.0] * PARTS
        self._counts: dict[int, int] = {}
        self._older_counts: dict[int, int] = {}
        self._counted = max(1, min(limit, int(COUNTED * self.rate)))

    def request(self, sampled: Sampled, rest: Callable[[], None] = lambda: None) -> None:
        """Count and touch a request's blocks. `rest` is called after every few of them."""
        places: dict[int, int | None] = {}
        for part in _parts(sampled.stored, rest):
            places.update(zip(part, map(self._stack.younger, part), strict=True))
        self._count(sampled, [places[key] for key in sampled.asked])
        for part in _parts(sampled.stored[::-1], rest):
            for key in part:
                self._touch(key, places[key])

    def _count(self, sampled: Sampled, places: Sequence[int | None]) -> None:
        """Count what was asked, as deep as each size has all of it."""
        asked = sampled.asked
        for key in asked[sampled.hot :]:
            self._asked[key % PARTS] += 1
        for size in self._sizes:
            for key, place in islice(zip(asked, places, strict=True), sampled.hot, None):
                if place is None or place >= size.bound:
                    break
                size.hits[key % PARTS] += 1

    def _touch(self, key: int, place: int | None) -> None:
        if place is None and not self._admits(key):
            return
        for size in self._sizes:
            size.stores += place is None or place >= size.bound
        self._stack.touch(key)

    def _admits(self, key: int) -> bool:
        if self._threshold == 1:
            return True
        count = self._counts.pop(key, None) or self._older_counts.pop(key, 0)
        if count + 1 >= self._threshold:
            return True
        self._counts[key] = count + 1
        if len(self._counts) >= self._counted:
            self._counts, self._older_counts = {}, self._counts
        return False

    def decay(self, factor: float) -> None:
        """Let what was counted so far weigh less."""
        self._asked = [factor * count for count in self._asked]
        for size in self._sizes:
            size.hits = [factor * count for count in size.hits]
            size.stores *= factor

    def estimates(self, cold: float, hot: float) -> list[Estimate]:
        """One for each capacity. `cold`, `hot`: how many blocks prompts had in all, decayed alike;
        the hot ones are hits of any size."""
        return [self._estimate(size, cold, hot) for size in self._sizes]

    def _estimate(self, size: _Size, cold: float, hot: float) -> Estimate:
        if not cold + hot:
            return Estimate(0.0, 0.0, 0.0)
        rate = self.rate / PARTS
        each = [
            (hits + cold * rate - asked) / rate
            for hits, asked in zip(size.hits, self._asked, strict=True)
        ]
        mean = sum(each) / PARTS
        variance = sum((one - mean) ** 2 for one in each) / (PARTS - 1) / PARTS
        error = 2 * math.sqrt(variance * (1 - self.rate))
        whole = cold + hot
        hits = min(max(hot + mean, 0.0), whole)
        return Estimate(hits / whole, error / whole, size.stores / self.rate / whole)
