"""How many references to blocks a second simulation and curves take, on a trace of real prompts.

    python -m bench.simulation TRACE [--rounds 5] [--json F]

A model of 8B (128 KiB of KV a token) on three GPUs of 20,000 tokens a second, with 40 GB of KV of
the engine's own. Seconds are of the processor, the fewest of the rounds; compiling the trace into
runs is done once and told apart. The trace: Mooncake's conversations (Apache-2.0,
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from bench.policies import TRACE
from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.curve import PrefixStack, measure
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.simulation import SimChain, SimTier, Workload, simulate

GB = 10**9
CPU = SimTier("cpu", "cpu", True, 256 * GB)
DISK = SimTier("disk", "disk", False, 4000 * GB)
REDIS = SimTier("redis", "redis", False, 4000 * GB)
CHAINS = {
    "no tier": SimChain(()),
    "cpu": SimChain((CPU,)),
    "cpu, disk": SimChain((CPU, DISK)),
    "cpu, disk, redis": SimChain((CPU, DISK, REDIS)),
    "cpu, disk, first": SimChain((CPU, DISK), load_policy="first"),
    "cpu with arc, disk": SimChain((SimTier("cpu", "cpu", True, 256 * GB, "arc"), DISK)),
}
MACHINE = Machine(
    kv_bytes_per_token=1 << 17,
    engine_cache=40 * GB,
    prefill_rate=20_000,
    gpus=3,
    tiers={
        "cpu": TierProfile(load_bandwidth=20e9, store_bandwidth=20e9),
        "disk": TierProfile(load_bandwidth=5e9, store_bandwidth=5e9),
        "redis": TierProfile(load_bandwidth=2e9, store_bandwidth=2e9),
    },
)


def fewest_seconds(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the processor that a call takes at best."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


def touch_all(requests: Iterable[TraceRequest]) -> None:
    """Take the LRU positions of all blocks."""
    stack = PrefixStack()
    for request in requests:
        stack.touch(request.blocks)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    opened = open_trace(options.trace)
    requests, size = list(opened), opened.header.block_tokens
    workload = Workload.of(requests, size)
    references = workload.references
    rows = {"runs found": fewest_seconds(lambda: Workload.of(requests, size), options.rounds)}
    rows["curve by runs"] = fewest_seconds(lambda: touch_all(requests), options.rounds)
    for second_use, name in ((False, "curve and halves"), (True, "from the second use, too")):
        call = partial(measure, requests, size, second_use=second_use)
        rows[name] = fewest_seconds(call, options.rounds)
    for name, chain in CHAINS.items():
        rows[name] = fewest_seconds(
            partial(simulate, workload, size, chain, MACHINE), options.rounds
        )
    print(f"{len(workload)} prompts of {references} blocks in {len(workload.lengths)} runs")
    for name, seconds in rows.items():
        print(f"{name:>24} {seconds:7.3f} s {references / seconds / 1e6:6.2f} M references/s")
    if options.json is not None:
        options.json.write_text(json.dumps({"references": references, "seconds": rows}) + "\n")


if __name__ == "__main__":
    main()
