"""TierContext: what both halves of one tier's scheduler use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.contract.generation import Generation
from tiers.connector.scheduler.jobs import Jobs
from tiers.connector.scheduler.kv_events import KVEvents
from tiers.connector.scheduler.requests import RequestTable
from tiers.connector.scheduler.tenant_quotas import Tenants
from tiers.connector.scheduler.tier_health import TierHealth


class Count(Protocol):
    """Adds to a tier's measures; their names are those of `contract.stats`."""

    def __call__(self, **measures: float | list[float]) -> None: ...


@dataclass(frozen=True)
class TierContext:
    """What loading and storing of one tier share; used by the scheduler's thread alone.

    `promote`: whether loaded blocks are stored, too.
    """

    engine: EngineInfo
    groups: BlockGroups
    generation: Generation
    promote: bool
    requests: RequestTable
    jobs: Jobs
    health: TierHealth
    tenants: Tenants
    kv_events: KVEvents
    count: Count
