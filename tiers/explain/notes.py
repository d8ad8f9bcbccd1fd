"""Notes of a request while it is served; `accounts` makes sense of them.

The scheduler's thread writes, and does as little as it can: it keeps what it has at hand, and
counts a tier's answers once, when the engine begins the request. Other threads read. They see an
attempt that is in flight as far as it has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
    """A child that tells of its lookups."""

    def why_nothing(self, request: Request) -> str:
        """Why it covers no block of a request that is about to begin: a word of
        `accounts.REASONS`; empty: it was asked, and has none."""

    def lookup_times(self, request: Request) -> LookupTimes:
        """What its answers about a request that is about to begin took."""


class TierAnswer(NamedTuple):
    """What a child had of the blocks it was asked for. `miss`: the first block it lacks, or None.
    `times`: what its answers took. `why`: why it has nothing, where that is no mere miss."""

    child: int
    first: int
    asked: int
    held: int
    miss: int | None
    times: LookupTimes
    why: str = ""


class LoadPart:
    """One child's part of a load. `failed`: the first block that did not arrive; `usable`: leading
    blocks of the part that the engine can use, None until the whole load has ended."""

    __slots__ = ("child", "failed", "lost", "ranges", "seconds", "times", "usable")

    def __init__(self, child: int, ranges: Sequence[range]) -> None:
        self.child = child
        self.ranges = ranges
        self.failed: int | None = None
        self.lost = 0
        self.usable: int | None = None
        self.seconds: float | None = None
        self.times: LoadTimes = NO_TIMES

    @property
    def blocks(self) -> int:
        """How many blocks it was to load."""
        return sum(map(len, self.ranges))


class Limits(Protocol):
    """What a request says of its own loading."""

    max_load_tokens: int | None

    def may_load(self, tier: str) -> bool:
        """Whether any block may come from a tier."""
        ...


class Decision(Protocol):
    """What the load policy chose."""

    @property
    def child(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def passed(self) -> tuple[int, ...]: ...
    @property
    def probed(self) -> int | None: ...


class Attempt:
    """From the first question about a request to its first step, once for each time it begins.

    `tokens`: known then. `cached`: those that the engine had. `external`: those that it let us
    load. `started`: those it had when the request ran. Times are of `time.perf_counter`.
    """

    __slots__ = (
        *("_raw", "allocated", "answers", "asked", "asks", "cached", "choice", "external"),
        *("foreign", "joined", "limits", "loaded_at", "parts", "preempted", "spent", "started"),
        *("started_at", "tokens", "waits_for"),
    )

    def __init__(self) -> None:
        self.asked = time.perf_counter()
        self.asks = 0
        self.tokens = self.cached = self.external = 0
        self.preempted = 0
        self.spent = False
        self.limits: Limits | None = None
        self.choice: Decision | None = None
        self.answers: Sequence[TierAnswer] = ()
        self.foreign: dict[int, int | None] = {}
        self.parts: list[LoadPart] = []
        self.waits_for: str | None = None
        self.joined: float | None = None
        self.allocated: float | None = None
        self.loaded_at: float | None = None
        self.started: int | None = None
        self.started_at: float | None = None
        self._raw: list[RawAnswer] = []

    # -- while it is decided -----------------------------------------------------------------

    def begin(self, tokens: int, cached: int, preempted: int) -> None:
        """The engine asks, perhaps again."""
        self.asks += 1
        self.tokens, self.cached, self.preempted = tokens, cached, preempted

    def watch(self, child: int, coverage: Coverage) -> Coverage:
        """A coverage that notes what it answers."""

        def noted(blocks: range) -> Sequence[int] | None:
            held = coverage(blocks)
            if held is not None:
                self._raw.append((child, blocks, held))
            return held

        return noted

    def asks_tiers(self, limits: Limits) -> None:
        """The tiers are asked, perhaps again; what the request says of its own loading."""
        self.limits = limits
        self._raw.clear()

    def gives_up(self) -> None:
        """No tier is asked: the request may wait no more."""
        self.spent = True
        self._raw.clear()

    def reported(self, child: int, tokens: int | None) -> None:
        """A child that tells of no blocks, another connector of the engine, has so many tokens."""
        self.foreign[child] = tokens

    def joins(self, loader: str) -> None:
        """It waits for another request's load of the same blocks."""
        if self.joined is None:
            self.joined, self.waits_for = time.perf_counter(), loader

    def begins(
        self,
        choice: Decision,
        shares: Mapping[int, Sequence[range]],
        external: int,
        request: Request,
        tellers: Mapping[int, Explained],
    ) -> None:
        """The engine begins it. `tellers`: the children that tell of their lookups."""
        self.allocated = time.perf_counter()
        self.choice, self.external = choice, external
        self.parts = [LoadPart(child, ranges) for child, ranges in shares.items()]
        self.answers = count_answers(self._raw, request, tellers)
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
        for part in self.parts:
            if part.ranges[0].start == block:
                return part
        return None

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
        """It runs its first step, with so many tokens computed."""
        self.started, self.started_at = computed, time.perf_counter()


def _note_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for the members of an attempt that note."""


class _Unnoted(Attempt):
    """Notes nothing."""

    __slots__ = ()
    begin = asks_tiers = gives_up = reported = joins = begins = _note_nothing
    part_ended = part_usable = runs = _note_nothing

    def watch(self, child: int, coverage: Coverage) -> Coverage:
        """Return the coverage as it is."""
        return coverage


UNNOTED = _Unnoted()
"""Stands in for the attempt of a request of which nothing is noted."""


class RequestNotes:
    """All attempts of one request. `pending`: the one that is being decided. `hits`: tokens that
    each child was to load while the engine counted them; `external`: what it counted itself.
    `trace`: the trace context that came with the request. `ended`: how it ended,
    in the engine's word. `bytes`: about what it takes in memory, then."""

    __slots__ = (
        *("attempts", "began", "bytes", "ended", "ended_at", "external", "hits", "left_out"),
        *("pending", "prompt", "request_id", "trace"),
    )

    def __init__(
        self, request_id: str, prompt: int, trace: Mapping[str, str] | None = None
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.trace = trace
        self.began = time.time()
        self.attempts: list[Attempt] = []
        self.left_out = 0
        self.pending: Attempt | None = None
        self.hits: dict[int, int] = {}
        self.external = 0
        self.ended: str | None = None
        self.ended_at: float | None = None
        self.bytes = 0

    def add(self, attempt: Attempt) -> None:
        """An attempt is decided."""
        self.pending = None
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS:
            del self.attempts[MAX_ATTEMPTS // 2]
            self.left_out += 1

    def end(self, status: str) -> None:
        """The request has ended, as the engine says."""
        self.pending = None
        self.ended, self.ended_at = status, time.time()
        self.bytes = self._size()

    def _size(self) -> int:
        """About what it takes in memory, in bytes."""
        answers = sum(len(one.answers) + 2 * len(one.parts) for one in self.attempts)
        trace = 0 if self.trace is None else 512
        return 1000 + trace + 1100 * len(self.attempts) + 300 * answers


def count_answers(
    raw: Sequence[RawAnswer], request: Request, tellers: Mapping[int, Explained]
) -> list[TierAnswer]:
    """What the raw answers come to, for each child that was asked."""
    answers: dict[int, TierAnswer] = {}
    for child, blocks, held in raw:
        count, miss = _held(blocks, held)
        before = answers.get(child)
        if before is None:
            teller = tellers.get(child)
            times = teller.lookup_times(request) if teller else NO_LOOKUP_TIMES
            why = teller.why_nothing(request) if teller and not count else ""
            answers[child] = TierAnswer(child, blocks.start, len(held), count, miss, times, why)
        else:
            _, first, asked, so_far, first_miss, times, why = before
            answers[child] = TierAnswer(
                *(child, first, asked + len(held), so_far + count),
                *(miss if first_miss is None else first_miss, times, why),
            )
    return list(answers.values())


def _held(blocks: range, held: Sequence[int]) -> tuple[int, int | None]:
    """How many of the blocks are held, and the first that is not."""
    if all(held):
        return len(held), None
    if not any(held):
        return 0, blocks.start
    levels = bytes(held)  # a third of the time that a list's own count takes
    return len(levels) - levels.count(0), blocks.start + levels.index(0)
