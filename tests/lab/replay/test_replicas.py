"""Replicas at work at the same time over one disk folder and one server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.process_worker import fresh
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, close, cpu, disk, drive, measured, redis
from tests.support.servers import RedisServer

PATIENCE = 120.0
"""Seconds after which a replica hangs."""


def replica(seeds: tuple[int, int], tiers: list[dict[str, Any]], barrier: Any, pipe: Any) -> None:
    """Run one workload, then, when all have, another's; every answer is checked."""
    made = ReplayEngine(chain_of(*tiers), MODEL, num_blocks=24, prefix_caching=False, world_size=2)
    drive(made, seeds[0], abort=0.1, world_size=2)
    made.settle()
    barrier.wait(PATIENCE)
    before = {tier: measured(made, "loaded_tokens", tier) for tier in made.stats.data}
    drive(made, seeds[1], world_size=2)
    close(made)
    after = {tier: measured(made, "loaded_tokens", tier) for tier in made.stats.data}
    pipe.send({tier: tokens - before.get(tier, 0) for tier, tokens in after.items()})


def test_replicas_of_two_ranks_load_what_the_others_stored(
    tmp_path: Path, shared_server: RedisServer
) -> None:
    """One has the disk and the server, one the disk alone, one the server alone."""
    context = fresh()
    barrier = context.Barrier(3)
    shared = [disk(tmp_path), redis(shared_server, tmp_path)]
    running = []
    for number, stores in enumerate((shared, shared[:1], shared[1:])):
        ours, theirs = context.Pipe()
        seeds = (number, (number + 1) % 3)
        chain = [cpu(12), *stores]
        process = context.Process(target=replica, args=(seeds, chain, barrier, theirs))
        process.start()
        theirs.close()
        running.append((process, ours))
    for process, pipe in running:
        assert pipe.poll(PATIENCE), "a replica hangs, or has failed"
        loaded = pipe.recv()
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert sum(loaded.get(tier, 0) for tier in ("disk", "redis")) > 0
