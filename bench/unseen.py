"""What the tuning commands are worth on a trace that nobody looked at while they were built.

    python -m bench.unseen TRACE --into FOLDER [--requests N] [--chains N] [--parts PART ...]

Three parts, each with its figures in a JSON file of its own, and a page of all that is there:

- `curve`: the curve beside an exact LRU at each size, block by block.
- `agreement`: hit tokens and times, simulated and with real connectors and stores, of the first N
  requests, under a load at which times are to be trusted.
- `regret`: the chain that the search chooses beside those written by hand and beside every chain of
  a grid, all on the requests that the search did not see.

The results are those of Mooncake's synthetic trace (Apache-2.0,
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces/synthetic_trace.jsonl).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

from bench import agreement
from bench.tuning import HAND, HELD_BACK, LIMITS, SETTINGS, by_hand
from tiers.traces.opening import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.curve import measure
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.score import value
from tiers.tuning.search.space import Space, policies
from tiers.tuning.search.tune import Asked, tune
from tiers.tuning.search.words import name
from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.workload import Workload

SIZES = (64, 512, 2048, 4096, 8192, 16384, 32768, 65536)
"""Blocks."""
KINDS = ("cpu", "disk", "redis")
LINKS: dict[str, dict[str, Any]] = {
    "cpu": {"load_bandwidth": "20GB/s", "store_bandwidth": "20GB/s"},
    "disk": {"load_bandwidth": "12GB/s", "store_bandwidth": "12GB/s", "load_latency": "1ms"},
    "redis": {"load_bandwidth": "12GB/s", "store_bandwidth": "12GB/s", "load_latency": "2ms"},
}
"""Several SSDs and a fast network: with the links of `bench.tuning` this trace waits for hours."""
THRESHOLDS = (1, 2)


def curve(requests: Sequence[TraceRequest], block_tokens: int) -> dict[str, Any]:
    """Hits at each size by the curve and by an LRU that is touched block by block."""
    began = time.process_time()
    found = measure(requests, block_tokens, second_use=False).all
    seconds = time.process_time() - began
    rows = [{"blocks": n, "curve": found.hits(n), "lru": lru_hits(requests, n)} for n in SIZES]
    return {"references": found.references, "seconds": seconds, "rows": rows}


def lru_hits(requests: Sequence[TraceRequest], size: int) -> int:
    """Leading blocks that an LRU has, whose prompts are touched from tail to head."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.blocks:
            if block not in held:
                break
            hits += 1
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > size:
            held.popitem(last=False)
    return hits


def agreements(requests: list[TraceRequest], block_tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of `bench.agreement`, with this page's links."""
    both = [agreement.CPU, agreement.DISK]
    worlds = {
        "memory and SSD": (both, {"disk": LINKS["disk"]}),
        "memory, SSD and Redis": (
            [agreement.CPU, agreement.DISK | {"capacity": "400GB"}, agreement.REDIS],
            {"disk": LINKS["disk"], "redis": LINKS["redis"] | {"capacity": "1000GB"}},
        ),
    }
    yield from agreement.compare(requests, block_tokens, worlds=worlds)


def budget() -> Budget:
    """All three media."""
    media = [{"type": k, "limit": LIMITS[k], "settings": SETTINGS.get(k, {})} for k in KINDS]
    machine = {
        "kv_bytes_per_token": 131072,
        "engine_cache": "40GB",
        "prefill_rate": 20000,
        "gpus": 4,
        "tiers": LINKS,
    }
    return Budget.model_validate({"media": media, "machine": machine})


def grid(given: Budget) -> Iterator[SimChain]:
    """Every order of every choice of media at their limits, with each load policy, store
    thresholds of 1 and 2, and with and without promotion."""
    space = Space(given, {medium.type: [medium.limit] for medium in given.media})
    tiers = [space.tier(medium) for medium in given.media]
    for count in range(1, len(tiers) + 1):
        for order in permutations(tiers, count):
            for thresholds in product(THRESHOLDS, repeat=count):
                some = tuple(
                    replace(tier, store_threshold=threshold)
                    for tier, threshold in zip(order, thresholds, strict=True)
                )
                for policy in policies(count):
                    for promote in (True, False)[: 2 if count > 1 else 1]:
                        yield SimChain(some, policy, promote)


def regret(
    requests: Sequence[TraceRequest], block_tokens: int, chains: int, processes: int
) -> dict[str, Any]:
    """The chosen chain, those written by hand, and the grid, by the objective, mean TTFT."""
    given = budget()
    workload = Workload.of(requests, block_tokens)
    began = time.monotonic()
    tuned = tune(requests, block_tokens, given, asked=Asked(chains, processes=processes))
    seconds = time.monotonic() - began
    every = list(grid(given))
    hand = {text: by_hand(text, given) for text in HAND["all-three"]}
    with Simulations(workload, given.machine, processes) as simulations:
        jobs = [(chain, 1.0, HELD_BACK) for chain in (*every, *hand.values())]
        values = [value(report, given) for report in simulations.run(jobs)]
    of_grid = dict(zip(every, values, strict=False))
    best = min(of_grid, key=of_grid.__getitem__)
    verdict = tuned.verdict
    chosen = verdict.judged["chosen"]
    return {
        "tuning_seconds": seconds,
        "tried": len(tuned.found.tried),
        "chosen": {
            "name": name(chosen.chain),
            "ttft_mean": chosen.score.value,
            "gpu_load": chosen.report.gpu_load,
            "load": chosen.report.load,
        },
        "no_tiers": verdict.judged["none"].score.value,
        "grid": len(every),
        "best_of_grid": {"name": name(best), "ttft_mean": of_grid[best]},
        "worst_of_grid": max(of_grid.values()),
        "hand": dict(zip(hand, values[len(every) :], strict=True)),
    }


def page(trace: str, folder: Path) -> str:
    """All that is in the folder, as Markdown."""
    told = [
        f"# A trace that nobody looked at before\n\nFrom `{trace}`, by `python -m bench.unseen`."
    ]
    for part, text in (("curve", _curve), ("agreement", _agreement), ("regret", _regret)):
        file = folder / f"{part}.json"
        if file.exists():
            told.append(text(json.loads(file.read_text())))
    return "\n\n".join(told) + "\n"


def _curve(data: dict[str, Any]) -> str:
    rows = [
        f"| {row['blocks']:,} | {row['curve']:,} | {row['lru']:,} | {row['curve'] - row['lru']} |"
        for row in data["rows"]
    ]
    head = "| blocks | hits by the curve | by an LRU, block by block | difference |"
    told = (
        f"## Curve\n\n{data['references']:,} references to blocks; the whole curve took "
        f"{data['seconds']:.2f} s of one core."
    )
    return "\n".join([told, "", head, "|---|---|---|---|", *rows])


def _agreement(data: dict[str, Any]) -> str:
    told = (
        f"## Simulation and reality\n\nThe first {data['requests']:,} requests, simulated / real "
        "(connectors and stores, counted time); hits and the worst difference in % of prompt "
        "tokens, times in s."
    )
    return "\n".join([told, "", agreement.HEAD, *map(agreement.line, data["rows"])])


def _regret(data: dict[str, Any]) -> str:
    mine = data["chosen"]["ttft_mean"]
    hand = data["hand"]
    best, worst = min(hand, key=hand.__getitem__), max(hand, key=hand.__getitem__)
    rows = [
        ("chosen", data["chosen"]["name"], mine),
        (f"best of the grid of {data['grid']}", *data["best_of_grid"].values()),
        ("best by hand", best, hand[best]),
        ("worst by hand", worst, hand[worst]),
        ("no tiers", "", data["no_tiers"]),
        ("worst of the grid", "", data["worst_of_grid"]),
    ]
    lines = [
        f"| {what} | {chain} | {ttft:.3f} | {mine / ttft - 1:+.1%} |" for what, chain, ttft in rows
    ]
    told = (
        f"## Regret\n\nThe search tried {data['tried']} chains in {data['tuning_seconds']:.0f} s. "
        "Mean TTFT of the requests that it did not see:"
    )
    head = "| | chain | mean TTFT, s | chosen against it |"
    return "\n".join([told, "", head, "|---|---|---|---|", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.unseen", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parts = ("curve", "agreement", "regret")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=800, help="of the agreement")
    parser.add_argument("--chains", type=int, default=250, help="of the search")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts, metavar="PART")
    options = parser.parse_args(arguments)
    opened = open_trace(options.trace)
    requests, size = list(opened), opened.header.block_tokens
    folder = options.into
    folder.mkdir(parents=True, exist_ok=True)

    def write(part: str, data: dict[str, Any]) -> None:
        (folder / f"{part}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    if "curve" in options.parts:
        write("curve", curve(requests, size))
    if "regret" in options.parts:
        write("regret", regret(requests, size, options.chains, options.processes))
    if "agreement" in options.parts:
        some = requests[: options.requests]
        rows = []
        for row in agreements(some, size):
            rows.append(row)
            write("agreement", {"requests": len(some), "rows": rows})
    (folder / "README.md").write_text(page(options.trace.name, folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
