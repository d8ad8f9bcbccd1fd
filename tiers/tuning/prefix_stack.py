"""PrefixStack: the LRU stack of a trace's blocks; a cache of C blocks holds the top C of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import repeat

from tiers.errors import TraceError
from tiers.fenwick import Fenwick

INDEX, START, END = range(3)
SLACK = 1000
"""Few blocks or requests are not worth dropping or renumbering."""
_Record = list[int]
"""A request: its index in the tree, and from which to which depth it was the last to touch the
blocks of its prompt. Later requests take a prompt's blocks from the first on, so it is a range."""


class PrefixStack:
    """Gives the LRU positions of requests' blocks and touches them, a request at a time.

    Positions count from 1, the youngest. A request's blocks are touched from the tail to the head,
    after the positions of all of them were taken. So a parent is always younger than its children,
    the top C of the stack are whole prefixes, and a reference is a hit in a cache of C blocks if
    and only if its position is C or less.

    It works by runs: neighbours in a prompt that one request touched last are neighbours in the
    stack. The ends of a run are found by galloping, since the request that touched a block last is
    never younger further down a prompt. A Fenwick tree over requests counts the blocks above a run.

    `bound`: positions beyond it are not told apart from blocks never seen. Remembered are at most
    twice as many blocks, 1,000 and a prompt's, and three integers for each request that was the
    last to touch one. Used by one thread.

    The run as a unit is ours.
    """

    def __init__(self, bound: int | None = None) -> None:
        self._bound = sys.maxsize if bound is None else bound
        self._most = sys.maxsize if bound is None else 2 * bound + SLACK
        self._last: dict[int, _Record] = {}
        self._records: list[_Record] = []
        self._tree = Fenwick()
        self._blocks = 0
        self._live = 0
        self._firsts: list[int] = []
        self._behinds: list[int] = []

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._last)

    def touch(
        self, blocks: Sequence[int], at_least: int | None = None, counted: int | None = None
    ) -> int:
        """Count the positions of a request's blocks, touch them, and return how many had one.

        `at_least`: touch only so many of the first blocks, and those that have a position.
        `counted`: count only so many of the first blocks, the prompt's; the answer's follow.
        Raises TraceError where it notices that an id stands for a block after two prefixes.
        """
        last, tree, length = self._last.get, self._tree, len(blocks)
        newest, total, depth, known = len(tree), self._blocks, 0, 0
        touched = length if at_least is None else min(at_least, length)
        while depth < length and (record := last(blocks[depth])) is not None:
            index, start, stop = record
            if start != depth:
                raise _no_prefix(blocks[depth])
            end = length if last(blocks[-1]) is record else _run_end(last, blocks, depth, record)
            first = 1 if index == newest else total - tree.up_to(index) + 1
            if first <= self._bound:
                known = self._count(first, depth, end, counted)
                touched = known if known > touched else touched
            # The runs further down belong to older requests: taking this one changes none of
            # their positions, which `total` and the tree up to them give.
            taken_to = end if end < touched else touched
            if taken_to <= depth:
                break
            record[1] = taken_to
            tree.add(index, depth - taken_to)
            self._live -= taken_to == stop
            self._blocks -= taken_to - depth
            depth = end
        if depth < touched == length and last(blocks[-1]) is not None:
            raise _no_prefix(blocks[-1])
        if touched:
            self._add(blocks if touched == length else blocks[:touched])
        return known

    def positions(self) -> tuple[Counter[int], Counter[int]]:
        """How many runs of positions began at each position, and behind which they ended, since
        the last call."""
        found = Counter(self._firsts), Counter(self._behinds)
        self._firsts, self._behinds = [], []
        return found

    def _count(self, first: int, depth: int, end: int, counted: int | None) -> int:
        """Count a run's positions up to the bound; return the depth behind them."""
        behind = known = min(first + end - depth, self._bound + 1)
        if counted is not None:
            behind = min(behind, first + counted - depth)
        if first < behind:
            self._firsts.append(first)
            self._behinds.append(behind)
        return depth + known - first

    def _add(self, blocks: Sequence[int]) -> None:
        """Make a new request the one that touched these blocks last."""
        record = [len(self._tree) + 1, 0, len(blocks)]
        self._last.update(zip(blocks, repeat(record)))
        self._records.append(record)
        self._blocks += len(blocks)
        self._live += 1
        self._tree.append(len(blocks))
        if len(self._records) > 2 * self._live + SLACK:
            self._renumber([one for one in self._records if one[START] < one[END]])
        if len(self._last) > self._most:
            self._trim()

    def _renumber(self, records: list[_Record]) -> None:
        """Keep these requests alone, in their order."""
        self._records = records
        self._live = len(records)
        sizes = [one[END] - one[START] for one in records]
        self._blocks = sum(sizes)
        self._tree = Fenwick(sizes)
        for index, record in enumerate(records, 1):
            record[INDEX] = index

    def _trim(self) -> None:
        """Drop the blocks of requests that lie deeper than the bound as a whole."""
        kept: list[_Record] = []
        above = 0
        for record in reversed(self._records):
            if above >= self._bound:
                break
            kept.append(record)
            above += record[END] - record[START]
        oldest = kept[-1][INDEX]
        self._last = {key: one for key, one in self._last.items() if one[INDEX] >= oldest}
        self._renumber([one for one in reversed(kept) if one[START] < one[END]])


def _run_end(
    last: Callable[[int], _Record | None], blocks: Sequence[int], start: int, record: _Record
) -> int:
    """The depth behind the last block, from `start` on, that this request touched last."""
    if last(blocks[-1]) is record:
        return len(blocks)
    low, step = start, 1
    while (high := low + step) < len(blocks) and last(blocks[high]) is record:
        low, step = high, 2 * step
    high = min(high, len(blocks) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if last(blocks[middle]) is record:
            low = middle
        else:
            high = middle
    return high


def _no_prefix(block: int) -> TraceError:
    return TraceError(
        f"the id {block} stands for blocks after different prefixes; an id must stand for its "
        "block and all blocks before it"
    )
