"""What load policies make of links of one speed or of several, simulated on a trace.

    python -m bench.links TRACE

A model of 8B (128 KiB of KV a token) on GPUs of 20,000 tokens a second, with 100 GB of KV of the
engine's own. The first quarter of the trace only warms. The trace: Mooncake's conversations
(Apache-2.0, https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tiers.traces.opening import open_trace
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.simulation import SimChain, SimTier, Workload, simulate

GB = 10**9
CPU = SimTier("cpu", "cpu", True, 256 * GB)
DISK = SimTier("disk", "disk", False, 4000 * GB)
REDIS = SimTier("redis", "redis", False, 4000 * GB)
POLICIES = ("stitched", "cheapest", "soonest")
CASES: tuple[tuple[int, tuple[SimTier, ...], float, float], ...] = (
    *((3, (DISK, REDIS), speed, speed) for speed in (1.5, 3, 5)),
    (3, (DISK, REDIS), 5, 2),
    (3, (REDIS, DISK), 5, 2),
    *((gpus, (CPU, DISK), speed, 1) for gpus, speed in ((2, 1.5), (2, 2), (3, 1), (3, 2))),
)
"""GPUs, tiers, and the load bandwidth of disk and Redis in GB/s."""


def machine(gpus: int, disk: float, redis: float) -> Machine:
    """The machine, with these links; stores have 20 GB/s."""
    speeds = {"cpu": 20.0, "disk": disk, "redis": redis}
    tiers = {
        name: TierProfile(load_bandwidth=speed * GB, store_bandwidth=20e9)
        for name, speed in speeds.items()
    }
    return Machine(
        kv_bytes_per_token=1 << 17,
        engine_cache=100 * GB,
        prefill_rate=20_000,
        gpus=gpus,
        tiers=tiers,
    )


def main() -> None:
    """Simulate each case with each policy and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    trace = open_trace(parser.parse_args().trace)
    size = trace.header.block_tokens
    workload = Workload.of(trace, size)
    print("mean / p99 of the time to first token, in seconds\n")
    print("| GPUs | chain | disk, Redis GB/s |", " | ".join(POLICIES), "|")
    print("|---|---|---|" + "---|" * len(POLICIES))
    for gpus, tiers, disk, redis in CASES:
        on, told = machine(gpus, disk, redis), []
        for policy in POLICIES:
            chain = SimChain(tiers, policy, staging=64 * GB)
            report = simulate(workload, size, chain, on, warm=0.25)
            told.append(f"{report.ttft_mean:.2f} / {report.ttft_p99:.1f}")
        names = ", ".join(tier.name for tier in tiers)
        print(f"| {gpus} | {names} | {disk}, {redis} |", " | ".join(told), "|", flush=True)


if __name__ == "__main__":
    main()
