"""TierHealth: whether a tier can be read and written now."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tiers.contract.stats import STATE, STATES
from tiers.wrappers.guard import FAILED, Health

logger = logging.getLogger(__name__)


class TierHealth:
    """What this process and the workers know of one tier; used by the scheduler's thread alone."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._is_open = self._has_failed = False
        self._workers: dict[int, Health] = {}

    def opened(self) -> None:
        """The tier is open."""
        self._is_open = True

    def failed(self, reason: str) -> None:
        """The tier can't be used any more; the first `reason` is logged."""
        if not self._has_failed:
            line = "tier %r is unusable and the chain goes on without it: %s"
            logger.error(line, self._tier, reason)
        self.ended()

    def ended(self) -> None:
        """The tier is used no more."""
        self._has_failed = True

    def update(self, workers: Mapping[int, Health]) -> None:
        """Take in what workers, by rank, say of the tier."""
        self._workers.update(workers)

    @property
    def usable(self) -> bool:
        """Whether the tier is open, and nothing has made it unusable."""
        return self._is_open and not self._has_failed

    @property
    def is_settled(self) -> bool:
        """Whether opening the tier has ended, well or not."""
        return self._is_open or self._has_failed

    @property
    def reads(self) -> bool:
        """Whether the tier may be looked up. Not where a worker's loads would fail at once."""
        return self.usable and all(one.reads for one in self._workers.values())

    @property
    def writes(self) -> bool:
        """Whether every worker may store."""
        return all(one.writes for one in self._workers.values())

    def gauges(self, here: Health) -> dict[str, float]:
        """What `stats` tells of it. `here`: how this process finds it."""
        each = [here, *self._workers.values()] if self.usable else [FAILED]
        return {
            STATE: float(STATES.index(self._state(each))),
            "reads_up": float(all(one.reads_up for one in each)),
            "writes_up": float(all(one.writes_up for one in each)),
        }

    def _state(self, each: Sequence[Health]) -> str:
        if self._has_failed:
            return "refused"
        if not self._is_open or any(one.opening for one in each):
            return "opening"
        reads, writes = all(one.reads_up for one in each), all(one.writes_up for one in each)
        if not reads and not writes:
            return "down"
        return "open" if reads and writes and not any(one.is_short for one in each) else "degraded"
