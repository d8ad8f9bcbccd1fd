"""The CPU tier's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from spec.offloading import HostSpec
from tiers.cpu.arc import ArcResidency
from tiers.cpu.lru import LruResidency
from tiers.cpu.residency import SlotResidency
from tiers.cpu.s3fifo import S3FifoResidency
from tiers.host.slots import Slots


class CpuSpec(HostSpec):
    """Host memory of the engine's machine: the fastest tier, lost when the engine ends."""

    is_trusted: ClassVar[bool] = True

    type: Literal["cpu"] = "cpu"
    eviction: Literal["lru", "arc", "s3fifo"] = Field(
        default="lru",
        description="Choose the block to evict. lru: the least recently used. arc: one used once "
        "or one used again, whichever kind has paid less. s3fifo: one not used since it was "
        "stored.",
    )

    def residency(self, pool: Slots, max_slots: int) -> SlotResidency:
        """Keep `max_slots` blocks at most, chosen by the eviction policy."""
        policies: dict[str, Callable[[Slots, int], SlotResidency]]
        policies = {"lru": LruResidency, "arc": ArcResidency, "s3fifo": S3FifoResidency}
        return policies[self.eviction](pool, max_slots)
