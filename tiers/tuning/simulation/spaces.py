"""Spaces: which blocks a cache keeps, by runs of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Part = tuple[int, int]
"""Blocks of one run: the run, and a mask with a bit for each of its blocks, the first lowest."""


class LruSpace:
    """Keeps what was used last, of each run the first blocks longest: a prefix goes from its tail.

    `runs`: how many there are. `held`: the blocks of each run as a mask; for reading. `capacity`:
    blocks.
    """

    def __init__(self, capacity: float, runs: int) -> None:
        self.capacity = capacity
        self.pins: Sequence[Sequence[int]] = ()
        """Blocks of each run that are being read, and so passed by."""
        self.used = 0
        self.held = [0] * runs
        self._order: OrderedDict[int, None] = OrderedDict()
        """Runs with blocks held, the one used last at the end."""

    def touch(self, path: Sequence[int]) -> None:
        """Count these runs as used now, the first of them most."""
        held, move = self.held, self._order.move_to_end
        for run in path[::-1]:
            if held[run]:
                move(run)

    def store(self, parts: Iterable[Part], path: Sequence[int]) -> None:
        """Keep these blocks, and count the runs of their path as used now."""
        held, order = self.held, self._order
        for run, blocks in parts:
            if have := held[run]:
                blocks &= ~have
            else:
                order[run] = None
            held[run] = have | blocks
            self.used += blocks.bit_count()
        move = order.move_to_end
        for run in path[::-1]:
            if held[run]:
                move(run)
        if self.used > self.capacity:
            self.shrink()

    def shrink(self) -> None:
        """Evict what is beyond the capacity. Blocks that are being read keep their place."""
        held, pins = self.held, self.pins
        over = int(self.used - self.capacity)
        self.used -= over
        gone = []
        for run in self._order:
            free = held[run]
            for one in pins:
                free &= ~one[run]
            count = free.bit_count()
            if count > over:
                held[run] ^= free ^ first_of(free, count - over)
                over = 0
                break
            held[run] ^= free
            over -= count
            if not held[run]:
                gone.append(run)
            if not over:
                break
        self.used += over
        for run in gone:
            del self._order[run]

    def pass_time(self, now: float) -> None:
        """Evict what is too old by now: nothing."""


class TimedSpace(LruSpace):
    """Keeps a run for `ttl` seconds after its last use."""

    def __init__(self, capacity: float, runs: int, ttl: float) -> None:
        super().__init__(capacity, runs)
        self._ttl = ttl
        self._now = 0.0
        self._since = [0.0] * runs

    def touch(self, path: Sequence[int]) -> None:
        """Count these runs as used now, the first of them most."""
        super().touch(path)
        for run in path:
            self._since[run] = self._now

    def store(self, parts: Iterable[Part], path: Sequence[int]) -> None:
        """Keep these blocks, and count the runs of their path as used now."""
        for run in path:
            self._since[run] = self._now
        super().store(parts, path)

    def pass_time(self, now: float) -> None:
        """Evict what is too old by now."""
        self._now = now
        held, order, since, oldest = self.held, self._order, self._since, now - self._ttl
        while order and since[run := next(iter(order))] < oldest:
            self.used -= held[run].bit_count()
            held[run] = 0
            del order[run]


def first_of(blocks: int, count: int) -> int:
    """The first `count` blocks of a mask, at most."""
    start = (blocks & -blocks).bit_length() - 1
    first = blocks & (1 << start + count) - 1
    if first.bit_count() == count:  # by far most often: the mask has no gap there
        return first
    while blocks.bit_count() > count:
        blocks ^= 1 << blocks.bit_length() - 1
    return blocks


def leading(blocks: int) -> int:
    """How many blocks the mask has from the run's first one on, without a gap."""
    return (~blocks & (blocks + 1)).bit_length() - 1
