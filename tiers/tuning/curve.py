"""What would a cache of another size serve? The hit ratio of every size, in one pass.

Exact for LRU, where a request's blocks are touched head last: no difference from replaying the
trace through a cache of that size (`prefix_stack.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tiers.traces.trace import TraceRequest
from tiers.tuning.prefix_stack import PrefixStack

_PARTS = 16
_OFTEN = 1023
"""What is counted by requests is collected each time their number has none of these bits."""


@dataclass(frozen=True)
class HitCurve:
    """Hits against size in blocks, for one part of a trace under one rule of storing."""

    requests: int
    tokens: int
    """Prompt tokens of the requests."""
    references: int
    """Full blocks of their prompts."""
    largest: int | None
    """The size up to which it is exact; None: every size."""
    _starts: Sequence[int]
    """Positions from which on the number of references a position is another."""
    _below: Sequence[int]
    """References at positions below each of those."""
    _slopes: Sequence[int]
    """References at each position from there on."""

    def hits(self, size: int) -> int:
        """Blocks served by a cache of so many blocks. Raises ValueError beyond `largest`."""
        if self.largest is not None and size > self.largest:
            raise ValueError(f"the curve ends at {self.largest} blocks")
        at = bisect_right(self._starts, size) - 1
        if at < 0:
            return 0
        return self._below[at] + self._slopes[at] * (size - self._starts[at] + 1)

    def ratio(self, size: int) -> float:
        """The part of all full blocks that is served."""
        return self.hits(size) / self.references if self.references else 0.0

    @property
    def useful(self) -> int:
        """The smallest size that serves as much as any larger one (up to `largest`)."""
        return self._starts[-1] - 1 if self._starts else 0


@dataclass(frozen=True)
class Curves:
    """The curves of a trace."""

    block_tokens: int
    all: HitCurve
    """Every block is stored when it is first computed."""
    second_use: HitCurve | None
    """A block is stored when it is computed for the second time (`store_threshold: 2`)."""
    halves: tuple[HitCurve, HitCurve] | None
    """`all`, of the first and the second half of the requests; the second begins warm."""
    distinct: int | None
    """Different blocks, where no bound forbids to know them all."""


@dataclass
class _Part:
    """Counts of some requests in a row."""

    requests: int = 0
    tokens: int = 0
    references: int = 0
    changes: Counter[int] = field(default_factory=Counter)
    """By position: by how much more references are there than at the position before."""

    def joined(self, later: _Part) -> _Part:
        """The counts of both; `later` are the requests that follow."""
        changes = self.changes.copy()
        changes.update(later.changes)
        return _Part(
            self.requests + later.requests,
            self.tokens + later.tokens,
            self.references + later.references,
            changes,
        )

    def curve(self, largest: int | None) -> HitCurve:
        """The curve of these requests."""
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
        return HitCurve(self.requests, self.tokens, self.references, largest, starts, below, slopes)


class _Parts:
    """Counts of a trace of unknown length in 8 to 16 parts of equal numbers of requests: two
    neighbours become one when there are too many."""

    def __init__(self) -> None:
        self._done: list[_Part] = []
        self._length = 1
        self._now = _Part()

    def add(self, request: TraceRequest, stack: PrefixStack) -> None:
        """Count a request that the stack has just been told of."""
        now = self._now
        now.requests += 1
        now.tokens += request.input_length
        now.references += len(request.blocks)
        if now.requests == self._length:
            self._end(stack)
        elif not now.requests & _OFTEN:
            _collect(now.changes, stack)

    def _end(self, stack: PrefixStack) -> None:
        _collect(self._now.changes, stack)
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


def measure(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    largest: int | None = None,
    second_use: bool = True,
) -> Curves:
    """Measure a trace's curves in one pass. Blocks of answers are stored where they were recorded.

    `largest`: the largest size to ask for, in blocks. It bounds memory: to four times as many
    blocks, each with an integer and a reference to its request, and to the counts of 16 parts, of
    a number for each position at most. A block's first use is then forgotten when so many others
    were used since; without it all is remembered.

    Raises TraceError, from the trace or where ids do not stand for whole prefixes.
    """
    every, later = PrefixStack(largest), PrefixStack(largest)
    parts, changes = _Parts(), Counter[int]()
    for done, request in enumerate(requests, 1):
        _touch(request, every, later if second_use else None)
        parts.add(request, every)
        if not done & _OFTEN:
            _collect(changes, later)
    _collect(changes, later)
    first, second = parts.halves(every)
    total = first.joined(second)
    return Curves(
        block_tokens,
        total.curve(largest),
        replace(total, changes=changes).curve(largest) if second_use else None,
        (first.curve(largest), second.curve(largest)) if second.requests else None,
        len(every) if largest is None else None,
    )


def _touch(request: TraceRequest, every: PrefixStack, later: PrefixStack | None) -> None:
    blocks, prompt = request.blocks, None
    if request.answer_blocks:
        blocks, prompt = [*blocks, *request.answer_blocks], len(blocks)
    known = every.touch(blocks, counted=prompt)
    if later is not None:
        later.touch(blocks, known, prompt)


def _collect(changes: Counter[int], stack: PrefixStack) -> None:
    firsts, behinds = stack.positions()
    changes.update(firsts)
    changes.subtract(behinds)
