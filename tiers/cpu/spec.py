"""The CPU tier's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from spec.offloading import HostSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.cpu.residency import SlotResidency
    from tiers.host.slots import Slots


class CpuSpec(HostSpec):
    """Host memory of the engine's own machine: nothing is faster, and it goes with the engine."""

    is_trusted: ClassVar[bool] = True

    type: Literal["cpu"] = "cpu"
    eviction: Literal["lru", "arc", "s3fifo"] = Field(
        default="lru",
        description="Which block goes for room: the least recently used (lru); of those used once "
        "and those used again, as it pays (arc); one that was not used since it came (s3fifo).",
    )

    def residency(self, pool: Slots, max_slots: int) -> SlotResidency:
        """Keep `max_slots` blocks at most, chosen by the eviction policy."""
        from tiers.cpu.arc import ArcResidency
        from tiers.cpu.lru import LruResidency
        from tiers.cpu.s3fifo import S3FifoResidency

        policies: dict[str, Callable[[Slots, int], SlotResidency]]
        policies = {"lru": LruResidency, "arc": ArcResidency, "s3fifo": S3FifoResidency}
        return policies[self.eviction](pool, max_slots)
