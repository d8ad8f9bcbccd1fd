"""What the tiers measure, by tier name: counters, gauges and histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Measures = dict[str, float | list[float]]
"""Of an interval: a counter's sum, a gauge's last value, a histogram's samples."""

COUNTERS = {
    "lookups": "Requests that the tier was looked up for, each once, when it begins to run.",
    "hits": "Those of them that the tier then served, at least a block.",
    "hit_tokens": "Tokens that they were to load: of all tiers, the engine's own external hits.",
    "loaded_tokens": "Prompt tokens whose KV came from the tier: hits that arrived in time.",
    "recompute_preferred": "Requests that computed what the tier had of them: that was faster.",
    "loaded_blocks": "Blocks loaded and verified.",
    "loaded_bytes": "Bytes loaded.",
    "load_timeouts": "Loads given up on a rank since a request may not wait longer (max_wait).",
    "load_failures": "Blocks found but not loaded; the engine recomputes them.",
    "damaged_blocks": "Blocks that were not what had been stored, and never served.",
    "stored_blocks": "Blocks stored.",
    "stored_bytes": "Bytes stored.",
    "store_failures": "Blocks the tier did not store.",
    "store_dropped_no_slot": "Blocks not stored before their request ended: no slot was free.",
    "store_dropped_inflight": "Blocks not stored before their request ended: the tier lagged.",
    "store_dropped_budget": "Blocks not stored because the tier's write budget was spent.",
    "store_dropped_down": "Blocks not stored because the tier was down.",
    "store_deferred": "Blocks not stored because too few requests had them (store_threshold).",
    "evictions": "Blocks given up for room, where the tier tells: of ours, cpu does.",
    "tier_failures": "Operations of the tier that failed.",
}
"""Every counter a tier has, and what it counts. Sums: ranks and intervals add up."""

GAUGES = {
    "reads_up": "1, or 0 while the tier is not asked for blocks since that failed.",
    "writes_up": "1, or 0 while the tier is given no blocks since that failed.",
    "load_latency_seconds": "What a load takes besides its tokens, as it was measured.",
    "load_tokens_per_second": "How fast a load is, as it was measured.",
    "prefill_tokens_per_second": "How fast the engine computes prompts, under load: cheapest.",
    "loading_jobs": "Loads under way, those that wait among them, after the last step.",
    "loading_bytes": "Bytes of those loads, over all ranks.",
    "storing_jobs": "Stores under way, those that wait among them, after the last step.",
    "storing_bytes": "Bytes of those stores, over all ranks.",
}
"""Every gauge a tier has; only the scheduler half sets any."""

_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(1 << power) for power in range(16, 33, 2))

HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "lookup_seconds": (
        "From asking the tier what it has of a request to its answer.",
        (1e-5, 3e-5, *_SECONDS),
    ),
    "load_seconds": ("What a load took on one rank.", _SECONDS),
    "load_size_bytes": ("Bytes that a load brought on one rank.", _BYTES),
    "store_seconds": ("What a store took on one rank.", _SECONDS),
    "store_size_bytes": ("Bytes that a store took on one rank.", _BYTES),
}
"""Every histogram a tier has: what is sampled, and the upper bounds of its buckets."""

MEASURES = COUNTERS.keys() | GAUGES.keys() | HISTOGRAMS.keys()
"""The names of all of them."""


def merge(into: Measures, later: Mapping[str, float | list[float]]) -> None:
    """Take in what another rank, or a later interval, measured."""
    for name, value in later.items():
        before = into.get(name)
        if isinstance(value, list):
            into[name] = [*before, *value] if isinstance(before, list) else list(value)
        elif isinstance(before, int | float) and name not in GAUGES:
            into[name] = before + value
        else:
            into[name] = value


class TierStats:
    """Measures of an interval, grouped by tier name: `{tier: {measure: value}}`."""

    def __init__(self, data: dict[str, Measures] | None = None) -> None:
        self.data: dict[str, Measures] = data if data is not None else {}

    def add(self, tier: str, **measures: float | list[float]) -> None:
        """Measure for one tier; names are those of `MEASURES`."""
        merge(self.data.setdefault(tier, {}), measures)

    def aggregate(self, other: TierStats) -> TierStats:
        """Add a later interval's or another rank's measures; returns itself."""
        for tier, measures in other.data.items():
            self.add(tier, **measures)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in one flat line for a log: `{"disk.loaded_tokens": 896, ...}`.

        Of durations it has the mean and the longest; sizes it leaves to the metrics.
        """
        line: dict[str, int | float] = {}
        for tier, measures in self.data.items():
            for name, value in measures.items():
                if isinstance(value, list):
                    if value and name.endswith("_seconds"):
                        line[f"{tier}.{name}_mean"] = round(sum(value) / len(value), 6)
                        line[f"{tier}.{name}_max"] = round(max(value), 6)
                elif value:
                    line[f"{tier}.{name}"] = round(value, 6)
        return line

    def is_empty(self) -> bool:
        """Whether nothing was measured; a gauge that fell to zero was."""
        return not any(
            value or name in GAUGES
            for measures in self.data.values()
            for name, value in measures.items()
        )

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = {}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that any serialiser takes."""
        return self.data

    def __getitem__(self, tier: str) -> Measures:
        return self.data[tier]
