"""Arc: which of two queues evicts next, those used once or those used again. Over slots, by the cpu
tier, or over runs of blocks without any bytes, by the simulation."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

Key = TypeVar("Key", bytes, int)

ONCE, AGAIN = 1, 2
"""The queue of blocks used once, and of those used since they were stored."""


class History(Generic[Key]):
    """Remembers the `blocks` blocks evicted last, half of them at least.

    A key stands for one block, or for several by a mask with a bit for each. Two plain dicts, the
    younger of which takes the other's place when it is full: Python's garbage collector does not
    look into dicts of bytes and ints before 3.14.
    """

    def __init__(self, blocks: float) -> None:
        self._half = max(1.0, blocks // 2)
        self._young: dict[Key, int] = {}
        self._old: dict[Key, int] = {}
        self._count = 0
        self._old_count = 0

    def resize(self, blocks: float) -> None:
        """Remember `blocks` from now on; what is too much goes with the next that are evicted."""
        self._half = max(1.0, blocks // 2)

    def add(self, key: Key, blocks: int = 1) -> None:
        self._young[key] = self._young.get(key, 0) | blocks
        self._count += blocks.bit_count()
        if self._count >= self._half:
            self._old, self._old_count = self._young, self._count
            self._young, self._count = {}, 0

    def take(self, key: Key, blocks: int = 1) -> int:
        """Remove a key's blocks; return those that were there."""
        young, old = self._young.pop(key, 0), self._old.pop(key, 0)
        found = (young | old) & blocks
        if not found:  # by far most often there is nothing to put back
            rest_young, rest_old = young, old
        else:
            self._count -= (young & blocks).bit_count()
            self._old_count -= (old & blocks).bit_count()
            rest_young, rest_old = young & ~blocks, old & ~blocks
        if rest_young:
            self._young[key] = rest_young
        if rest_old:
            self._old[key] = rest_old
        return found

    def __len__(self) -> int:
        return self._count + self._old_count


class Arc(Generic[Key]):
    """Divides `capacity` blocks between the two queues by what evicted blocks come back.

    Of each queue as many evicted blocks are remembered as the capacity has. One of them that comes
    back says that its queue was too short, and the share of the capacity that it may have moves.
    After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003,
    where fewer keys are remembered of a queue that is long.
    """

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._once: History[Key] = History(capacity)
        self._again: History[Key] = History(capacity)
        self._share = 0.0
        """Blocks that those used once may have before they are evicted first."""

    def resize(self, capacity: float) -> None:
        self._capacity, self._share = capacity, min(self._share, capacity)
        self._once.resize(capacity)
        self._again.resize(capacity)

    def enter(self, key: Key, blocks: int = 1) -> int:
        """Blocks of a key are stored; return those that came back, which enter AGAIN."""
        once, again = max(1, len(self._once)), max(1, len(self._again))
        if was_once := self._once.take(key, blocks):
            grown = was_once.bit_count() * max(1.0, again / once)
            self._share = min(self._capacity, self._share + grown)
        if (left := blocks & ~was_once) and (was_again := self._again.take(key, left)):
            shrunk = was_again.bit_count() * max(1.0, once / again)
            self._share = max(0.0, self._share - shrunk)
            return was_once | was_again
        return was_once

    def next(self, once: int, again: int) -> int:
        """The queue that evicts next, by their numbers of blocks, which are not both 0."""
        return ONCE if once and (once > self._share or not again) else AGAIN

    def until_next(self, once: int, again: int) -> int:
        """How many blocks it may evict before `next` is to be asked again."""
        if self.next(once, again) == AGAIN:
            return again
        return max(1, math.ceil(once - self._share)) if again else once

    def evicted(self, queue: int, key: Key, blocks: int = 1) -> None:
        (self._once if queue == ONCE else self._again).add(key, blocks)
