"""Counters by tier name. Everything is a sum, so ranks and intervals add up."""

from __future__ import annotations

from typing import Any

Counters = dict[str, float]

COUNTERS = {
    "lookups": "Lookups answered by the tier.",
    "hits": "Lookups that found at least one block.",
    "loaded_tokens": "Prompt tokens whose KV came from the tier.",
    "loaded_blocks": "Blocks loaded and verified.",
    "loaded_bytes": "Bytes loaded.",
    "load_seconds": "Seconds spent loading, summed over loads.",
    "load_failures": "Blocks found but not loaded; the engine recomputes them.",
    "stored_blocks": "Blocks stored.",
    "stored_bytes": "Bytes stored.",
    "store_seconds": "Seconds spent storing, summed over stores.",
    "store_failures": "Blocks the tier did not store.",
    "store_dropped": "Blocks not offered to the tier because no slot was free or it lagged behind.",
    "evictions": "Blocks given up for room, where the tier tells: of ours, cpu does.",
    "tier_failures": "Operations of the tier that failed.",
}
"""Every counter a tier has, and what it counts."""


def add_counters(into: Counters, other: Counters) -> None:
    """Add each counter of `other` to `into`."""
    for name, value in other.items():
        into[name] = into.get(name, 0) + value


class TierStats:
    """Counters of an interval, grouped by tier name: `{tier: {counter: value}}`."""

    def __init__(self, data: dict[str, Counters] | None = None) -> None:
        self.data: dict[str, Counters] = data if data is not None else {}

    def add(self, tier: str, **counters: float) -> None:
        """Count for one tier; names are those of `COUNTERS`."""
        add_counters(self.data.setdefault(tier, {}), counters)

    def aggregate(self, other: TierStats) -> TierStats:
        """Add another interval's or rank's counters; returns itself."""
        for tier, counters in other.data.items():
            add_counters(self.data.setdefault(tier, {}), counters)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in one flat line for a log: `{"disk.loaded_tokens": 896, ...}`."""
        return {
            f"{tier}.{name}": round(value, 6)
            for tier, counters in self.data.items()
            for name, value in counters.items()
            if value
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(value for counters in self.data.values() for value in counters.values())

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = {}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that any serialiser takes."""
        return self.data

    def __getitem__(self, tier: str) -> Counters:
        return self.data[tier]
