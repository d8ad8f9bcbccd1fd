"""Spaces with two queues: the cpu tier's other eviction policies, by runs of blocks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from tiers.tuning.simulation.spaces import Job, LruSpace, first_of

FIRST, SECOND = 0, 1
SMALL_SHARE = 0.5
MOST_USES = 3
"""As in `tiers/cpu/s3fifo.py`, where it is said why, as for SMALL_SHARE."""


class Ghosts:
    """The last blocks that went, as many as `blocks` and half of them at least."""

    def __init__(self, blocks: float) -> None:
        self._half = max(1.0, blocks // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._count = 0
        self._old_count = 0

    def add(self, run: int, blocks: int) -> None:
        """Add blocks of a run."""
        self._young[run] = self._young.get(run, 0) | blocks
        self._count += blocks.bit_count()
        if self._count >= self._half:
            self._old, self._old_count = self._young, self._count
            self._young, self._count = {}, 0

    def take(self, run: int, blocks: int) -> int:
        """Remove these blocks; return those that were there."""
        young = self._young.get(run, 0) & blocks
        old = self._old.get(run, 0) & blocks
        if young:
            self._young[run] &= ~young
            self._count -= young.bit_count()
        if old:
            self._old[run] &= ~old
            self._old_count -= old.bit_count()
        return young | old

    def __len__(self) -> int:
        return self._count + self._old_count


class QueueSpace(LruSpace):
    """Blocks in two queues. Of a run each queue has a part, which moves and goes as one."""

    def __init__(self, capacity: float, runs: int) -> None:
        super().__init__(capacity, runs)
        self._queues: tuple[OrderedDict[int, int], OrderedDict[int, int]]
        self._queues = (OrderedDict(), OrderedDict())
        self._counts = [0, 0]

    @abstractmethod
    def _place(self, run: int, blocks: int) -> tuple[int, int]:
        """Divide blocks that come: those for the first queue and those for the second."""

    @abstractmethod
    def _next(self) -> tuple[int, int]:
        """The queue from which blocks go next, and how many may before it is asked again."""

    @abstractmethod
    def _evicted(self, queue: int, run: int, blocks: int) -> None:
        """Note that blocks have gone from a queue."""

    def _goes_before(self, run: int, queue: int) -> bool:
        """Whether what comes behind this run is put before it, so as to go first."""
        return run in self._queues[queue]

    def store(self, job: Job) -> None:
        """Keep these blocks, which are new; none counts as used."""
        parts, count, path = job
        for run, blocks in reversed(parts):
            for queue, mine in enumerate(self._place(run, blocks)):
                if mine:
                    heads = path[: path.index(run) + 1]
                    self._append(run, mine, queue, [r for r in heads if r in self._queues[queue]])
            self.held[run] |= blocks
        self.used += count
        if self.used > self.capacity:
            self.shrink()

    def _append(self, run: int, blocks: int, queue: int, heads: Sequence[int]) -> None:
        """Put blocks at the queue's end, and what they are of no use without behind them."""
        order = self._queues[queue]
        order[run] = order.pop(run, 0) | blocks
        self._counts[queue] += blocks.bit_count()
        for head in reversed(heads):
            if self._goes_before(head, queue):
                order.move_to_end(head)

    def _move(self, run: int, source: int, target: int) -> None:
        """Put a run's part of one queue at the end of another, or of the same."""
        blocks = self._queues[source].pop(run)
        count = blocks.bit_count()
        self._counts[source] -= count
        self._counts[target] += count
        order = self._queues[target]
        order[run] = order.pop(run, 0) | blocks

    def shrink(self) -> None:
        """Evict what is beyond the capacity."""
        over = self.over()
        while over > 0:
            queue, most = self._next()
            order = self._queues[queue]
            run = next(iter(order))
            blocks = order[run]
            count = min(blocks.bit_count(), most, over)
            left = first_of(blocks, blocks.bit_count() - count)
            gone = blocks & ~left
            if left:
                order[run] = left
            else:
                del order[run]
            self.held[run] ^= gone
            self.known[run] ^= gone
            self._counts[queue] -= count
            self.used -= count
            over -= count
            self._evicted(queue, run, gone)


class ArcSpace(QueueSpace):
    """Divides room between blocks used once and blocks used again, adaptively."""

    def __init__(self, capacity: float, runs: int) -> None:
        super().__init__(capacity, runs)
        self._gone = (Ghosts(capacity), Ghosts(capacity))
        self._share = 0.0

    def touch(self, path: Sequence[int]) -> None:
        """Count these runs as used again, the first of them most."""
        first, second = self._queues
        for run in path[::-1]:
            if run in first:
                self._move(run, FIRST, SECOND)
            elif run in second:
                second.move_to_end(run)

    def _place(self, run: int, blocks: int) -> tuple[int, int]:
        once, again = (max(1, len(gone)) for gone in self._gone)
        was_once = self._gone[FIRST].take(run, blocks)
        was_again = self._gone[SECOND].take(run, blocks & ~was_once)
        grown = was_once.bit_count() * max(1.0, again / once)
        shrunk = was_again.bit_count() * max(1.0, once / again)
        self._share = max(0.0, min(self.capacity, self._share + grown) - shrunk)
        back = was_once | was_again
        return blocks & ~back, back

    def _next(self) -> tuple[int, int]:
        once, again = self._counts
        if once and (once > self._share or not again):
            return FIRST, max(1, math.ceil(once - self._share)) if again else once
        return SECOND, again

    def _evicted(self, queue: int, run: int, blocks: int) -> None:
        self._gone[queue].add(run, blocks)


class S3FifoSpace(QueueSpace):
    """Blocks on probation go soon unless they are used during it."""

    def __init__(self, capacity: float, runs: int) -> None:
        super().__init__(capacity, runs)
        self._uses: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._gone = Ghosts(capacity)
        self._small = max(1, int(capacity * SMALL_SHARE)) if capacity < math.inf else math.inf

    def touch(self, path: Sequence[int]) -> None:
        """Count a use of these runs."""
        for order, uses in zip(self._queues, self._uses, strict=True):
            for run in path:
                if run in order:
                    uses[run] = min(MOST_USES, uses.get(run, 0) + 1)

    def _goes_before(self, run: int, queue: int) -> bool:
        return run in self._queues[queue] and not self._uses[queue].get(run)

    def _place(self, run: int, blocks: int) -> tuple[int, int]:
        back = self._gone.take(run, blocks)
        return blocks & ~back, back

    def _next(self) -> tuple[int, int]:
        # It ends: every turn takes a use away, or a run out of probation.
        while True:
            small, main = self._counts
            queue = FIRST if small > self._small or not main else SECOND
            run = next(iter(self._queues[queue]))
            uses = self._uses[queue].pop(run, 0)
            if not uses:
                limited = queue == FIRST and main
                return queue, int(small - self._small) if limited else small + main
            self._uses[SECOND][run] = 0 if queue == FIRST else uses - 1
            self._move(run, queue, SECOND)

    def _evicted(self, queue: int, run: int, blocks: int) -> None:
        if queue == FIRST:
            self._gone.add(run, blocks)
