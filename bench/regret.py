"""What `tune` chooses on the first half of a trace beside chains by hand, judged on the second.

    python -m bench.regret TRACE --json FILE [--profile NAME ...] [--chains N] [--processes N]

With each profile of `PROFILES` and all three media, without a constraint and with a disk that
must last five years. Then every chain by hand has the write budget that gives it those years, and
those that break a constraint on the second half all the same are left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import in_lines
from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.chain_text import name
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.search import Split, score
from tiers.tuning.search.space import Space
from tiers.tuning.search.tune import TuneOptions, tune
from tiers.tuning.simulation.sim_chain import SimChain
from tiers.tuning.simulation.workload import Workload

HALF = 0.5
YEARS = 5.0
SETTINGS = {"disk": {"path": "/var/lib/kvtiers"}, "redis": {"url": "redis://cache.internal:6379/0"}}
LIMITS = {"cpu": "256GB", "disk": "4TB", "redis": "8TB"}
PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "healthy": {},
    "disk-3-redis-5": {
        "disk": {"load_bandwidth": "3GB/s", "store_bandwidth": "3GB/s"},
        "redis": {"load_bandwidth": "5GB/s", "store_bandwidth": "5GB/s"},
    },
    "disk-0.6-redis-10": {
        "disk": {"load_bandwidth": "600MB/s", "store_bandwidth": "600MB/s"},
        "redis": {"load_bandwidth": "10GB/s", "store_bandwidth": "10GB/s"},
    },
    "writes-queued": {
        "cpu": {"store_bandwidth": "4GB/s"},
        "disk": {"store_bandwidth": "1GB/s", "shared_link": True},
        "redis": {"store_bandwidth": "1GB/s", "shared_link": True},
    },
}
HEALTHY = {
    "cpu": {"load_bandwidth": "20GB/s", "store_bandwidth": "20GB/s", "price_per_gb_month": 3},
    "disk": {
        "load_bandwidth": "5GB/s",
        "store_bandwidth": "5GB/s",
        "price_per_gb_month": 0.1,
        "endurance": "14PB",
    },
    "redis": {"load_bandwidth": "2GB/s", "store_bandwidth": "2GB/s", "price_per_gb_month": 1},
}
HAND = [
    "cpu", "cpu:2", "cpu arc", "disk", "redis", "cpu, disk", "cpu, disk:2", "cpu arc, disk:2",
    "cpu, redis", "cpu, redis:2", "disk, cpu", "cpu, disk, redis", "cpu, redis, disk",
    "cpu, disk, redis; longest", "cpu, disk, redis; no promotion", "cpu, disk, redis:2",
    "cpu, disk:2, redis:2", "cpu arc, disk:2, redis:2",
]  # fmt: skip
"""Chains as an operator would write them: tiers in order, with :N a store threshold; then what
differs from `stitched` with promotion."""


def given(profile: str, years: float | None) -> Budget:
    """All three media."""
    links: dict[str, Any] = {k: HEALTHY[k] | PROFILES[profile].get(k, {}) for k in LIMITS}
    media = [{"type": k, "limit": LIMITS[k], "settings": SETTINGS.get(k, {})} for k in LIMITS]
    machine = {
        "kv_bytes_per_token": 131072,
        "engine_cache": "40GB",
        "prefill_rate": 20000,
        "gpus": 4,
        "tiers": links,
    }
    limits = {} if years is None else {"life_years": years}
    return Budget.model_validate({"media": media, "machine": machine, "constraints": limits})


def by_hand(text: str, space: Space) -> SimChain:
    """A chain from its line in `HAND`; sizes are the limits."""
    tiers, _, rest = text.partition(";")
    made = []
    for one in tiers.split(","):
        word, *eviction = one.split()
        kind, _, threshold = word.partition(":")
        tier = space.tier(space.budget.medium(kind))
        tier = replace(tier, store_threshold=int(threshold or 1))
        made.append(replace(tier, eviction=eviction[0]) if eviction else tier)
    policy = rest.replace("no promotion", "").strip() or "stitched"
    return SimChain(tuple(made), policy, "no promotion" not in rest)


def hand_chains(budget: Budget) -> dict[str, SimChain]:
    """The chains by hand; where a life is asked for, with the write budget that gives it."""
    space = Space(budget, {medium.type: [medium.limit] for medium in budget.media})
    return {text: by_hand(text, space) for text in HAND}


def case(
    requests: Sequence[TraceRequest], size: int, budget: Budget, chains: int, processes: int
) -> dict[str, Any]:
    """The chosen chain and those by hand, by the objective on the second half."""
    began = time.monotonic()
    asked = TuneOptions(chains, split=Split(warm=HALF / 5, searched=HALF), processes=processes)
    tuned = tune(requests, size, budget, options=asked)
    seconds = time.monotonic() - began
    hand = hand_chains(budget)
    with Simulations(Workload.of(requests, size), budget.machine, processes) as simulations:
        reports = dict(simulations.run((chain, 1.0, HALF) for chain in hand.values()))
    scores = {text: score(reports[chain, 1.0, HALF], budget) for text, chain in hand.items()}
    chosen = tuned.judged["chosen"]
    kept = {text: one.value for text, one in scores.items() if not one.excess}
    best = min(kept, key=kept.__getitem__)
    return {
        "seconds": round(seconds),
        "tried": len(tuned.tried),
        "chosen": name(chosen.chain),
        "ttft_mean": chosen.score.value,
        "excess": chosen.score.excess,
        "broken": tuned.broken,
        "fastest_first": tuned.judged["fastest first"].score.value,
        "none": tuned.judged["none"].score.value,
        "best_by_hand": best,
        "regret": chosen.score.value / kept[best] - 1,
        "hand": {text: [one.value, one.excess] for text, one in scores.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.regret", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--profile", nargs="*", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--requests", type=int, help="the first N alone")
    parser.add_argument("--chains", type=int, default=250)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    opened = open_trace(options.trace)
    requests = list(opened)[: options.requests]
    rows = []
    for profile in options.profile:
        for years in (None, YEARS):
            budget = given(profile, years)
            size = opened.header.block_tokens
            found = case(requests, size, budget, options.chains, options.processes)
            rows.append({"profile": profile, "life_years": years, **found})
            print(
                f"{profile}, {years or 'any'} years: {found['chosen']}:",
                f"{found['ttft_mean']:.3f} s;",
                f"by hand {found['best_by_hand']}: {found['regret']:+.1%}",
                *found["broken"],
                flush=True,
            )
            head = {"trace": options.trace.name, "requests": len(requests)}
            options.json.write_text(in_lines(head, rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
