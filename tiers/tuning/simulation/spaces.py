"""Spaces: which blocks a cache keeps, by runs of blocks."""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from random import Random

from tiers.host.arc_queues import AGAIN, ONCE, Arc

RECENT_SECONDS = 60.0
"""For so long a chain takes a store to hold what it has met there; see its `StoreManager`."""
Part = tuple[int, int]
"""Blocks of one run: the run, and a mask with a bit for each of its blocks, the first lowest."""
Job = tuple[list[Part], int, Sequence[int]]
"""Blocks of one prompt on their way: their parts of runs, how many, and the path of the prompt."""


class LruSpace:
    """Keeps the blocks used last, of each run the first ones longest: it evicts a prefix from its
    tail.

    `runs`: how many there are. `capacity`: blocks. `held`: the blocks of each run as a mask; for
    reading. `known`: those and the ones in flight, which its owner adds.
    """

    def __init__(self, capacity: float, runs: int) -> None:
        self.capacity = capacity
        self.pins: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
        """`known` and `held` of the stores into which blocks are copied from here. Blocks in flight
        are being read, and so pinned."""
        self.used = 0
        self.claimed = 0
        """Blocks that have their place and are not there yet."""
        self.places: float = math.inf
        """For those and what is held."""
        self.held = [0] * runs
        self.known = [0] * runs
        self._order: OrderedDict[int, None] = OrderedDict()
        """Runs with blocks held, the one used last at the end."""

    def touch(self, path: Sequence[int]) -> None:
        """Count these runs as used now, the first of them most."""
        held, move = self.held, self._order.move_to_end
        for run in path[::-1]:
            if held[run]:
                move(run)

    def load(self, path: Sequence[int]) -> None:
        """Some of these runs are loaded from here."""
        self.touch(path)

    def claim(self, blocks: int) -> None:
        """Make room for blocks that are about to come."""
        self.claimed += blocks
        if self.used + self.claimed > self.places:
            self.shrink()

    def over(self) -> int:
        """How many blocks are to be evicted."""
        most = min(self.capacity, self.places - self.claimed)
        return min(self.used, int(self.used - most)) if most < self.used else 0

    def store(self, job: Job) -> None:
        """Keep these blocks, which are new, and count the runs of their path as used now."""
        parts, blocks, path = job
        held, order = self.held, self._order
        for run, new in parts:
            if not held[run]:
                order[run] = None
            held[run] |= new
        self.touch(path)
        self.used = used = self.used + blocks
        if used > self.capacity:
            self.shrink()

    def shrink(self) -> None:
        """Evict what is beyond the capacity. Blocks that are being read keep their place."""
        held, known, pins = self.held, self.known, self.pins
        over = self.over()
        self.used -= over
        gone = []
        for run in self._order:
            free = have = held[run]
            for theirs, arrived in pins:
                free &= arrived[run] | ~theirs[run]
            count = free.bit_count()
            if count > over:
                free ^= first_of(free, count - over)
                count = over
            known[run] ^= free
            if free == have:
                held[run] = 0
                gone.append(run)
            else:
                held[run] = have ^ free
            over -= count
            if not over:
                break
        self.used += over
        for run in gone:
            del self._order[run]

    def pass_time(self, now: float) -> None:
        """Evict what is too old by now: nothing."""


class AgedSpace(LruSpace):
    """Keeps the blocks stored last, as an object tier does: no use renews them."""

    def touch(self, path: Sequence[int]) -> None:
        """Count nothing as used."""


LOW = (1 << 32) - 1
SAMPLES, CANDIDATES = 5, 16
"""A server's `maxmemory-samples` by default, and how many it remembers of what it looked at."""


class SampledSpace(LruSpace):
    """Evicts as a Redis server does: of a few blocks, taken by chance, the one not used for
    longest. Those of a prompt are as old as each other to it: the first go as soon as the last.
    Used is what was stored, loaded, or offered by who had not just met it: a chain offers nothing
    to a store that it has loaded from there within a minute."""

    def __init__(self, capacity: float, runs: int) -> None:
        super().__init__(capacity, runs)
        self._chance = Random(0).random  # the same trace has the same report
        self._now = 0.0
        self._met = [-math.inf] * runs
        self._uses = 0
        self._used_at = [0] * runs
        # run << 32 | block: those that are held, and some that are no more.
        self._blocks = array("Q")
        self._oldest: list[tuple[int, Part]] = []

    def load(self, path: Sequence[int]) -> None:
        self._uses += 1
        for run in path:
            self._used_at[run] = self._uses
            self._met[run] = self._now

    def touch(self, path: Sequence[int]) -> None:
        self._offer([run for run in path if self._now - self._met[run] > RECENT_SECONDS])

    def _offer(self, runs: Sequence[int]) -> None:
        SampledSpace.load(self, runs)

    def store(self, job: Job) -> None:
        blocks, held = self._blocks, self.held
        for run, new in job[0] if self.capacity < math.inf else ():
            blocks.extend(run << 32 | at for at in range(new.bit_length()) if new >> at & 1)
        self._offer([run for run, _ in job[0]])
        super().store(job)
        if len(blocks) > 2 * self.used:  # what expired is never a victim
            here = (one for one in dict.fromkeys(blocks) if held[one >> 32] >> (one & LOW) & 1)
            self._blocks = array("Q", here)

    def pass_time(self, now: float) -> None:
        self._now = now

    def shrink(self) -> None:
        for _ in range(self.over()):
            run, block = self._victim()
            self.held[run] ^= block
            self.known[run] ^= block
            self.used -= 1

    def _victim(self) -> Part:
        blocks, oldest, held, used_at = self._blocks, self._oldest, self.held, self._used_at
        while True:
            for _ in range(SAMPLES):
                one = blocks[at := int(self._chance() * len(blocks))]
                run, block = one >> 32, 1 << (one & LOW)
                if len(oldest) == CANDIDATES and used_at[run] >= oldest[-1][0]:
                    continue
                if held[run] & block:
                    insort(oldest, (used_at[run], (run, block)))
                    del oldest[CANDIDATES:]
                else:  # it was evicted
                    blocks[at] = blocks[-1]
                    blocks.pop()
            while oldest:
                run, block = oldest.pop(0)[1]
                if held[run] & block:
                    return run, block


class TimedSpace(SampledSpace):
    """Keeps a run for `ttl` seconds after it was stored or offered."""

    def __init__(self, capacity: float, runs: int, ttl: float) -> None:
        super().__init__(capacity, runs)
        self._ttl = ttl
        self._since: OrderedDict[int, float] = OrderedDict()
        """When each run was renewed, the first one first."""

    def _offer(self, runs: Sequence[int]) -> None:
        super()._offer(runs)
        for run in runs:
            self._since[run] = self._now
            self._since.move_to_end(run)

    def pass_time(self, now: float) -> None:
        self._now = now
        held, since, oldest = self.held, self._since, now - self._ttl
        while since and since[run := next(iter(since))] < oldest:
            del since[run]
            if held[run]:  # else it was evicted before
                self.used -= held[run].bit_count()
                self.known[run] ^= held[run]
                held[run] = 0


def split(parts: list[Part], most: float) -> tuple[list[Part], list[Part]]:
    """The first `most` blocks of these parts, and the others."""
    taken: list[Part] = []
    room = max(0, math.floor(most))
    for index, (run, blocks) in enumerate(parts):
        count = blocks.bit_count()
        if count > room:
            first = first_of(blocks, room)
            if room:
                taken.append((run, first))
            return taken, [(run, blocks ^ first), *parts[index + 1 :]]
        taken.append((run, blocks))
        room -= count
    return taken, []


def first_of(blocks: int, count: int) -> int:
    """The first `count` blocks of a mask, at most."""
    first = (1 << count) - 1
    if blocks & first == first:  # by far most often: the mask has the run's first blocks
        return first
    start = (blocks & -blocks).bit_length() - 1
    first = blocks & (1 << start + count) - 1
    if first.bit_count() == count:  # no gap there
        return first
    while blocks.bit_count() > count:
        blocks ^= 1 << blocks.bit_length() - 1
    return blocks


def leading(blocks: int) -> int:
    """How many blocks the mask has from the run's first one on, without a gap."""
    return (~blocks & (blocks + 1)).bit_length() - 1


class ArcSpace(LruSpace):
    """Blocks used once and blocks used again. Of a run each queue has a part, which moves and is
    evicted as one."""

    def __init__(self, capacity: float, runs: int) -> None:
        super().__init__(capacity, runs)
        self._queues: dict[int, OrderedDict[int, int]]
        self._queues = {ONCE: OrderedDict(), AGAIN: OrderedDict()}
        self._counts = {ONCE: 0, AGAIN: 0}
        self._arc: Arc[int] = Arc(capacity)

    def touch(self, path: Sequence[int]) -> None:
        """Count these runs as used again, the first of them most."""
        once, again = self._queues.values()
        for run in path[::-1]:
            if run in once:
                blocks = once.pop(run)
                self._counts[ONCE] -= blocks.bit_count()
                self._append(run, blocks, AGAIN)
            elif run in again:
                again.move_to_end(run)

    def store(self, job: Job) -> None:
        """Keep these blocks, which are new; none counts as used."""
        parts, count, path = job
        for run, blocks in reversed(parts):
            back = self._arc.enter(run, blocks)
            for queue, mine in ((ONCE, blocks & ~back), (AGAIN, back)):
                if mine:
                    self._append(run, mine, queue)
                    # Their predecessors, without which they are of no use, are evicted later.
                    for before in path[path.index(run) :: -1]:
                        if before in self._queues[queue]:
                            self._queues[queue].move_to_end(before)
            self.held[run] |= blocks
        self.used += count
        if self.used > self.capacity:
            self.shrink()

    def _append(self, run: int, blocks: int, queue: int) -> None:
        """Put blocks at a queue's end, with those of the run that it has."""
        order = self._queues[queue]
        order[run] = order.pop(run, 0) | blocks
        self._counts[queue] += blocks.bit_count()

    def shrink(self) -> None:
        over, counts, arc = self.over(), self._counts, self._arc
        while over > 0:
            lengths = counts[ONCE], counts[AGAIN]
            queue, most = arc.next(*lengths), arc.until_next(*lengths)
            order = self._queues[queue]
            run, blocks = next(iter(order.items()))
            count = min(blocks.bit_count(), most, over)
            left = first_of(blocks, blocks.bit_count() - count)
            evicted = blocks & ~left
            if left:
                order[run] = left
            else:
                del order[run]
            self.held[run] ^= evicted
            self.known[run] ^= evicted
            counts[queue] -= count
            self.used -= count
            over -= count
            arc.evicted(queue, run, evicted)


SPACES: Mapping[str, type[LruSpace]] = {"lru": LruSpace, "arc": ArcSpace}
"""The eviction policies that are simulated, the default first."""
