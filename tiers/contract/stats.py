"""Which metrics are there? The counters, gauges and histograms of a tier, collected by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spec.fields import format_size

Measures = dict[str, float | list[float]]
"""The measures of an interval: a counter's sum, a gauge's last value, a histogram's samples."""

COUNTERS = {
    "lookups": "Requests that looked the tier up, each counted once, when it begins to run.",
    "lookup_timeouts": "Requests whose first lookup was given up: the tier hangs, or is asked more "
    "than it can answer.",
    "hits": "Requests that looked the tier up and loaded at least one block from it.",
    "hit_tokens": "Tokens that hits were to load; the sum over all tiers is the engine's external "
    "hits.",
    "loaded_tokens": "Prompt tokens whose KV was loaded from the tier in time.",
    "reloaded_tokens": "The same of requests that were preempted, tokens of their answers too.",
    "recompute_preferred": "Requests that computed what the tier held, because the tier was "
    "slower.",
    "recompute_preferred_engine": "Requests that computed what the tier held, because the engine "
    "takes more beside a load (load_engine_seconds) than the tier would save.",
    "recompute_late": "Requests that computed what the tier held, because a load could not end "
    "within max_wait.",
    "loaded_blocks": "Blocks loaded and verified; of several ranks each one's part.",
    "loaded_bytes": "Bytes loaded.",
    "warmed_blocks": "Blocks loaded into host memory when the engine had started (warm).",
    "load_timeouts": "Loads that a rank gave up, or did not begin, since they could not end within "
    "max_wait or before computing; of several ranks each one's.",
    "load_failures": "Blocks found but not loaded, of several ranks each one's part; the engine "
    "recomputes them.",
    "damaged_blocks": "Blocks that failed verification, of several ranks each one's part; they are "
    "never served.",
    "store_taken": "Blocks that the tier took to store, of several ranks once; with the dropped "
    "ones, those that it was offered and lacked.",
    "stored_blocks": "Blocks sent to the tier and stored; of several ranks each one's part.",
    "stored_bytes": "Bytes of those.",
    "renewed_blocks": "Blocks to store that the tier had already: they are not sent, their time to "
    "live begins anew.",
    "renewed_bytes": "Bytes of those.",
    "store_failures": "Blocks that the tier took but did not store; of several ranks each one's "
    "part.",
    "store_dropped_no_slot": "Blocks not stored by the end of their request: no slot was free.",
    "store_dropped_inflight": "Blocks not stored by the end of their request: max_inflight was "
    "reached.",
    "store_dropped_budget": "Blocks not stored because write_budget was spent.",
    "store_dropped_down": "Blocks not stored because the tier was down.",
    "store_deferred": "Blocks not stored because fewer requests than store_threshold had them.",
    "retain_refused": "Blocks that a hint did not pin: max_retained was reached, or too many "
    "hints waited.",
    "demoted_blocks": "Blocks that a hint made the next to be evicted.",
    "demote_refused": "Blocks that a hint did not demote because too many hints waited.",
    "prompt_tokens": "Tokens of the prompts that began to run; its tier is (chain).",
    "hints_ignored": "Hints that are malformed or unknown; their tier is (chain).",
    "media_timeouts": "Requests computed without tiers since their images, audio or video were not "
    "digested in time; their tier is (chain).",
    "other_weights": "Requests of which nothing is stored, since a part of their KV comes from a "
    "node of other weights, or of weights that are not known; their tier is (chain).",
    "outdated_requests": "Requests of which nothing is stored, since they began with blocks that "
    "the engine's own cache kept over a change of weights or a reset; their tier is (chain).",
    "evictions": "Blocks that this engine evicted for room, from cpu or disk; of a disk each "
    "rank's part. A server evicts by itself.",
    "events_not_kept": "Blocks of KV events that will not be announced again after a restart: they "
    "came too fast, found no room, or their folder failed.",
    "tier_failures": "Operations of the tier that failed, on any rank or in the scheduler.",
    "recorded_requests": "Requests that record wrote; its tier is (chain), the chain itself.",
    "record_dropped": "Requests that record could not write, or not in time; its tier is (chain).",
    "tenant_hit_tokens": "hit_tokens of all tiers, by tenant.",
    "tenant_loaded_tokens": "loaded_tokens of all tiers, by tenant: tokens that were not computed.",
    "tenant_loaded_bytes": "loaded_bytes of all tiers, by tenant.",
    "tenant_stored_bytes": "stored_bytes of all tiers, by tenant; of a block that several asked "
    "for, the first.",
    "tenant_prefill_seconds": "Seconds that computing what was loaded, reloaded_tokens too, would "
    "have taken, at the rate measured then. Less tenant_load_seconds it is what the tiers have "
    "saved.",
    "tenant_load_seconds": "Seconds that the tenant's requests waited for their loads.",
}
"""Every counter of a tier, and what it counts. Values of ranks and intervals are added."""

GAUGES = {
    "reads_up": "1 if the last read succeeded, 0 while the read circuit breaker is open.",
    "writes_up": "1 if the last write succeeded, 0 while the write circuit breaker is open.",
    "load_latency_seconds": "Fixed time of a load, as measured.",
    "load_engine_seconds": "Least time that the engine took to order a load and to go on with its "
    "request, beside the load itself.",
    "load_tokens_per_second": "Rate of a load after its fixed time, as measured.",
    "prefill_tokens_per_second": "Rate at which the engine computes prompts, as measured.",
    "loading_jobs": "Loads in flight, waiting ones included, after the last step.",
    "loading_bytes": "Bytes of the loads in flight, over all ranks.",
    "storing_jobs": "Stores in flight, waiting ones included, after the last step.",
    "storing_bytes": "Bytes of the stores in flight, over all ranks.",
    "capacity_bytes": "Bytes that the tier may hold; 0: no bound of ours, or it is not counted.",
    "used_bytes": "Bytes that its blocks take, in host memory or in its folder; 0 where a server "
    "or a directory of several hosts holds them.",
    "shared": "1 where engines may share the tier's place, of which each shows all in used_bytes; "
    "0: it is in host memory of its own.",
    "retained_blocks": "Blocks that hints pin.",
    "ghost_hit_ratio": "Part of the prompts' blocks that the tier would have, as ghosts estimate; "
    "its tier is a tier as it is, or with other settings: cpu (capacity: 2x).",
    "ghost_hit_error": "Twice the standard error of ghost_hit_ratio.",
    "ghost_store_ratio": "Blocks that the tier would store, for each block of a prompt.",
}
"""Every gauge of a tier; only the scheduler half sets them."""

_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(1 << power) for power in range(16, 33, 2))

HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "lookup_seconds": (
        "Seconds that the tier took to answer about a request; of a lookup that was given up, "
        "until then.",
        (1e-5, 3e-5, *_SECONDS),
    ),
    "lookup_notice_seconds": (
        "Seconds for which the answer was there, and waited for a step of the engine.",
        (1e-5, 3e-5, *_SECONDS),
    ),
    "load_seconds": ("Seconds of a load on one rank.", _SECONDS),
    "load_size_bytes": ("Bytes of a load on one rank.", _BYTES),
    "store_seconds": ("Seconds of a store on one rank.", _SECONDS),
    "store_size_bytes": ("Bytes of a store on one rank.", _BYTES),
}
"""Every histogram of a tier: what is sampled, and the upper bounds of its buckets."""

STATES = ("opening", "open", "degraded", "down", "refused", "detached")
"""The states of a tier; its measure `STATE` is the place of one of them here."""

STATE = "tier_state"

STATE_MEANS = (
    "1 for the state of the tier, 0 for the others. opening: its first opening has not ended. "
    "open: it works. degraded: it works in part: reads or writes are down, on some rank perhaps, "
    "it can't hold its capacity, a Redis is full and evicts nothing, others may write to its "
    "folder, its policy has failed, the CUDA driver refuses batched copies, no process beside can "
    "be had, or a step of the engine failed. "
    "down: it does not work now and is tried again. refused: it can't be used as it is configured. "
    "detached: it was taken out of the chain."
)

CHAIN = "(chain)"
"""Stands for the chain itself where measures are named by tier; no tier can be called that."""

OF_CHAIN = frozenset(
    {
        "prompt_tokens",
        "hints_ignored",
        "media_timeouts",
        "other_weights",
        "outdated_requests",
        "recorded_requests",
        "record_dropped",
    }
)
"""Measures of the chain itself, under the tier name `CHAIN`."""

OF_TENANT = frozenset(name for name in COUNTERS if name.startswith("tenant_"))
"""Measures of all tiers for one tenant, whose sums over tenants are the tiers' sums."""

TENANT = "(tenant) "
"""Before a tenant's name where measures are named by tier."""

OTHER_TENANTS = "(other)"
"""Stands for the tenants without a name; none can be called that."""

LAST = GAUGES.keys() | {STATE}
"""Measures of which the last value counts."""

MEASURES = COUNTERS.keys() | LAST | HISTOGRAMS.keys()
"""All their names."""


def merge(into: Measures, later: Mapping[str, float | list[float]]) -> None:
    """Merge the measures of another rank, or of a later interval, into `into`."""
    for name, value in later.items():
        before = into.get(name)
        if isinstance(value, list):
            if isinstance(before, list):
                before += value  # `into` owns it; thousands of stores may end in one step
            else:
                into[name] = list(value)
        elif before is None or name in LAST or isinstance(before, list):
            into[name] = value
        else:
            into[name] = before + value


def tokens_loaded(sums: Mapping[str, float]) -> float:
    """Tokens whose KV a tier loaded: those of `loaded_bytes`."""
    return sums.get("loaded_tokens", 0.0) + sums.get("reloaded_tokens", 0.0)


class TierStats:
    """Measures of an interval, grouped by tier name: `{tier: {measure: value}}`."""

    def __init__(self, data: dict[str, Measures] | None = None) -> None:
        self.data: dict[str, Measures] = data if data is not None else {}

    def add(self, tier: str, measures: Mapping[str, float | list[float]]) -> None:
        """Measure for one tier; names are those of `MEASURES`."""
        merge(self.data.setdefault(tier, {}), measures)

    def aggregate(self, other: TierStats) -> TierStats:
        """Add a later interval's or another rank's measures; returns itself."""
        for tier, measures in other.data.items():
            self.add(tier, measures)
        return self

    def reduce(self) -> dict[str, str]:
        """The interval for a log line, as one short text: `{"kvtiers": "disk: 896 tokens loaded"}`.

        A tier that moved nothing is left out, unless it does not work.
        """
        texts = {tier: ", ".join(_describe(measures)) for tier, measures in self.data.items()}
        tiers = [f"{tier}: {text}" for tier, text in texts.items() if text]
        return {"kvtiers": "; ".join(tiers) or "quiet"} if self.data else {}

    def is_empty(self) -> bool:
        """Whether nothing was measured; a gauge that fell to zero was."""
        return not any(
            value or name in LAST
            for measures in self.data.values()
            for name, value in measures.items()
        )

    def reset(self) -> None:
        self.data = {}

    def __getitem__(self, tier: str) -> Measures:
        return self.data[tier]


def _describe(measures: Measures) -> Iterator[str]:
    """Describe one tier for a log line."""
    sums = {name: value for name, value in measures.items() if not isinstance(value, list)}
    state = STATES[int(sums.get(STATE, STATES.index("open")))]
    if state != "open":
        yield state
    if tokens := tokens_loaded(sums):
        yield f"{tokens:,.0f} tokens loaded"
    if blocks := sums.get("stored_blocks"):
        yield f"{blocks:,.0f} blocks stored ({format_size(int(sums.get('stored_bytes', 0)))})"
    dropped = sum(value for name, value in sums.items() if name.startswith("store_dropped_"))
    failed = sum(sums.get(name, 0) for name in ("load_failures", "store_failures"))
    for count, what in (
        (dropped, "dropped"),
        (failed, "failed"),
        (sums.get("evictions"), "evicted"),
    ):
        if count:
            yield f"{count:,.0f} blocks {what}"
