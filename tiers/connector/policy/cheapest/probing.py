"""Probes: small transfers that keep the measurement of a tier alive which nothing else uses."""

from __future__ import annotations

SHARE = 0.02
"""Probes of a tier may cost this share of the time that requests take, all in all."""
COMPUTING = -1
"""Stands among the children for the engine itself, whose computing is probed in the same way."""


class Exploration:
    """When a tier that was passed over is tried again, and with how much.

    Each request that passes it over earns it a share of that request's time; it is probed once
    that pays for the probe. Probes double in length while they do not bring the tier back, for few
    blocks say little of its bandwidth.
    """

    def __init__(self, least: int) -> None:
        """`least`: blocks of the shortest probe."""
        self.least = least
        self._made: dict[int, int] = {}
        self._earned: dict[int, float] = {}

    def length(self, child: int) -> int:
        """Blocks that the next probe should have."""
        return self.least << self._made.get(child, 0)

    def earn(self, child: int, seconds: float) -> None:
        """A request that takes so long passes the tier over."""
        self._earned[child] = self._earned.get(child, 0.0) + SHARE * seconds

    def is_due(self, child: int, cost: float) -> bool:
        """Whether a probe that costs so many seconds is paid for."""
        return cost <= self._earned.get(child, 0.0)

    def made(self, child: int) -> None:
        """A request probes."""
        self._made[child] = self._made.get(child, 0) + 1
        self._earned.pop(child, None)

    def shorten(self, child: int) -> None:
        """Begin with the shortest again."""
        self._made.pop(child, None)

    def rest(self, child: int) -> None:
        """Begin to earn anew: it was measured by chance."""
        self._earned.pop(child, None)

    def measured(self, child: int) -> None:
        """What it is probed for is known without."""
        self._made.pop(child, None)
        self._earned.pop(child, None)
