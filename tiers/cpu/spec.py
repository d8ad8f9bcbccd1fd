"""The CPU tier's settings."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from spec.offloading import HostSpec
from tiers.cpu.residency import ArcResidency, LruResidency, SlotResidency
from tiers.host.slots import Slots


class CpuSpec(HostSpec):
    """Host memory of the engine's machine: the fastest tier, lost when the engine ends."""

    is_trusted: ClassVar[bool] = True
    resizes: ClassVar[bool] = True

    type: Literal["cpu"] = "cpu"
    eviction: Literal["lru", "arc"] = Field(
        default="lru",
        description="Choose the block to evict. lru: the least recently used. arc: one used once "
        "or one used again, whichever kind has paid less; for a tier that is small beside the "
        "traffic.",
    )

    def residency(self, pool: Slots, max_slots: int) -> SlotResidency:
        policy = ArcResidency if self.eviction == "arc" else LruResidency
        return policy(pool, max_slots)
