"""Notes of a request while it is served; `accounts` makes sense of them.

The scheduler's thread writes, and does as little as it can: it keeps what it has at hand, and
counts a tier's answers once, when the engine begins the request. Other threads read. They see an
attempt that is in flight as far as it has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, NamedTuple, Protocol

from tiers.contract.messages import NO_LOOKUP_TIMES, NO_TIMES, LoadTimes, LookupTimes
from tiers.contract.protocols import Request

MAX_ATTEMPTS = 8
"""Attempts of a request that are kept; of more, the first and the last ones."""
RawAnswer = tuple[int, range, Sequence[int]]
"""A child, the blocks that it was asked for, and how much it has of each."""
Coverage = Callable[[range], Sequence[int] | None]
"""How much of each of these blocks a child holds, zero for none; None: it is still looking."""


class Explained(Protocol):
    """A child that describes its lookups."""

    def why_nothing(self, request: Request) -> str:
        """Why it covers no block of a request that is about to begin: a word of
        `accounts.REASONS`; empty: it was asked, and has none."""

    def lookup_times(self, request: Request) -> LookupTimes:
        """What its answers about a request that is about to begin took."""


class TierAnswer(NamedTuple):
    """What a child had of the blocks it was asked for. `miss`: the first that it does not hold, or
    None. `times`: what its answers took. `why`: why it has nothing, if not by a mere miss."""

    child: int
    first: int
    asked: int
    held: int
    miss: int | None
    times: LookupTimes
    why: str = ""


@dataclass(slots=True, eq=False)
class LoadPart:
    """One child's part of a load. `failed`: the first block that did not arrive; `usable`: leading
    blocks of the part that the engine can use, None until the whole load has ended."""

    child: int
    ranges: Sequence[range]
    failed: int | None = None
    lost: int = 0
    usable: int | None = None
    seconds: float | None = None
    times: LoadTimes = NO_TIMES

    @property
    def blocks(self) -> int:
        return sum(map(len, self.ranges))


class Decision(Protocol):
    """What the load policy chose."""

    @property
    def tokens(self) -> int | None: ...
    @property
    def passed(self) -> Mapping[int, str]: ...


@dataclass(slots=True, eq=False)
class Attempt:
    """From the first question about a request to its first step, once for each time it begins.

    `tokens`: known then. `cached`: those that the engine had. `external`: those that it let us
    load. `unanswered`: children that were asked and had no answer yet. `started`: tokens it had
    when the request ran. Times are of `time.perf_counter`.
    """

    asked: float = field(default_factory=time.perf_counter)
    asks: int = 0
    tokens: int = 0
    cached: int = 0
    external: int = 0
    preempted: int = 0
    limited: Container[str] = ()
    order: Container[int] | None = None
    choice: Decision | None = None
    answers: Sequence[TierAnswer] = ()
    unanswered: set[int] = field(default_factory=set)
    parts: list[LoadPart] = field(default_factory=list)
    waits_for: str | None = None
    joined: float | None = None
    allocated: float | None = None
    loaded_at: float | None = None
    started: int | None = None
    started_at: float | None = None
    _raw: list[RawAnswer] = field(default_factory=list)

    # -- while it is decided -----------------------------------------------------------------

    def begin(self, tokens: int, cached: int, preempted: int) -> None:
        """The engine asks, perhaps again."""
        self.asks += 1
        self.tokens, self.cached, self.preempted = tokens, cached, preempted

    def watch(self, child: int, coverage: Coverage) -> Coverage:
        """A coverage that notes what it answers."""

        def noted(blocks: range) -> Sequence[int] | None:
            held = coverage(blocks)
            if held is None:
                self.unanswered.add(child)
            else:
                self.unanswered.discard(child)
                self._raw.append((child, blocks, held))
            return held

        return noted

    def asks_tiers(self, limited: Container[str], order: Container[int]) -> None:
        """The tiers are asked, perhaps again. `limited`: the names of the children from which the
        request's own limits let no block come. `order`: those that load for any request."""
        self.limited, self.order = limited, order
        self.unanswered.clear()
        self._raw.clear()

    def joins(self, loader: str) -> None:
        """It waits for another request's load, of the same blocks or that leaves it no room."""
        if self.joined is None:
            self.joined, self.waits_for = time.perf_counter(), loader

    def begins(
        self,
        choice: Decision,
        shares: Mapping[int, Sequence[range]],
        external: int,
        request: Request,
        explained: Mapping[int, Explained],
    ) -> None:
        """The engine begins it. `explained`: the children that describe their lookups."""
        self.allocated = time.perf_counter()
        self.choice, self.external = choice, external
        self.parts = [LoadPart(child, ranges) for child, ranges in shares.items()]
        self.answers = count_answers(self._raw, request, explained)
        self._raw = []

    # -- while it loads ----------------------------------------------------------------------

    def part_ended(self, block: int, failed: int | None, lost: int, times: LoadTimes) -> None:
        """The part that begins with this block has ended on all ranks."""
        part = self._part(block)
        if part is not None:
            part.failed, part.lost, part.times = failed, lost, times
            part.seconds = time.perf_counter() - (self.allocated or 0.0)

    def part_usable(self, block: int, blocks: int) -> None:
        """So many leading blocks of that part are of use; all parts have ended."""
        part = self._part(block)
        if part is not None:
            part.usable = blocks
            self.loaded_at = time.perf_counter()

    def _part(self, block: int) -> LoadPart | None:
        return next((part for part in self.parts if part.ranges[0].start == block), None)

    @property
    def waited(self) -> float:
        """Seconds that it waited for tiers so far."""
        return self.looked_for.waited + self.joined_for + self.loaded_for

    @property
    def looked_for(self) -> LookupTimes:
        """What the lookup took of the tier that it waited for longest."""
        times = (answer.times for answer in self.answers)
        return max(times, key=lambda one: one.waited, default=NO_LOOKUP_TIMES)

    @property
    def joined_for(self) -> float:
        """Seconds that it waited for another request's load."""
        if self.joined is None or self.allocated is None:
            return 0.0
        return self.allocated - self.joined

    @property
    def loaded_for(self) -> float:
        """Seconds from the order of its load to its end on all ranks."""
        if self.loaded_at is None or self.allocated is None:
            return 0.0
        return self.loaded_at - self.allocated

    def runs(self, computed: int) -> None:
        """The request runs its first step; `computed` tokens are there."""
        self.started, self.started_at = computed, time.perf_counter()


def _note_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for the members of an attempt that note."""


class _Unnoted(Attempt):
    __slots__ = ()
    begin = asks_tiers = joins = begins = _note_nothing
    part_ended = part_usable = runs = _note_nothing

    def watch(self, child: int, coverage: Coverage) -> Coverage:
        return coverage


UNNOTED = _Unnoted()
"""Stands in for the attempt of a request of which nothing is noted."""


@dataclass(slots=True, eq=False)
class RequestNotes:
    """All attempts of one request. `pending`: the one that is being decided. `hits`: tokens that
    each child was to load while the engine counted them; `external`: what it counted itself.
    `trace`: the trace context that came with the request. `ended`: how it ended,
    in the engine's word. `bytes`: about what it takes in memory, then."""

    request_id: str
    prompt: int
    trace: Mapping[str, str] | None = None
    began: float = field(default_factory=time.time)
    attempts: list[Attempt] = field(default_factory=list)
    left_out: int = 0
    pending: Attempt | None = None
    hits: dict[int, int] = field(default_factory=dict)
    external: int = 0
    ended: str | None = None
    ended_at: float | None = None
    bytes: int = 0

    def add(self, attempt: Attempt) -> None:
        self.pending = None
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS:
            del self.attempts[MAX_ATTEMPTS // 2]
            self.left_out += 1

    def end(self, status: str) -> None:
        self.pending = None
        self.ended, self.ended_at = status, time.time()
        self.bytes = self._size()

    def _size(self) -> int:
        """About what it takes in memory, in bytes."""
        answers = sum(len(one.answers) + 2 * len(one.parts) for one in self.attempts)
        texts = sum(map(getsizeof, [self.request_id, *(self.trace or {}).values()]))
        trace = 0 if self.trace is None else 512
        return 1000 + texts + trace + 1100 * len(self.attempts) + 300 * answers


def count_answers(
    raw: Sequence[RawAnswer], request: Request, explained: Mapping[int, Explained]
) -> list[TierAnswer]:
    """What the raw answers come to, for each child that was asked."""
    answers: dict[int, TierAnswer] = {}
    for child, blocks, held in raw:
        levels = bytes(held)  # counted in a third of the time that a list takes
        gap = levels.find(0)
        count, miss = len(levels) - levels.count(0), None if gap < 0 else blocks.start + gap
        before = answers.get(child)
        if before is None:
            child_explained = explained.get(child)
            times = child_explained.lookup_times(request) if child_explained else NO_LOOKUP_TIMES
            why = child_explained.why_nothing(request) if child_explained and not count else ""
            answers[child] = TierAnswer(child, blocks.start, len(held), count, miss, times, why)
        else:
            answers[child] = before._replace(
                asked=before.asked + len(held),
                held=before.held + count,
                miss=miss if before.miss is None else before.miss,
            )
    return list(answers.values())
