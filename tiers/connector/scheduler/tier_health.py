"""TierHealth: whether a tier can be read and written now."""

from __future__ import annotations

from collections.abc import Mapping

from tiers.connector.scheduler.manager import TierManager
from tiers.wrappers.guard import Health


class TierHealth:
    """What this process and the workers know of one tier; used by the scheduler's thread alone."""

    def __init__(self) -> None:
        self._manager = TierManager()
        self._is_open = self._has_failed = False
        self._workers: dict[int, Health] = {}

    def opened(self, manager: TierManager) -> None:
        """The tier is open; `manager` knows how this process finds it."""
        self._manager, self._is_open = manager, True

    def failed(self) -> bool:
        """The tier can't be used any more; whether that is news."""
        is_new, self._has_failed = not self._has_failed, True
        return is_new

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

    def gauges(self) -> dict[str, float]:
        """What `stats` tells of it, once the tier is open."""
        if not self._is_open:
            return {}
        each = [self._manager.health(), *self._workers.values()]
        return {
            "reads_up": float(all(one.reads_up for one in each)),
            "writes_up": float(all(one.writes_up for one in each)),
        }
