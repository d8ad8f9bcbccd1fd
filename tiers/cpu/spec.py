"""The CPU tier's settings."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from spec.offloading import HostSpec
from spec.policies import EvictionName
from tiers.cpu.eviction import make_eviction
from tiers.cpu.residency import SlotResidency
from tiers.host.slots import SlotPool


class CpuSpec(HostSpec):
    """Host memory of the engine's machine: the fastest tier, lost when the engine ends."""

    resizes: ClassVar[bool] = True

    type: Literal["cpu"] = "cpu"
    eviction: EvictionName = Field(
        default="lru",
        description="Choose the block to evict. lru: the least recently used. arc: one used once "
        "or one used again, whichever kind has paid less; for a tier that is small beside the "
        "traffic. Or a policy that a package provides (docs/policies.md).",
    )

    def residency(self, pool: SlotPool, max_slots: int) -> SlotResidency:
        policy = make_eviction(self.eviction, max_slots, self.tier_name)
        return SlotResidency(pool, max_slots, policy)
