"""Tier: one tier as all parts of its scheduler know it, and the record it keeps of a request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.admission import Admission, Tenants
from tiers.connector.scheduler.kv_events import KVEvents
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.open_tier import NOT_OPEN, OpenTier
from tiers.contract.stats import STATE, STATES, TierStats
from tiers.wrappers.guard import FAILED, Health, warned

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreOrder:
    """Whether a store will evict a request's blocks from their tail.

    A store evicts last what was stored last. So a prefix that came in several steps is touched
    again, its first block last. After each step of a long answer that would take time by the square
    of its length: it is done when the prefix has doubled, and when the request has ended.
    """

    in_flight: int = 0
    """Jobs that are storing its blocks."""
    finished: bool = False
    """Whether the engine is done with the request."""
    stale: bool = False
    """Whether something was stored or loaded after blocks that precede it."""
    _touched: int = 0

    def ended(self, keys: int | None) -> None:
        """A job has ended. `keys`: how many it stored, if those were all keys so far and the store
        counts the first as used last; else None."""
        self.in_flight -= 1
        if keys is None:
            self.stale = True
        else:
            self._touched = keys

    def touch_due(self, keys: int) -> bool:
        """Whether to touch the first `keys` keys now."""
        over = self.finished and not self.in_flight
        if not self.stale or not (over or keys >= 2 * self._touched):
            return False
        self._touched, self.stale = keys, self.in_flight > 0
        return True


@dataclass(eq=False, slots=True)
class TierRequest:
    """What one tier keeps of a request; `request_state` is what the whole chain knows of it.

    `offered`: leading blocks that were offered for storing. `refused`: which keys of those found no
    room, and why (a counter's name). `cut`: why a block was refused for good, so that none behind
    it is stored. `recompute`: this tier failed to load it and is not asked
    again, so a request is loaded in vain once per tier at most. `answered`: whether any lookup was.
    `looked_up`, `hit`: whether it is counted among the tier's lookups and hits. `order`: that in
    which its blocks were stored. `lookup`: the answers of the tier.
    """

    request_state: RequestState
    offered: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    cut: str | None = None
    recompute: bool = False
    answered: bool = False
    looked_up: bool = False
    hit: bool = False
    order: StoreOrder = field(default_factory=StoreOrder)
    lookup: Lookup = field(default_factory=Lookup)

    @property
    def behind(self) -> str | None:
        """Why nothing more of the request is stored for now."""
        return self.cut or next(iter(self.refused.values()), None)


@dataclass(eq=False)
class Tier:
    """Whether one tier is open and works, its blocks' events and what was measured of it; used by
    the scheduler's thread alone.

    `requests`: those of the chain. `open`: `NOT_OPEN` until all workers are known, and where the
    tier can't be used. `stats`: measured since they were last taken.
    """

    name: str
    requests: RequestTable
    admission: Admission
    tenants: Tenants
    kv_events: KVEvents
    open: OpenTier = NOT_OPEN
    stats: TierStats = field(default_factory=TierStats)
    _is_open: bool = False
    _has_failed: bool = False
    _why_failed: str = ""
    _workers: dict[int, Health] = field(default_factory=dict)

    def request(self, request_state: RequestState) -> TierRequest:
        tier_request = request_state.tiers.get(self)
        if tier_request is None:
            tier_request = request_state.tiers[self] = TierRequest(request_state)
        assert isinstance(tier_request, TierRequest)
        return tier_request

    def count(self, **measures: float | list[float]) -> None:
        """Add to the tier's measures; their names are those of `contract.stats`."""
        self.stats.add(self.name, measures)

    def evicted(self, key: bytes) -> None:
        self.kv_events.evicted(key)
        self.tenants.forget((key,))

    def lost(self, keys: Sequence[bytes]) -> None:
        """These blocks turned out to be gone."""
        self.kv_events.lost(keys)
        self.tenants.forget(keys)

    # -- whether it works --------------------------------------------------------------------

    def opened(self, opened: OpenTier) -> None:
        self.open, self._is_open = opened, True
        self.kv_events.keep_in(opened.inventory)

    def failed(self, reason: str) -> None:
        """The tier can't be used any more; the first `reason` is logged."""
        if not self._has_failed:
            line = "tier %r is unusable and the chain goes on without it: %s"
            logger.error(line, self.name, reason)
            self._why_failed = reason
        self.ended()

    def ended(self) -> None:
        self._has_failed = True

    def update(self, workers: Mapping[int, Health]) -> None:
        """Take in what workers, by rank, report of the tier."""
        self._workers.update(workers)

    @property
    def usable(self) -> bool:
        """Whether the tier is open, and nothing has made it unusable."""
        return self._is_open and not self._has_failed

    @property
    def has_opened(self) -> bool:
        """Whether opening the tier has ended, well or not."""
        return self._is_open or self._has_failed

    @property
    def reads(self) -> bool:
        """Whether the tier may be looked up. Not where a worker's loads would fail at once."""
        return self.usable and all(worker.reads for worker in self._workers.values())

    @property
    def writes(self) -> bool:
        return all(worker.writes for worker in self._workers.values())

    def _health(self) -> list[Health]:
        """Its health as this process and each worker find it."""
        if not self.usable:
            return [FAILED]
        here = warned(self.admission.warning(), self.open.manager.health())
        return [here, *self._workers.values()]

    def condition(self) -> tuple[str, str]:
        """One of `STATES`, and the last error where that is not open. May be called by any thread;
        raises RuntimeError if a worker's first report comes meanwhile."""
        each = self._health()
        why = self._why_failed or next((health.why for health in each if health.why), "")
        return self._state(each), why

    def _state(self, each: Sequence[Health]) -> str:
        if self._has_failed:
            return "refused"
        return state_of(each) if self._is_open else "opening"

    def gauges(self) -> dict[str, float]:
        """The health that `stats` report of it."""
        each = self._health()
        return {
            STATE: float(STATES.index(self._state(each))),
            "reads_up": float(all(health.reads_up for health in each)),
            "writes_up": float(all(health.writes_up for health in each)),
        }


def state_of(each: Sequence[Health]) -> str:
    """One of `STATES`, of a tier that is open and has this health in each process."""
    reads = all(health.reads_up for health in each)
    writes = all(health.writes_up for health in each)
    if any(health.opening for health in each):
        return "opening"
    if not reads and not writes:
        return "down"
    is_whole = reads and writes and not any(health.is_degraded for health in each)
    return "open" if is_whole else "degraded"
