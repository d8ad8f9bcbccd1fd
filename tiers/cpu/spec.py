"""The CPU tier's settings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from spec.offloading import HostSpec
from tiers.cpu.residency import ArcResidency, LruResidency, SlotResidency
from tiers.host.slots import Slots


def _as_eviction(value: object) -> object:
    if value == "s3fifo":
        raise ValueError("write eviction: arc, which serves as much or more where room is short")
    return value


class CpuSpec(HostSpec):
    """Host memory of the engine's machine: the fastest tier, lost when the engine ends."""

    is_trusted: ClassVar[bool] = True

    type: Literal["cpu"] = "cpu"
    eviction: Annotated[Literal["lru", "arc"], BeforeValidator(_as_eviction)] = Field(
        default="lru",
        description="Choose the block to evict. lru: the least recently used. arc: one used once "
        "or one used again, whichever kind has paid less; for a tier that is small beside the "
        "traffic.",
    )

    def residency(self, pool: Slots, max_slots: int) -> SlotResidency:
        """Keep `max_slots` blocks at most, chosen by the eviction policy."""
        policy = ArcResidency if self.eviction == "arc" else LruResidency
        return policy(pool, max_slots)
