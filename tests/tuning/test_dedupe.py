"""What one chain's report tells of another chain is what a simulation of it tells."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.tuning.replay.worlds import chats
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.report import Report
from tiers.tuning.search import processes
from tiers.tuning.search.dedupe import derive_report
from tiers.tuning.search.processes import Simulations
from tiers.tuning.simulation import SimChain, SimTier, Workload, simulate

SIZE = 16
"""Tokens of a block; a block has as many bytes."""
MACHINE = Machine(
    kv_bytes_per_token=1,
    engine_cache=40 * SIZE,
    prefill_rate=4e4,
    tiers={
        "cpu": TierProfile(load_bandwidth=1e6, store_bandwidth=1e6, price_per_gb_month=3.0),
        "disk": TierProfile(
            load_bandwidth=4e4, store_bandwidth=2e4, price_per_gb_month=0.1, stored_share=0.7
        ),
    },
)
WORKLOAD = Workload.of(chats(3, 150, 5.0), SIZE)


def made(cpu: int, eviction: str, disk: int, threshold: int = 1) -> SimChain:
    return SimChain(
        (
            SimTier("cpu", "cpu", True, cpu * SIZE, eviction),
            SimTier("disk", "disk", False, int(disk * SIZE * 0.7) + 1, store_threshold=threshold),
        )
    )


def test_a_derived_report_is_what_a_simulation_tells() -> None:
    """Capacities around what a tier holds, to the block."""
    largest = simulate(WORKLOAD, SIZE, made(10**5, "lru", 10**5), MACHINE)
    held = [round((use.held_bytes or 0) / share / SIZE) for use, share in
            zip(largest.tiers, (1, 0.7), strict=True)]  # fmt: skip
    assert min(held) > 100
    disks = [10**5, held[1] + 2, held[1] + 1, held[1], held[1] - 1, held[1] // 2]
    chains = [
        made(cpu, eviction, disk, threshold)
        for cpu, eviction, disk, threshold in product(
            (10**5, held[0] + 1, held[0] - 1, 60), ("lru", "arc"), disks, (1, 2)
        )
    ]
    reports = {chain: simulate(WORKLOAD, SIZE, chain, MACHINE, warm=0.5) for chain in chains}
    told = 0
    for known, chain in product(chains, chains):
        found = derive_report(known, reports[known], chain, MACHINE)
        assert found in (None, reports[chain]) and (found is not None or known != chain)
        told += found is not None and known != chain
    assert told > 300
    assert len(set(reports.values())) > 30


def test_a_tier_that_evicted_for_what_is_on_its_way_is_not_derived() -> None:
    """Its blocks come late: at the end it holds few, and has evicted for those to come."""
    slow = TierProfile(load_bandwidth=1e6, store_bandwidth=1e4)
    late = MACHINE.model_copy(update={"tiers": {"cpu": slow}})
    chains = [
        SimChain((SimTier("cpu", "cpu", True, 100 * SIZE, one),), staging=8 * SIZE)
        for one in ("lru", "arc")
    ]
    reports = [simulate(WORKLOAD, SIZE, chain, late) for chain in chains]
    assert reports[0] != reports[1]
    assert derive_report(chains[0], reports[0], chains[1], late) is None


def test_a_search_simulates_no_chain_whose_report_is_derived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated: list[SimChain] = []

    def noted(*args: Any, **more: Any) -> Report:
        simulated.append(args[2])
        return simulate(*args, **more)

    monkeypatch.setattr(processes, "simulate", noted)
    chains = [made(10**5, "lru", disk) for disk in (10**5, 10**4, 40)]
    chains += [made(10**5, "arc", 40), made(10**4, "lru", 40)]
    ends: list[None] = []
    with Simulations(WORKLOAD, MACHINE) as simulations:
        reports = simulations.run(
            [(chain, 1.0, 0.5) for chain in chains], lambda *_: ends.append(None)
        )
        other = simulations.run([(chains[1], 0.5, 0.0)])
    assert simulated == [chains[0], chains[2], chains[4], chains[1]]
    assert len(ends) == len(chains)
    assert reports == [simulate(WORKLOAD, SIZE, chain, MACHINE, warm=0.5) for chain in chains]
    assert other != reports[1:2]
