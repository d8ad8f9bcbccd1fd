"""Sizes worth trying for each medium.

They are the limit, or what holds all blocks that a trace asks for again if that is less, and then
halves. A size at which the curve of hit ratios is as high as at the next smaller one is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiers.tuning.search.budget import Budget

HALVES = 4
FLAT = 0.002
"""Two sizes whose hit ratios differ by less are one; the smaller stands for both."""
SPARE = 1.1
"""Blocks on their way take room too: what is flat for the curve is taken this much larger."""


def worth_trying(
    budget: Budget, hit_ratio: Callable[[int], float]
) -> Mapping[str, tuple[int, ...]]:
    """The sizes of each medium in bytes, the largest first. `hit_ratio`: of an LRU of so many
    bytes, over the trace."""
    return {
        medium.type: _sizes(medium.limit, budget.machine.tiers[medium.type].stored_share, hit_ratio)
        for medium in budget.media
    }


def _sizes(limit: int, stored_share: float, hit_ratio: Callable[[int], float]) -> tuple[int, ...]:
    def ratio(size: int) -> float:
        return hit_ratio(int(size / stored_share))

    top = _round(_flat_from(limit, ratio)) if ratio(limit) - ratio(limit // 2) < FLAT else limit
    sizes = [min(limit, top)]
    for half in range(1, HALVES + 1):
        size = _round(sizes[0] / 2**half)
        if size < sizes[-1] and ratio(sizes[-1]) - ratio(size) >= FLAT:
            sizes.append(size)
    return tuple(sizes)


def _flat_from(limit: int, ratio: Callable[[int], float]) -> float:
    """The least size with a hit ratio as good as the limit's, and some more."""
    full, low, high = ratio(limit) - FLAT, 0, limit
    while high - low > limit / 64:
        middle = (low + high) // 2
        low, high = (low, middle) if ratio(middle) >= full else (middle, high)
    return high * SPARE


def _round(size: float) -> int:
    """A size as people write it: two digits of GB or more, else of MB."""
    unit = 10**9 if size >= 10**10 else 10**6 if size >= 10**7 else 10**3
    count = size / unit
    digits = 10 ** max(0, len(str(int(count))) - 2)
    return max(1, round(count / digits) * digits) * unit if size >= 10**4 else max(1, int(size))
