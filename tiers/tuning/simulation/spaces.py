"""Spaces: which blocks a cache keeps, by runs of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

Part = tuple[int, int]
"""Blocks of one run: the run, and a mask with a bit for each of its blocks, the first lowest."""


class LruSpace:
    """Keeps what was used last, of each run the first blocks longest: a prefix goes from its tail.

    `held`: the blocks of each run as a mask, in the order of the runs' use; for reading.
    `capacity`, in blocks, may change.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.pins: Sequence[Mapping[int, int]] = ()
        """Blocks of runs that are being read, and so passed by: they count as used then."""
        self.used = 0
        self.held: OrderedDict[int, int] = OrderedDict()

    def touch(self, path: Sequence[int]) -> None:
        """Count these runs as used now, the first of them most."""
        held = self.held
        move = held.move_to_end
        for run in path[::-1]:
            if run in held:
                move(run)

    def store(self, parts: Iterable[Part], path: Sequence[int]) -> None:
        """Keep these blocks, and count the runs of their path as used now."""
        held = self.held
        for run, blocks in parts:
            have = held.get(run, 0)
            held[run] = have | blocks
            self.used += (blocks & ~have).bit_count()
        move = held.move_to_end
        for run in path[::-1]:
            if run in held:
                move(run)
        if self.used > self.capacity:
            self.shrink()

    def shrink(self) -> None:
        """Evict what is beyond the capacity."""
        held = self.held
        over = int(self.used - self.capacity)
        pins = [one for one in self.pins if one]
        passed = 0
        while over > 0 and passed < len(held):
            run = next(iter(held))
            free = blocks = held[run]
            for one in pins:
                if run in one:
                    free &= ~one[run]
            count = free.bit_count()
            if count > over:
                held[run] = blocks & ~free | first_of(free, count - over)
                self.used -= over
                return
            if free == blocks:
                del held[run]
            else:
                held[run] = blocks & ~free
                held.move_to_end(run)
                passed += 1
            self.used -= count
            over -= count

    def pass_time(self, now: float) -> None:
        """Evict what is too old by now: nothing."""


class TimedSpace(LruSpace):
    """Keeps a run for `ttl` seconds after its last use."""

    def __init__(self, capacity: float, ttl: float) -> None:
        super().__init__(capacity)
        self._ttl = ttl
        self._now = 0.0
        self._since: dict[int, float] = {}

    def touch(self, path: Sequence[int]) -> None:
        """Count these runs as used now, the first of them most."""
        super().touch(path)
        self._since.update(dict.fromkeys(path, self._now))

    def store(self, parts: Iterable[Part], path: Sequence[int]) -> None:
        """Keep these blocks, and count the runs of their path as used now."""
        self._since.update(dict.fromkeys(path, self._now))
        super().store(parts, path)

    def pass_time(self, now: float) -> None:
        """Evict what is too old by now."""
        self._now = now
        held, since, oldest = self.held, self._since, now - self._ttl
        while held and since[run := next(iter(held))] < oldest:
            self.used -= held.pop(run).bit_count()
            del since[run]


def first_of(blocks: int, count: int) -> int:
    """The first `count` blocks of a mask, at most."""
    first = blocks & ((1 << count) - 1)
    if first.bit_count() == count:  # by far most often: the mask has no gap there
        return first
    while blocks.bit_count() > count:
        blocks ^= 1 << blocks.bit_length() - 1
    return blocks


def leading(blocks: int) -> int:
    """How many blocks the mask has from the run's first one on, without a gap."""
    return (~blocks & (blocks + 1)).bit_length() - 1
