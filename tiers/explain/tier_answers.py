"""What the tiers answered of a request, and their parts of its load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from tiers.contract.messages import NO_LOOKUP_TIMES, NO_TIMES, LoadTimes, LookupTimes
from tiers.contract.protocols import Request


class Explained(Protocol):
    """A child that tells of its lookups."""

    def why_nothing(self, request: Request) -> str:
        """Why it covers no block of a request that is about to begin: a word of
        `accounts.REASONS`; empty: it was asked, and has none."""

    def lookup_times(self, request: Request) -> LookupTimes:
        """What its answers about a request that is about to begin took."""


RawAnswer = tuple[int, range, Sequence[int]]
"""A child, the blocks that it was asked for, and how much it has of each."""


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
