"""How tiers share the blocks of a prefix, so that the last of them comes soonest.

The rule of the load policy `stitched`, for the chain and for its simulation. Tiers are known
by their places in the chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Holders = tuple[int, ...]
"""The tiers that hold a block, in load-priority order."""
HeldRun = tuple[Holders, int]
"""Neighbouring blocks with the same holders, and how many they are."""
Piece = tuple[int, int]
"""Neighbouring blocks that one tier loads: the tier, and how many they are."""


class LoadPace(NamedTuple):
    """How soon a tier delivers: seconds until its first block could come, and for each block,
    which are more than 0."""

    ready: float
    each: float


def share(
    stretches: Sequence[HeldRun], paces: Mapping[int, LoadPace], last: Callable[[int], int]
) -> tuple[list[Piece], float]:
    """Share a prefix out so that its last block comes soonest: its pieces, and the seconds until
    then.

    Blocks that few hold are given out first, since the others can be had elsewhere. Of neighbours
    with the same holders each tier loads one row, in load-priority order, or by `last` where that
    differs.
    """
    totals: Counter[Holders] = Counter()
    for holders, count in stretches:
        totals[holders] += count
    paces = dict(paces)
    left: dict[Holders, dict[int, int]] = {}
    seconds = 0.0
    for holders in sorted(totals, key=len):
        left[holders] = fill({tier: paces[tier] for tier in holders}, totals[holders])
        for tier, count in left[holders].items():
            end = paces[tier].ready + count * paces[tier].each
            paces[tier] = LoadPace(end, paces[tier].each)
            seconds = max(seconds, end) if count else seconds
    pieces: list[Piece] = []
    for holders, count in stretches:
        mine = left[holders]
        for tier in sorted(mine, key=last):
            taken = min(count, mine[tier])
            mine[tier] -= taken
            count -= taken
            if taken:
                pieces.append((tier, taken))
    return pieces, seconds


def fill(paces: Mapping[int, LoadPace], count: int) -> dict[int, int]:
    """How many of `count` blocks each tier loads, so that all are there soonest.

    Those that begin first are filled up to a level, as with water; what rounding leaves is
    given, one by one, to whoever would deliver it first.
    """
    if len(paces) == 1:
        return dict.fromkeys(paces, count)
    busy: list[LoadPace] = []
    level = 0.0
    for pace in sorted(paces.values()):
        if busy and level <= pace.ready:
            break
        busy.append(pace)
        rate = sum(1 / link.each for link in busy)
        level = (count + sum(link.ready / link.each for link in busy)) / rate
    shares = {
        tier: max(0, min(count, int((level - pace.ready) / pace.each)))
        for tier, pace in paces.items()
    }
    for _ in range(count - sum(shares.values())):
        first = min(paces, key=lambda tier: _next(paces[tier], shares[tier]))
        shares[first] += 1
    return shares


def _next(pace: LoadPace, blocks: int) -> float:
    """When a tier that loads `blocks` would deliver one more."""
    return pace.ready + (blocks + 1) * pace.each
