"""Pace: how long an amount of work takes, learned from how long others took."""

from __future__ import annotations

from typing import NamedTuple

KEEP = 0.7
"""Weight of all earlier samples when one comes in: the last three or so decide."""
REACH = 8.0
"""A sample counts as so many times slower or faster than expected at most: one odd sample must not
condemn what is fast. With a second one as odd all before is forgotten."""


class LinearFit(NamedTuple):
    """Seconds = `fixed` + amount x `each`; neither is negative."""

    fixed: float
    each: float

    def seconds(self, amount: float) -> float:
        """How long that much takes."""
        return self.fixed + amount * self.each


class LatencyModel:
    """A line through recent samples (amount, seconds), the latest of which weigh most.

    It is fitted to seconds per amount, that is by relative error: decisions compare ratios, and
    a large sample would else outweigh any number of small ones that contradict it.
    """

    def __init__(self) -> None:
        self.line: LinearFit | None = None
        self._odd = False
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take in that so much (more than nothing) took so long."""
        expected = max(self.line.seconds(amount), 1e-9) if self.line is not None else seconds
        within = min(max(seconds, expected / REACH), expected * REACH)
        was_odd, self._odd = self._odd, within != seconds
        if was_odd and self._odd:
            self._weight = self._x = self._y = self._xx = self._xy = 0.0
        else:
            seconds = within
        x, y = 1 / amount, seconds / amount
        self._weight = KEEP * self._weight + 1
        self._x = KEEP * self._x + x
        self._y = KEEP * self._y + y
        self._xx = KEEP * self._xx + x * x
        self._xy = KEEP * self._xy + x * y
        self.line = self._fit()

    def _fit(self) -> LinearFit:
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        # Sizes that are nearly alike say nothing of what is fixed; noise would.
        slope = (self._xy / self._weight - x * y) / spread if spread > 0.1 * x * x else 0.0
        # No more may be fixed than leaves the mean something for each.
        fixed = min(max(slope, 0.0), y / x)
        return LinearFit(fixed, max(0.0, y - fixed * x))
