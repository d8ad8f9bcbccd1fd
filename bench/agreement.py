"""Whether simulation and reality agree: hit tokens and times of one trace by both, side by side.

    python -m bench.agreement conversation_trace.jsonl --requests 1200 --json agreement.json

The machine: a model of 8B (128 KiB of KV a token) on four GPUs of 20,000 tokens a second, with 160
GB of KV of the engine's own. Reality is real connectors and stores; their time is counted. The
trace: Mooncake's conversations (Apache-2.0, https://github.com/kvcache-ai/Mooncake,
FAST25-release/traces).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bench.report import in_lines
from spec.chain import LOAD_POLICIES, ChainSpec
from tiers.lab.replay.replay_trace import replay
from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine
from tiers.tuning.report import Report
from tiers.tuning.simulation.simulate import simulate

CPU = {"type": "cpu", "capacity": "128GB"}
DISK = {"type": "disk", "capacity": "1000GB", "path": "/unused"}
REDIS = {"type": "redis", "url": "redis://unused", "maxmemory": "1000GB"}
HEALTHY = {"load_bandwidth": "5GB/s", "store_bandwidth": "5GB/s", "load_latency": "1ms"}
LIKE = {"load_bandwidth": "3GB/s", "store_bandwidth": "10GB/s", "load_latency": "1ms"}
Worlds = Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]]
WORLDS: Worlds = {
    "memory and SSD": ([CPU, DISK], {"disk": HEALTHY}),
    "stores lag and drop": ([CPU, DISK], {"disk": HEALTHY | {"store_bandwidth": "1GB/s"}}),
    "memory, SSD and Redis": (
        [CPU, DISK | {"capacity": "400GB"}, REDIS],
        {"disk": HEALTHY, "redis": HEALTHY | {"load_latency": "2ms"}},
    ),
    "a link slower than computing": (
        [CPU | {"capacity": "32GB"}, REDIS],
        {"redis": HEALTHY | {"load_bandwidth": "1GB/s"}},
    ),
    "equal links": ([DISK, REDIS], {"disk": LIKE, "redis": LIKE}),
}
"""Tiers, and the profiles of their links."""

HEAD = (
    "| world | policy | hits | worst | p50 | mean | p99 | dropped | GPU load |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def machine(links: Mapping[str, Any]) -> Machine:
    """The machine, with these links."""
    cpu = {"load_bandwidth": "20GB/s", "store_bandwidth": "20GB/s"}
    return Machine.model_validate(
        {
            "kv_bytes_per_token": 131072,
            "engine_cache": "160GB",
            "prefill_rate": 20000,
            "gpus": 4,
            "decode_seconds_per_token": 0.02,
            "tiers": {"cpu": cpu} | dict(links),
        }
    )


def compare(
    requests: list[TraceRequest],
    block_tokens: int,
    worlds: Worlds = WORLDS,
) -> Iterator[Any]:
    """A row for each world and load policy."""
    for world, (tiers, links) in worlds.items():
        for policy in LOAD_POLICIES:
            chain = ChainSpec.model_validate(
                {"version": 1, "load_policy": policy, "staging": "64GB", "tiers": tiers}
            )
            on = machine(links)
            said = simulate(requests, block_tokens, chain, on)
            began = time.monotonic()
            done = replay(requests, block_tokens, chain, on)
            yield row(world, policy, said, done) | {"seconds": time.monotonic() - began}


def row(world: str, policy: str, said: Report, done: Report) -> dict[str, Any]:
    """What both say. `load`: the highest of GPU load and link use. `worst`: the largest difference
    of hit tokens, of all prompt tokens."""
    names = [use.name for use in done.tiers]
    hits = {name: (said.hit_tokens[name], done.hit_tokens[name]) for name in names}
    hits = {"own": (said.engine_hit_tokens, done.engine_hit_tokens)} | hits
    worst = max(abs(a - b) for a, b in hits.values()) / done.prompt_tokens
    return {
        "world": world,
        "policy": policy,
        "load": max([done.gpu_load, *(max(t.load_busy, t.store_busy) for t in done.tiers)]),
        "gpu_load": done.gpu_load,
        "prompt_tokens": done.prompt_tokens,
        "hits": hits,
        "worst": worst,
        "p50": (said.ttft_p50, done.ttft_p50),
        "mean": (said.ttft_mean, done.ttft_mean),
        "p99": (said.ttft_p99, done.ttft_p99),
        "dropped": {
            a.name: (a.dropped_share, b.dropped_share)
            for a, b in zip(said.tiers, done.tiers, strict=True)
        },
    }


def line(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""

    def pair(values: tuple[float, float]) -> str:
        return f"{values[0]:.3f} / {values[1]:.3f}"

    hits = ", ".join(
        f"{name} {100 * a / row['prompt_tokens']:.2f} / {100 * b / row['prompt_tokens']:.2f}"
        for name, (a, b) in row["hits"].items()
    )
    dropped = ", ".join(f"{n} {a:.3f} / {b:.3f}" for n, (a, b) in row["dropped"].items() if a or b)
    return (
        f"| {row['world']} | {row['policy']} | {hits} | {100 * row['worst']:.2f} | "
        f"{pair(row['p50'])} | {pair(row['mean'])} | {pair(row['p99'])} | {dropped or '-'} | "
        f"{row['gpu_load']:.2f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print a table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--world", action="append", choices=[*WORLDS], help="all unless said")
    parser.add_argument("--json", type=Path, help="write the rows here")
    asked = parser.parse_args(arguments)
    trace = open_trace(asked.trace)
    requests = list(islice(trace, asked.requests))
    print("simulated / real; hits and the worst difference in % of prompt tokens, times in s\n")
    print(HEAD)
    rows = []
    worlds = {name: WORLDS[name] for name in asked.world or WORLDS}
    for one in compare(requests, trace.header.block_tokens, worlds):
        rows.append(one)
        print(line(one), flush=True)
        if asked.json is not None:
            head = {"trace": asked.trace.name, "requests": len(requests)}
            asked.json.write_text(in_lines(head, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
