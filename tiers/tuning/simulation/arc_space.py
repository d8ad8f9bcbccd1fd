"""ArcSpace: the cpu tier's eviction policy `arc`, by runs of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tiers.host.arc_queues import AGAIN, ONCE, Arc
from tiers.tuning.simulation.spaces import Job, LruSpace, first_of


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
                    # What these are of no use without is evicted after them.
                    for head in path[path.index(run) :: -1]:
                        if head in self._queues[queue]:
                            self._queues[queue].move_to_end(head)
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
        """Evict what is beyond the capacity."""
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
