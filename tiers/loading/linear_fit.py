"""LatencyModel: seconds by amount of work, fitted to recent samples."""

from __future__ import annotations

from typing import NamedTuple

KEEP = 0.7
"""Weight of all earlier samples when one comes in: the last three or so decide."""
REACH = 8.0
"""An outlier is clamped to this factor of the expected seconds; two in a row restart the fit."""


class LinearFit(NamedTuple):
    """Seconds = `fixed` + amount x `each`; neither is negative."""

    fixed: float
    each: float

    def seconds(self, amount: float) -> float:
        """Seconds for `amount`."""
        return self.fixed + amount * self.each


class LatencyModel:
    """A line through samples (amount, seconds); recent ones weigh most.

    The fit minimises the relative error (seconds per amount), since decisions compare ratios.
    Otherwise one large sample would outweigh many small ones that contradict it.
    """

    def __init__(self) -> None:
        self.line: LinearFit | None = None
        self._odd = False
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take in a sample: `amount`, more than 0, took `seconds`."""
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
        # Samples of nearly one size can't tell what is fixed.
        slope = (self._xy / self._weight - x * y) / spread if spread > 0.1 * x * x else 0.0
        # Neither part may be negative at the mean.
        fixed = min(max(slope, 0.0), y / x)
        return LinearFit(fixed, max(0.0, y - fixed * x))
