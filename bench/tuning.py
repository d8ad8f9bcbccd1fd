"""What `kvtiers tune` chooses for a trace, and what chains written by hand come to beside it.

    python -m bench.tuning TRACE --into FOLDER [--case BUDGET/PROFILE ...] [--chains N] [--real N]

For each budget and each profile it writes the budget, the chosen chain with its reasons, all
figures and a plot, and simulates chains written by hand on the part of the trace that the
search did not see. With `--real` it serves the first N requests of the trace with real connectors
and stores, at a small scale, and counts the last two fifths of them: with the chosen chain and
those by hand. Where N is the length of the trace, these are what no choice saw. Then it writes a
table of all that is in the folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice, product
from pathlib import Path
from statistics import stdev
from typing import Any

import yaml

from spec.chain import ChainSpec
from spec.fields import format_rate
from tiers.traces.opening import open_trace
from tiers.tuning.replay import replay
from tiers.tuning.search.budget import Budget, load_budget
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.score import value
from tiers.tuning.search.search import Split
from tiers.tuning.search.space import Space
from tiers.tuning.simulation import simulate
from tiers.tuning.simulation.chain import SimChain, SimTier
from tiers.tuning.simulation.workload import Workload

HELD_BACK = Split().searched
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
        "cpu", "cpu/2", "cpu/4", "cpu:2", "cpu:3", "cpu arc", "cpu/2 arc", "cpu:2 arc",
        "cpu; always", "cpu:2; always",
    ],
    "memory-and-ssd": [
        "cpu", "disk", "cpu, disk", "disk, cpu", "cpu, disk; always", "cpu, disk; longest",
        "cpu, disk; first", "cpu, disk:2", "cpu, disk; no promotion", "cpu:2 arc, disk:2",
    ],
    "all-three": [
        "cpu", "cpu:2", "cpu arc", "disk", "redis", "cpu, disk", "cpu, disk:2", "cpu arc, disk:2",
        "cpu, redis", "cpu, redis:2", "disk, cpu", "cpu, disk, redis", "cpu, redis, disk",
        "cpu, disk, redis; longest", "cpu, disk, redis; no promotion", "cpu, disk, redis:2",
        "cpu, disk:2, redis:2", "cpu arc, disk:2, redis:2",
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
    when = "always" if "always" in rest else "sooner"
    policy = rest.replace("no promotion", "").replace("always", "").strip() or "stitched"
    return SimChain(tuple(made), policy, promote, load_when=when)


def run(trace: Path, folder: Path, budget: str, profile: str, chains: int, processes: int) -> None:
    """Tune one case, and simulate the chains of `HAND` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "budget.yaml").write_text(budget_text(budget, profile), encoding="utf-8")
    names = ("--budget", "budget.yaml", "--out", "chain.yaml", "--json", "tune.json")
    started = time.monotonic()
    command = "import sys; from tiers.cli.main import main; main()"
    asked = ["tune", str(trace.resolve()), *names, "--plot", "plot.png", "--chains", str(chains),
             "--processes", str(processes)]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", command, *asked],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / "output.txt").write_text(done.stdout, encoding="utf-8")
    tuned = folder / "tune.json"  # of thousands of lines
    tuned.write_text(json.dumps(json.loads(tuned.read_text())) + "\n", encoding="utf-8")
    given = load_budget(folder / "budget.yaml")
    opened = open_trace(trace)
    workload = Workload.of(opened, opened.header.block_tokens)
    with Simulations(workload, given.machine, processes) as simulations:
        texts = HAND[budget]
        jobs = [(by_hand(text, given), 1.0, HELD_BACK) for text in texts]
        found = dict(zip(texts, simulations.run(jobs), strict=True))
    data = {
        "seconds": round(time.monotonic() - started),
        "hand": {text: value(report, given) for text, report in found.items()},
    }
    (folder / "hand.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def served(trace: Path, folder: Path, budget: str, count: int) -> None:
    """Serve the trace's first requests for real, with the chosen chain and those of `HAND`."""
    given = load_budget(folder / "budget.yaml")
    opened = open_trace(trace)
    requests, size = list(islice(opened, count)), opened.header.block_tokens
    workload = Workload.of(requests, size)
    chains = {text: by_hand(text, given) for text in HAND[budget]}
    chains["chosen"] = chosen_chain(json.loads((folder / "tune.json").read_text())["chosen"])
    said = {
        text: simulate(workload, size, chain, given.machine, warm=HELD_BACK)
        for text, chain in chains.items()
    }
    best, *others, worst = sorted(HAND[budget], key=lambda text: said[text].ttft_mean)
    rows = []
    for text in ("chosen", best, worst, *others):
        began = time.monotonic()
        spec = for_real(chains[text], given)
        done = replay(requests, size, spec, given.machine, warm=HELD_BACK)
        told = said[text]
        rows.append(
            {
                "chain": text,
                "simulated": told.ttft_mean,
                "real": done.ttft_mean,
                "stretches": [part.ttft_mean for part in done.stretches],
                "load": done.load,
                "gpu_load": done.gpu_load,
                "hit_tokens": [told.hit_tokens, done.hit_tokens],
                "seconds": round(time.monotonic() - began),
            }
        )
        data = {"requests": len(requests), "rows": rows}
        (folder / "real.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(f"{text}: {told.ttft_mean:.3f} s simulated, {done.ttft_mean:.3f} s real", flush=True)


def chosen_chain(told: dict[str, Any]) -> SimChain:
    """The chosen chain of a `tune.json`."""
    names = {field.name for field in fields(SimChain)}
    tiers = tuple(SimTier(**tier) for tier in told["tiers"])
    return SimChain(**{k: v for k, v in told.items() if k in names} | {"tiers": tiers})


def for_real(chain: SimChain, given: Budget) -> ChainSpec:
    """The chain's spec."""
    tiers = []
    for tier in chain.tiers:
        medium = given.medium(tier.type)
        keys = {"type": tier.type, "store_threshold": tier.store_threshold, **medium.settings}
        if medium.size_key is not None:
            keys[medium.size_key] = tier.capacity
        if len(medium.evictions) > 1:
            keys["eviction"] = tier.eviction
        if tier.write_budget is not None:
            keys["write_budget"] = format_rate(tier.write_budget)
        tiers.append(keys)
    names = ("load_policy", "load_when", "promote")
    settings = {name: getattr(chain, name) for name in names}
    return ChainSpec.model_validate({"version": 1, **settings, "tiers": tiers})


def table(folder: Path) -> str:
    """All cases of a folder as Markdown."""
    rows = [
        "| budget | profile | chosen | mean TTFT, s | best by hand | worst by hand | no tiers | "
        "chosen against best by hand |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    text = "\n".join([*rows, *_rows(folder)]) + "\n"
    real = list(_real_rows(folder))
    if not real:
        return text
    head = [
        "",
        "Real connectors and stores; mean TTFT in s, simulated / real, and how much the ratio of "
        "the two chains varies between stretches:",
        "",
        "| budget | profile | requests | chosen | best by hand | worst by hand | chosen against "
        "best by hand | spread |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return text + "\n".join([*head, *real]) + "\n"


def _real_rows(folder: Path) -> Iterator[str]:
    for budget, profile in product(BUDGETS, PROFILES):
        file = folder / budget / profile / "real.json"
        if not file.exists():
            continue
        data = json.loads(file.read_text())
        chosen, *hand = data["rows"]
        best = min(hand, key=lambda row: row["real"])
        worst = max(hand, key=lambda row: row["real"])
        pairs = zip(chosen["stretches"], best["stretches"], strict=True)
        spread = stdev(mine / theirs for mine, theirs in pairs)

        def pair(row: dict[str, Any]) -> str:
            return f"{row['simulated']:.3f} / {row['real']:.3f}"

        cells = [
            budget, profile, f"{data['requests']:,}", pair(chosen),
            f"{best['chain']}: {pair(best)}", f"{worst['chain']}: {pair(worst)}",
            f"{chosen['real'] / best['real'] - 1:+.1%}", f"{spread:.1%}",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


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
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--real", type=int, metavar="N", help="serve the first N requests for real")
    options = parser.parse_args(arguments)
    for case in options.case:
        budget, profile = case.split("/")
        folder, chains = options.into / case, options.chains
        run(options.trace, folder, budget, profile, chains, options.processes)
        if options.real:
            served(options.trace, folder, budget, options.real)
        print(case, flush=True)
    text = f"From `{options.trace.name}`, by `python -m bench.tuning`.\n\n{table(options.into)}"
    (options.into / "README.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
