"""What `kvtiers tune` chooses for a trace, and what chains written by hand come to beside it.

    python -m bench.tuning TRACE --into FOLDER [--case BUDGET/PROFILE ...] [--chains N]

For each budget and each profile it writes the budget, the chosen chain with its reasons, all
figures and a plot, and simulates ten chains written by hand on the part of the trace that the
search did not see. Then it writes a table of all that is in the folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tiers.traces.opening import open_trace
from tiers.tuning.search.budget import Budget, load_budget
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.score import value
from tiers.tuning.search.space import Space
from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.workload import Workload

HELD_BACK = 0.5
SETTINGS = {"disk": {"path": "/var/lib/kvtiers"}, "redis": {"url": "redis://cache.internal:6379/0"}}
LIMITS = {"cpu": "256GB", "disk": "4TB", "redis": "8TB"}
BUDGETS = {
    "memory": ("cpu",),
    "memory-and-ssd": ("cpu", "disk"),
    "all-three": ("cpu", "disk", "redis"),
}
PROFILES: dict[str, dict[str, dict[str, str]]] = {
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
        "disk": {"store_bandwidth": "1GB/s", "shared_link": "true"},
        "redis": {"store_bandwidth": "1GB/s", "shared_link": "true"},
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
HAND = {
    "memory": [
        "cpu", "cpu/2", "cpu/4", "cpu:2", "cpu:3", "cpu arc", "cpu s3fifo", "cpu:2 arc",
        "cpu; cheapest", "cpu:2; cheapest",
    ],
    "memory-and-ssd": [
        "cpu", "disk", "cpu, disk", "disk, cpu", "cpu, disk; cheapest", "cpu, disk; longest",
        "cpu, disk; first", "cpu, disk:2", "cpu, disk; no promotion", "cpu:2 arc, disk:2; cheapest",
    ],
    "all-three": [
        "cpu, disk", "cpu, redis", "cpu, disk, redis", "cpu, redis, disk",
        "cpu, disk, redis; cheapest", "cpu, disk, redis; longest", "cpu, disk, redis:2",
        "cpu, disk:2, redis:2", "cpu, disk, redis; no promotion", "redis",
    ],
}  # fmt: skip
"""Chains as an operator would write them: tiers in order, with :N a store threshold, with /N a
part of the limit; then what differs from `stitched` with promotion."""


def budget_text(budget: str, profile: str) -> str:
    """The YAML of a budget."""
    kinds = BUDGETS[budget]
    media = [
        {"type": kind, "limit": LIMITS[kind]}
        | ({"settings": SETTINGS[kind]} if kind in SETTINGS else {})
        for kind in kinds
    ]
    tiers: dict[str, Any] = {k: HEALTHY[k] | PROFILES[profile].get(k, {}) for k in kinds}
    for tier in tiers.values():
        if "shared_link" in tier:
            tier["shared_link"] = True
    machine = {
        "kv_bytes_per_token": 131072,
        "engine_cache": "40GB",
        "prefill_rate": 20000,
        "gpus": 4,
        "tiers": tiers,
    }
    data = {"media": media, "machine": machine, "objective": "mean_ttft"}
    return str(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100))


def by_hand(text: str, budget: Budget) -> SimChain:
    """A chain from its line in `HAND`; sizes are the limits."""
    tiers, _, rest = text.partition(";")
    space = Space(budget, {medium.type: [medium.limit] for medium in budget.media})
    made = []
    for one in tiers.split(","):
        word, *eviction = one.split()
        kind, _, part = word.partition("/")
        kind, _, threshold = kind.partition(":")
        tier = space.tier(budget.medium(kind))
        tier = replace(tier, store_threshold=int(threshold or 1))
        tier = replace(tier, capacity=(tier.capacity or 0) // int(part or 1))
        made.append(replace(tier, eviction=eviction[0]) if eviction else tier)
    promote = "no promotion" not in rest
    policy = rest.replace("no promotion", "").strip() or "stitched"
    return SimChain(tuple(made), policy, promote)


def run(trace: Path, folder: Path, budget: str, profile: str, chains: int) -> None:
    """Tune one case, and simulate the chains of `HAND` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "budget.yaml").write_text(budget_text(budget, profile), encoding="utf-8")
    names = ("--budget", "budget.yaml", "--out", "chain.yaml", "--json", "tune.json")
    started = time.monotonic()
    command = "import sys; from tiers.cli.main import main; main()"
    asked = ["tune", str(trace.resolve()), *names, "--plot", "plot.png", "--chains", str(chains)]
    done = subprocess.run(
        [sys.executable, "-c", command, *asked],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / "output.txt").write_text(done.stdout, encoding="utf-8")
    given = load_budget(folder / "budget.yaml")
    opened = open_trace(trace)
    workload = Workload.of(opened, opened.header.block_tokens)
    with Simulations(workload, given.machine, 2) as simulations:
        texts = HAND[budget]
        jobs = [(by_hand(text, given), 1.0, HELD_BACK) for text in texts]
        found = dict(zip(texts, simulations.run(jobs), strict=True))
    data = {
        "seconds": round(time.monotonic() - started),
        "hand": {text: value(report, given) for text, report in found.items()},
    }
    (folder / "hand.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def table(folder: Path) -> str:
    """All cases of a folder as Markdown."""
    rows = [
        "| budget | profile | chosen | mean TTFT, s | best by hand | worst by hand | no tiers | "
        "chosen against best by hand | equal up to |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*rows, *_rows(folder)]) + "\n"


def _rows(folder: Path) -> Iterator[str]:
    for budget in BUDGETS:
        for profile in PROFILES:
            case = folder / budget / profile
            if not (case / "hand.json").exists():
                continue
            tuned = json.loads((case / "tune.json").read_text())
            hand = json.loads((case / "hand.json").read_text())["hand"]
            best, worst = min(hand, key=hand.__getitem__), max(hand, key=hand.__getitem__)
            mine = tuned["chosen"]["objective"]
            cells = [
                budget, profile, tuned["chosen"]["name"], f"{mine:.3f}",
                f"{best}: {hand[best]:.3f}", f"{worst}: {hand[worst]:.3f}",
                f"{tuned['none']['objective']:.3f}", f"{mine / hand[best] - 1:+.1%}",
                f"{tuned['equal_up_to']:.1%}",
            ]  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.tuning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    every = [f"{budget}/{profile}" for budget in BUDGETS for profile in PROFILES]
    parser.add_argument("trace", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--case", nargs="*", choices=every, default=every, metavar="CASE")
    parser.add_argument("--chains", type=int, default=250)
    options = parser.parse_args(arguments)
    for case in options.case:
        budget, profile = case.split("/")
        run(options.trace, options.into / case, budget, profile, options.chains)
        print(case, flush=True)
    text = f"From `{options.trace.name}`, by `python -m bench.tuning`.\n\n{table(options.into)}"
    (options.into / "README.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
