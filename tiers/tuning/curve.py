"""What would a cache of another size serve? The hit ratio of every size, in one pass."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from tiers.errors import TraceError
from tiers.fenwick import Fenwick
from tiers.traces.trace import TraceRequest

INDEX, START, END = range(3)
SLACK = 1000
"""Few requests are not worth renumbering."""
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
    It keeps all blocks, and three integers for each request that was the last to touch one. Used by
    one thread.
    """

    def __init__(self) -> None:
        self._last: dict[int, _Record] = {}
        self._records: list[_Record] = []
        self._tree = Fenwick()
        self._blocks = 0
        self._live = 0
        self._changes: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._last)

    def touch(
        self, blocks: Sequence[int], at_least: int | None = None, counted: int | None = None
    ) -> int:
        """Count the positions of a request's blocks, touch them, and return how many had one.

        `at_least`: touch only this many of the first blocks, and those that have a position.
        `counted`: count only this many of the first blocks, the prompt's; the answer's follow.
        Raises TraceError where it notices that an id stands for a block after two prefixes.
        """
        last, tree, length = self._last.get, self._tree, len(blocks)
        newest, total, depth = len(tree), self._blocks, 0
        while depth < length and (record := last(blocks[depth])) is not None:
            index, start, stop = record
            if start != depth:
                raise _no_prefix(blocks[depth])
            end = length if last(blocks[-1]) is record else _run_end(last, blocks, depth, record)
            first = 1 if index == newest else total - tree.up_to(index) + 1
            self._count(first, depth, end, counted)
            # The runs further down belong to older requests: taking this one changes none of
            # their positions, which `total` and the tree up to them give.
            record[1] = end
            tree.add(index, depth - end)
            self._live -= end == stop
            self._blocks -= end - depth
            depth = end
        touched = length if at_least is None else max(depth, min(at_least, length))
        if depth < touched == length and last(blocks[-1]) is not None:
            raise _no_prefix(blocks[-1])
        if touched:
            self._add(blocks if touched == length else blocks[:touched])
        return depth

    def take_changes(self) -> Counter[int]:
        """By position: references there since the last call, less those at the position before."""
        found, self._changes = Counter(self._changes), {}
        return found

    def _count(self, first: int, depth: int, end: int, counted: int | None) -> None:
        """Count a run's positions."""
        behind = first - depth + (end if counted is None else min(end, counted))
        if first < behind:
            changes = self._changes
            changes[first] = changes.get(first, 0) + 1
            changes[behind] = changes.get(behind, 0) - 1

    def _add(self, blocks: Sequence[int]) -> None:
        """Make a new request the one that touched these blocks last."""
        record = [len(self._tree) + 1, 0, len(blocks)]
        self._last.update(zip(blocks, repeat(record)))
        self._records.append(record)
        self._blocks += len(blocks)
        self._live += 1
        self._tree.append(len(blocks))
        if len(self._records) > 2 * self._live + SLACK:
            self._renumber()

    def _renumber(self) -> None:
        """Keep the requests that were the last to touch a block, in their order."""
        self._records = [one for one in self._records if one[START] < one[END]]
        self._tree = Fenwick(one[END] - one[START] for one in self._records)
        for index, record in enumerate(self._records, 1):
            record[INDEX] = index


def _run_end(
    last: Callable[[int], _Record | None], blocks: Sequence[int], start: int, record: _Record
) -> int:
    """The depth behind the last block, from `start` on, that this request touched last; not the
    end."""
    low, step = start, 1
    while (high := low + step) < len(blocks) and last(blocks[high]) is record:
        low, step = high, 2 * step
    high = min(high, len(blocks) - 1)
    places = range(len(blocks))
    return bisect_left(places, True, low + 1, high, key=lambda at: last(blocks[at]) is not record)


def _no_prefix(block: int) -> TraceError:
    return TraceError(
        f"the id {block} stands for blocks after different prefixes; an id must stand for its "
        "block and all blocks before it"
    )


_PARTS = 16


@dataclass(frozen=True)
class HitCurve:
    """Hits against size in blocks, for one part of a trace under one rule of storing."""

    requests: int
    tokens: int
    """Prompt tokens of the requests."""
    references: int
    """Full blocks of their prompts."""
    _starts: Sequence[int]
    """Positions from which on the number of references a position changes."""
    _below: Sequence[int]
    """References at positions below each of those."""
    _slopes: Sequence[int]
    """References at each position from there on."""

    def hits(self, size: int) -> int:
        """Blocks served by a cache of `size` blocks."""
        at = bisect_right(self._starts, size) - 1
        if at < 0:
            return 0
        return self._below[at] + self._slopes[at] * (size - self._starts[at] + 1)

    def ratio(self, size: int) -> float:
        """The part of all full blocks that is served."""
        return self.hits(size) / self.references if self.references else 0.0

    @property
    def useful(self) -> int:
        """The smallest size that serves as much as any larger one."""
        return self._starts[-1] - 1 if self._starts else 0


@dataclass(frozen=True)
class Curves:
    block_tokens: int
    all: HitCurve
    """Every block is stored when it is first computed."""
    second_use: HitCurve | None
    """A block is stored when it is computed for the second time (`store_threshold: 2`)."""
    halves: tuple[HitCurve, HitCurve] | None
    """`all`, of the first and the second half of the requests; the second begins warm."""
    distinct: int
    """Different blocks."""


@dataclass
class _Part:
    """Counts of some requests in a row."""

    requests: int = 0
    tokens: int = 0
    references: int = 0
    changes: Counter[int] = field(default_factory=Counter)
    """By position: references there, less those at the position before."""

    def joined(self, later: _Part) -> _Part:
        """The counts of both; `later` are the requests that follow."""
        changes = self.changes.copy()
        changes.update(later.changes)
        sums = (self.requests + later.requests, self.tokens + later.tokens)
        return _Part(*sums, self.references + later.references, changes)

    def curve(self) -> HitCurve:
        starts, below, slopes = [], [], []
        slope = count = before = 0
        for position in sorted(self.changes):
            change = self.changes[position]
            if change:
                count += slope * (position - before)
                slope += change
                before = position
                starts.append(position)
                below.append(count)
                slopes.append(slope)
        return HitCurve(self.requests, self.tokens, self.references, starts, below, slopes)


class _Parts:
    """Counts of a trace of unknown length in 8 to 16 parts of equal numbers of requests: two
    neighbours merge when there are too many."""

    def __init__(self) -> None:
        self._done: list[_Part] = []
        self._length = 1
        self._now = _Part()

    def add(self, request: TraceRequest, stack: PrefixStack) -> None:
        now = self._now
        now.requests += 1
        now.tokens += request.input_length
        now.references += len(request.blocks)
        if now.requests == self._length:
            self._end(stack)

    def _end(self, stack: PrefixStack) -> None:
        self._now.changes = stack.take_changes()
        self._done.append(self._now)
        self._now = _Part()
        if len(self._done) == _PARTS:
            pairs = zip(self._done[::2], self._done[1::2], strict=True)
            self._done = [first.joined(second) for first, second in pairs]
            self._length *= 2

    def halves(self, stack: PrefixStack) -> tuple[_Part, _Part]:
        """The two halves, which differ by no more than a part."""
        if self._now.requests:
            self._end(stack)
        total = sum(part.requests for part in self._done)
        first, second = _Part(), _Part()
        for part in self._done:
            if not second.requests and 2 * first.requests + part.requests <= total:
                first = first.joined(part)
            else:
                second = second.joined(part)
        return first, second


def measure(requests: Iterable[TraceRequest], block_tokens: int, second_use: bool = True) -> Curves:
    """Measure a trace's curves in one pass. Blocks of answers are stored where they were recorded.
    Raises TraceError, from the trace or where ids do not stand for whole prefixes."""
    every, later = PrefixStack(), PrefixStack()
    parts = _Parts()
    for request in requests:
        blocks, prompt = request.blocks, None
        if request.answer_blocks:
            blocks, prompt = [*blocks, *request.answer_blocks], len(blocks)
        known = every.touch(blocks, counted=prompt)
        if second_use:
            later.touch(blocks, known, prompt)
        parts.add(request, every)
    first, second = parts.halves(every)
    total = first.joined(second)
    return Curves(
        block_tokens,
        total.curve(),
        replace(total, changes=later.take_changes()).curve() if second_use else None,
        (first.curve(), second.curve()) if second.requests else None,
        len(every),
    )
