"""Spaces: which blocks a cache keeps, by runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Part = tuple[int, int, int]
"""Blocks of one run: the run, the first of them, and the one behind the last."""


class LruSpace:
    """Keeps what was used last, each run from its first block on: a prefix goes from its tail.

    `held`: blocks of each run, in the order of their use; for reading. `capacity` may change.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
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
        for run, start, stop in parts:
            have = held.get(run, 0)
            # What went meanwhile leaves a gap, and what is behind a gap is of no use.
            if start <= have < stop:
                held[run] = stop
                self.used += stop - have
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
        while over > 0 and held:
            run = next(iter(held))
            have = held[run]
            if have > over:
                held[run] = have - over
                self.used -= over
                return
            del held[run]
            self.used -= have
            over -= have

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
            self.used -= held.pop(run)
            del since[run]
