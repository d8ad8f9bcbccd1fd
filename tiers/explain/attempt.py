"""Attempt: what the scheduler notes while a request is decided and begins.

The scheduler's thread writes, and does as little as it can: it keeps what it has at hand, and
counts a tier's answers once, when the engine begins the request. Other threads read. They see an
attempt that is in flight as far as it has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tiers.contract.messages import NO_LOOKUP_TIMES, LoadTimes, LookupTimes
from tiers.contract.protocols import Request
from tiers.explain.tier_answers import Explained, LoadPart, RawAnswer, TierAnswer, count_answers

Coverage = Callable[[range], Sequence[int] | None]
"""How much of each of these blocks a child holds, zero for none; None: it is still looking."""


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

    def told(self, child: int, tokens: int | None) -> None:
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


class _Unnoted(Attempt):
    """Notes nothing."""

    __slots__ = ()

    def begin(self, tokens: int, cached: int, preempted: int) -> None:
        """Nothing is noted."""

    def watch(self, child: int, coverage: Coverage) -> Coverage:
        """Return the coverage as it is."""
        return coverage

    def asks_tiers(self, limits: Limits) -> None:
        """Nothing is noted."""

    def gives_up(self) -> None:
        """Nothing is noted."""

    def told(self, child: int, tokens: int | None) -> None:
        """Nothing is noted."""

    def joins(self, loader: str) -> None:
        """Nothing is noted."""

    def begins(
        self,
        choice: Decision,
        shares: Mapping[int, Sequence[range]],
        external: int,
        request: Request,
        tellers: Mapping[int, Explained],
    ) -> None:
        """Nothing is noted."""

    def part_ended(self, block: int, failed: int | None, lost: int, times: LoadTimes) -> None:
        """Nothing is noted."""

    def part_usable(self, block: int, blocks: int) -> None:
        """Nothing is noted."""


UNNOTED = _Unnoted()
"""Stands in for the attempt of a request of which nothing is noted."""
