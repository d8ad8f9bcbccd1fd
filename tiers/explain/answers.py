"""What the tiers answered of a request, and their parts of its load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tiers.connector.contract.messages import NO_TIMES, LoadTimes
from tiers.connector.contract.protocols import Request

Reasons = Mapping[int, Callable[[Request], str]]
"""Of children that say why they cover no block of a request: what to ask them."""

RawAnswer = tuple[int, range, Sequence[int], float]
"""A child, the blocks that it was asked for, how much it has of each, and seconds."""


class TierAnswer(NamedTuple):
    """What a child had of the blocks it was asked for. `miss`: the first block it lacks, or None.
    `seconds`: until it answered. `why`: why it has nothing, where that is no mere miss."""

    child: int
    first: int
    asked: int
    held: int
    miss: int | None
    seconds: float
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


def count_answers(raw: Sequence[RawAnswer], request: Request, reasons: Reasons) -> list[TierAnswer]:
    """What the raw answers come to, for each child that was asked."""
    answers: dict[int, TierAnswer] = {}
    for child, blocks, held, seconds in raw:
        count, miss = _held(blocks, held)
        before = answers.get(child)
        if before is None:
            reason = reasons[child](request) if not count and child in reasons else ""
            answers[child] = TierAnswer(
                child, blocks.start, len(held), count, miss, seconds, reason
            )
        else:
            _, first, asked, so_far, first_miss, spent, reason = before
            answers[child] = TierAnswer(
                *(child, first, asked + len(held), so_far + count),
                *(miss if first_miss is None else first_miss, spent + seconds, reason),
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
