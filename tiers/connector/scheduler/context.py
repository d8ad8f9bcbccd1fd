"""TierContext: what both halves of one tier's scheduler use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tiers.connector.policy.request_state import RequestState, RequestTable
from tiers.connector.scheduler.admission import Tenants
from tiers.connector.scheduler.jobs import Jobs
from tiers.connector.scheduler.kv_events import KVEvents
from tiers.connector.scheduler.open_tier import NOT_OPEN, OpenTier
from tiers.connector.scheduler.tier_health import TierHealth
from tiers.connector.scheduler.tier_request import TierRequest


class Count(Protocol):
    """Adds to a tier's measures; their names are those of `contract.stats`."""

    def __call__(self, **measures: float | list[float]) -> None: ...


@dataclass
class TierContext:
    """What loading and storing of one tier share; used by the scheduler's thread alone.

    `requests`: those of the chain. `promote`: whether loaded blocks are stored, too. `open`: the
    tier, once all workers are known; `NOT_OPEN` before, and where it can't be used.
    """

    tier: str
    requests: RequestTable
    promote: bool
    jobs: Jobs
    health: TierHealth
    tenants: Tenants
    kv_events: KVEvents
    count: Count
    open: OpenTier = NOT_OPEN

    def tier_request(self, request_state: RequestState) -> TierRequest:
        """What this tier keeps of a request."""
        tier_request = request_state.tiers.get(self.tier)
        if tier_request is None:
            tier_request = request_state.tiers[self.tier] = TierRequest(request_state)
        assert isinstance(tier_request, TierRequest)
        return tier_request
