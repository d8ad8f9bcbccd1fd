"""Exploration: small loads from a tier that loses, so that its speed stays known."""

from __future__ import annotations

SHARE = 0.01
"""Part of the requests' time that probes of one tier may cost."""
LONGEST = 16
"""Doublings of a probe's length, at most: no prompt has so many blocks."""


class Exploration:
    """When a tier that requests skip is probed again, and with how many blocks.

    Each request that skips the tier adds a part of its duration (`SHARE`) to the tier's probe
    budget; the tier is probed once the budget covers the probe. Probes double in length until the
    tier is used again, since few blocks say little of its bandwidth.
    """

    def __init__(self, least: int) -> None:
        """`least`: blocks of the shortest probe."""
        self.least = least
        self._made: dict[int, int] = {}
        self._earned: dict[int, float] = {}

    def length(self, tier: int) -> int:
        """Blocks that the next probe should have."""
        return self.least << self._made.get(tier, 0)

    def earn(self, tier: int, seconds: float) -> None:
        """A request that takes `seconds` skips the tier."""
        self._earned[tier] = self._earned.get(tier, 0.0) + SHARE * seconds

    def is_due(self, tier: int, cost: float) -> bool:
        """Whether the tier's budget covers a probe that costs `cost` seconds."""
        return cost <= self._earned.get(tier, 0.0)

    def made(self, tier: int) -> None:
        """A request probes."""
        self._made[tier] = min(LONGEST, self._made.get(tier, 0) + 1)
        self._earned.pop(tier, None)

    def shorten(self, tier: int) -> None:
        """Make the next probe the shortest again."""
        self._made.pop(tier, None)

    def measured(self, tier: int) -> None:
        """The tier is in use: it needs no probe."""
        self._made.pop(tier, None)
        self._earned.pop(tier, None)
