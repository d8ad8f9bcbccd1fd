"""The CPU tier's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from spec.offloading import HostSpec

if TYPE_CHECKING:
    from tiers.cpu.lru import LruResidency
    from tiers.pool import SlotPool


class CpuSpec(HostSpec):
    """Host memory of the engine's own machine: nothing is faster, and it goes with the engine."""

    type: Literal["cpu"] = "cpu"

    def residency(self, pool: SlotPool, max_slots: int) -> LruResidency:
        """Keep the most recently used blocks, `max_slots` at most."""
        from tiers.cpu.lru import LruResidency

        return LruResidency(pool, max_slots)
