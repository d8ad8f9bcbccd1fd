"""What a tier that lags behind serves, by how much may be on its way into it.

    python -m bench.queues conversation_trace.jsonl --requests 3000 --json queues.json

The machine of `bench.agreement`, simulated: 128 GB of cpu over a disk that stores at 0.3 or 1 GB/s,
and both with 512 GB of cpu. The trace: Mooncake's conversations (Apache-2.0,
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from bench.agreement import DISK, HEALTHY, machine
from spec.chain import ChainSpec
from tiers.traces.opening import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.simulation import simulate
from tiers.tuning.simulation.workload import Workload

SECONDS = (1, 3, 10, 30, 100)
RATES = (3e8, 1e9)
CPU_BYTES = (128e9, 512e9)
STAGING_BYTES = 64e9


def rows(requests: list[TraceRequest], block_tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each machine and each length of the queue; the last is half of all slots."""
    work = Workload.of(requests, block_tokens)
    for cpu_bytes in CPU_BYTES:
        for rate in RATES:
            half = (cpu_bytes + STAGING_BYTES) / 2 / rate
            for seconds in (*(one for one in SECONDS if one < half), half):
                cpu = {"type": "cpu", "capacity": int(cpu_bytes)}
                disk = DISK | {"max_inflight": int(seconds * rate)}
                chain = ChainSpec.model_validate(
                    {
                        "version": 1,
                        "load_when": "always",
                        "staging": int(STAGING_BYTES),
                        "tiers": [cpu, disk],
                    }
                )
                links = {"disk": HEALTHY | {"store_bandwidth": int(rate)}}
                said = simulate(work, block_tokens, chain, machine(links))
                yield {
                    "cpu_bytes": cpu_bytes,
                    "rate": rate,
                    "seconds": seconds,
                    "hits": {n: 100 * t / said.prompt_tokens for n, t in said.hit_tokens.items()},
                    "dropped": 100 * said.tiers[1].dropped_share,
                    "ttft_p50": said.ttft_p50,
                }


def main() -> None:
    """Simulate, print a table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="write the rows here")
    asked = parser.parse_args()
    trace = open_trace(asked.trace)
    print("| cpu | disk stores | queue | hits cpu | hits disk | both | dropped | TTFT p50 |")
    print("|---|---|---|---|---|---|---|---|")
    told = []
    for one in rows(list(islice(trace, asked.requests)), trace.header.block_tokens):
        told.append(one)
        cpu, disk = one["hits"]["cpu"], one["hits"]["disk"]
        print(
            f"| {one['cpu_bytes'] / 1e9:.0f} GB | {one['rate'] / 1e9:g} GB/s | "
            f"{one['seconds']:.0f} s | {cpu:.2f}% | {disk:.2f}% | {cpu + disk:.2f}% | "
            f"{one['dropped']:.0f}% | {one['ttft_p50']:.2f} s |",
            flush=True,
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
