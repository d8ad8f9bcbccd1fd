"""The default chain over slow links and fast ones, beside other policies, host memory and nothing.

    python -m bench.links TRACE [--case NAME ...] [--real NAME ...] [--requests N] [--json FILE]

A model of 8B (128 KiB of KV a token) on four GPUs of 20,000 tokens a second, with 40 GB of KV of
the engine's own; agents' conversations are made up (`bench.traffic`). The first half
of the requests only warms. The trace: Mooncake's conversations (Apache-2.0,
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces). `--real` serves the first N
requests with real connectors and stores, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from bench.traffic import agents
from spec.chain import LOAD_POLICIES, ChainSpec, LoadWhen
from tiers.lab.replay.replay_trace import replay
from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine
from tiers.tuning.report import Report
from tiers.tuning.simulation.sim_chain import SimChain
from tiers.tuning.simulation.simulate import simulate
from tiers.tuning.simulation.workload import Workload

GB = 10**9
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"type": "cpu", "capacity": f"{256 * GB}B"},
    "disk": {"type": "disk", "path": "/unused", "capacity": f"{4000 * GB}B"},
    "redis": {"type": "redis", "url": "redis://unused", "maxmemory": f"{8000 * GB}B"},
}


class Case(NamedTuple):
    """Tiers in load priority, each with its link in GB/s, and whether agents ask."""

    links: Mapping[str, float]
    is_agentic: bool = False


CASES = {
    "slow Redis": Case({"cpu": 20, "redis": 1}),
    "slow disk": Case({"cpu": 20, "disk": 0.6, "redis": 10}),
    "fast Redis": Case({"cpu": 20, "redis": 6}),
    "NVMe": Case({"cpu": 20, "disk": 5, "redis": 2}),
    "agentic": Case({"cpu": 20, "disk": 5}, True),
    "agentic, slow disk": Case({"cpu": 20, "disk": 0.6, "redis": 10}, True),
}
"""By name."""
WAYS = [(policy, when) for when in get_args(LoadWhen) for policy in LOAD_POLICIES]
DEFAULT = ("stitched", "sooner")
AGENTS = 3000
"""Requests of agents."""
HEAD = (
    "| case | no chain | cpu alone | "
    + " | ".join(f"{policy}, {when}" for policy, when in WAYS)
    + " | default: to the best | to no chain |\n"
    + "|---" * (len(WAYS) + 5)
    + "|"
)


def machine(case: Case) -> Machine:
    """The machine, with the case's links."""
    profiles = {
        name: {"load_bandwidth": f"{speed}GB/s", "store_bandwidth": f"{speed}GB/s"}
        for name, speed in case.links.items()
    }
    return Machine.model_validate(
        {
            "kv_bytes_per_token": 1 << 17,
            "engine_cache": 40 * GB,
            "prefill_rate": 20_000,
            "gpus": 4,
            "tiers": profiles,
        }
    )


def chain(tiers: Sequence[str], policy: str, when: str) -> ChainSpec:
    """A chain of these tiers."""
    spec = {"version": 1, "load_policy": policy, "load_when": when}
    return ChainSpec.model_validate(spec | {"tiers": [TIERS[name] for name in tiers]})


def requests_of(case: Case, trace: Path, count: int | None) -> tuple[list[TraceRequest], int]:
    """What is asked in a case, and the tokens of its blocks."""
    if not case.is_agentic:
        opened = open_trace(trace)
        return list(islice(opened, count)), opened.header.block_tokens
    made = [
        TraceRequest(one["timestamp"], one["input_length"], one["output_length"], one["hash_ids"])
        for one in agents(min(count or AGENTS, AGENTS))
    ]
    return made, 512


def measure(case: Case, trace: Path, real: bool, count: int | None) -> dict[str, Any]:
    """Mean times to the first token in seconds, by way."""
    requests, size = requests_of(case, trace, count)
    on = machine(case)
    workload = Workload.of(requests, size)

    def mean(spec: ChainSpec | SimChain) -> float:
        if real and isinstance(spec, ChainSpec):
            report: Report = replay(requests, size, spec, on, warm=0.5)
        else:
            report = simulate(workload, size, spec, on, warm=0.5)
        return report.ttft_mean

    told = {"no chain": mean(SimChain(())), "cpu alone": mean(chain(["cpu"], *DEFAULT))}
    for way in WAYS:
        told[", ".join(way)] = mean(chain([*case.links], *way))
    best = min(told.values())
    mine = told[", ".join(DEFAULT)]
    return {
        "requests": len(requests),
        "seconds": {way: round(seconds, 4) for way, seconds in told.items()},
        "to_best": round(mine / best - 1, 4),
        "to_none": round(mine / told["no chain"] - 1, 4),
    }


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case, simulated and then real."""
    for name in options.case or CASES:
        yield {"case": name, "real": False} | measure(CASES[name], options.trace, False, None)
    for name in options.real or ():
        said = measure(CASES[name], options.trace, True, options.requests)
        yield {"case": name, "real": True} | said


def line(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    name = f"{row['case']}, real ({row['requests']:,})" if row["real"] else row["case"]
    times = [f"{seconds:.3f}" for seconds in row["seconds"].values()]
    return f"| {' | '.join([name, *times])} | {row['to_best']:+.1%} | {row['to_none']:+.1%} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each case, print a table and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.links", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", type=Path)
    parser.add_argument("--case", nargs="*", choices=[*CASES], metavar="NAME", help="simulated")
    parser.add_argument("--real", nargs="*", choices=[*CASES], metavar="NAME", help="served")
    parser.add_argument("--requests", type=int, default=1200, help="served in each real case")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    print("mean time to the first token of the second half of the requests, in seconds\n")
    print(HEAD, flush=True)
    told = []
    for row in rows(options):
        told.append(row)
        print(line(row), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
