"""Sizes worth trying for each medium: the most, and its halves.

The most is the limit, or what an LRU needs to serve all that any cache could serve of the requests
that are searched. The curve is flat from there on for every policy. A curve that is flat somewhere
below says nothing: it is LRU's, and ARC or a store threshold may use that room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiers.tuning.curve import Curves, HitCurve
from tiers.tuning.search.budget import Budget

HALVES = 4
FLAT = 0.002
"""Hit ratios that differ by less are alike."""
SPARE = 1.1
"""Blocks on their way take room too: what suffices by the curve is taken this much larger."""
GROWS = 1.25
"""A trace grows if all of it needs so many times the room that its first half does."""
SETTLED = 0.1
"""It grows as well if its second half would have so much more of its blocks than the first."""
ALL = 1 << 62
"""More bytes than any trace has."""


class Demand:
    """What requests would have of a cache, by their `curves`; a block has `block_bytes`."""

    def __init__(self, curves: Curves, block_bytes: int) -> None:
        self._curves = curves
        self._block_bytes = block_bytes

    def hit_ratio(self, size: int) -> float:
        """Of an LRU of so many bytes."""
        return self._curves.all.ratio(size // self._block_bytes)

    @property
    def growth(self) -> str | None:
        """Why what would be reused after the requests is more than these show; None: it is not."""
        if self._curves.halves is None:
            return None
        early, late = self._curves.halves
        needs = [self._needs(curve) for curve in (early, self._curves.all)]
        if needs[1] > GROWS * needs[0]:
            return f"all of it needs {needs[1] / needs[0]:.1f} times the room of its first half"
        shares = [curve.ratio(curve.useful) for curve in (early, late)]
        if shares[1] > shares[0] + SETTLED and early.useful < late.useful:
            return (
                f"{shares[0]:.0%} of its first half could be served, {shares[1]:.0%} of its second"
            )
        return None

    def _needs(self, curve: HitCurve) -> int:
        """Blocks that serve all that can be served."""
        return max(1, _least(curve.useful or 1, curve.ratio))


def worth_trying(
    budget: Budget, hit_ratio: Callable[[int], float]
) -> Mapping[str, tuple[int, ...]]:
    """The sizes of each medium in bytes, the largest first. `hit_ratio`: of an LRU of so many
    bytes, over the requests that are searched."""
    return {
        medium.type: _sizes(medium.limit, budget.machine.tiers[medium.type].stored_share, hit_ratio)
        for medium in budget.media
    }


def _sizes(limit: int, stored_share: float, hit_ratio: Callable[[int], float]) -> tuple[int, ...]:
    def ratio(size: int) -> float:
        return hit_ratio(int(size / stored_share))

    top = min(limit, _round(SPARE * _least(limit, ratio)))
    halves = [_round(top / 2**half) for half in range(1, HALVES + 1)]
    return (top, *dict.fromkeys(size for size in halves if size < top))


def _least(limit: int, ratio: Callable[[int], float]) -> int:
    """The least size that serves all that can be served, or the limit if that does not."""
    low, high, enough = 0, limit, ratio(ALL) - FLAT
    # To a part of what suffices, not of the limit, which may be thousands of times as much.
    while high - low > max(1, high / 64):
        middle = (low + high) // 2
        low, high = (low, middle) if ratio(middle) >= enough else (middle, high)
    return high


def _round(size: float) -> int:
    """A size as people write it: two digits of GB or more, else of MB."""
    unit = 10**9 if size >= 10**10 else 10**6 if size >= 10**7 else 10**3
    count = size / unit
    digits = 10 ** max(0, len(str(int(count))) - 2)
    return max(1, round(count / digits) * digits) * unit if size >= 10**4 else max(1, int(size))
