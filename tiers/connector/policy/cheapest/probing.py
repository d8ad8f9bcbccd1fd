"""Exploration: small loads from a tier that loses, so that its speed stays known."""

from __future__ import annotations

SHARE = 0.02
"""Part of the requests' time that probes of one tier may cost."""
COMPUTING = -1
"""Stands among the children for the engine itself, whose computing is probed in the same way."""


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

    def length(self, child: int) -> int:
        """Blocks that the next probe should have."""
        return self.least << self._made.get(child, 0)

    def earn(self, child: int, seconds: float) -> None:
        """A request that takes `seconds` skips the tier."""
        self._earned[child] = self._earned.get(child, 0.0) + SHARE * seconds

    def is_due(self, child: int, cost: float) -> bool:
        """Whether the tier's budget covers a probe that costs `cost` seconds."""
        return cost <= self._earned.get(child, 0.0)

    def made(self, child: int) -> None:
        """A request probes."""
        self._made[child] = self._made.get(child, 0) + 1
        self._earned.pop(child, None)

    def shorten(self, child: int) -> None:
        """Make the next probe the shortest again."""
        self._made.pop(child, None)

    def rest(self, child: int) -> None:
        """Empty the budget: the tier was measured without a probe."""
        self._earned.pop(child, None)

    def measured(self, child: int) -> None:
        """The tier is in use: it needs no probe."""
        self._made.pop(child, None)
        self._earned.pop(child, None)
