"""The simulation's spaces, by runs of blocks, evict what the cpu tier evicts, slot by slot."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
import redis

from bench.eviction import replay
from spec.offloading import StoreContext
from tests.support.servers import RedisServer, binaries
from tiers.remote.spec import RedisSpec
from tiers.store import Block
from tiers.tuning.simulation.sim_chain import SimTier
from tiers.tuning.simulation.simulate import _space
from tiers.tuning.simulation.spaces import ArcSpace, LruSpace, TimedSpace, leading

SPACES = {"lru": LruSpace, "arc": ArcSpace}


def prompts_of(seed: int) -> list[list[int]]:
    """Chats that go on in turns, and documents that are asked about once; a number for each block,
    which stands for all before it, too."""
    rng = random.Random(seed)
    fresh = iter(range(10**6))
    chats: list[list[int]] = []
    prompts = []
    for _ in range(300):
        if rng.random() < 0.4:
            prompts.append([next(fresh) for _ in range(rng.randint(1, 12))])
            continue
        if not chats or rng.random() < 0.2:
            chats.append([])
        chat = rng.choice(chats[-12:])
        chat += [next(fresh) for _ in range(rng.randint(1, 4))]
        prompts.append(chat[:])
    return prompts


def simulated(prompts: Sequence[Sequence[int]], eviction: str, blocks: int) -> int:
    """Hits of a space, with a run for each block."""
    space = SPACES[eviction](blocks, 1 + max(map(max, prompts)))
    hits = 0
    for prompt in prompts:
        held = [space.held[block] for block in prompt]
        hits += [*held, 0].index(0)
        lacking = [(block, 1) for block, has in zip(prompt, held, strict=True) if not has]
        space.touch(prompt)
        for block, _ in lacking:
            space.known[block] = 1
        if lacking:
            space.store((lacking, len(lacking), prompt))
        assert space.used == sum(space.held) <= blocks
    return hits


@pytest.mark.parametrize("blocks", [100, 200])
@pytest.mark.parametrize("eviction", SPACES)
@pytest.mark.parametrize("seed", range(4))
def test_simulation_and_cpu_tier_hit_the_same_blocks(eviction: str, blocks: int, seed: int) -> None:
    prompts = prompts_of(seed)
    keys = [[b"%d" % block for block in prompt] for prompt in prompts]
    hits = replay(keys, eviction, blocks)
    assert hits > 100
    # The tier makes room block by block, a space for all that one job stores: arc's share moves
    # in between.
    near = 0 if eviction == "lru" else hits // 50
    assert simulated(prompts, eviction, blocks) == pytest.approx(hits, abs=near)


AGES, LONG = 300, 20
"""Prompts, each used a minute after the one before, and their blocks."""


@pytest.mark.parametrize("binary", binaries().values(), ids=binaries())
@pytest.mark.parametrize("new", [1000, 3000])
def test_a_server_and_its_space_keep_as_much_of_prompts_of_any_age(binary: Path, new: int) -> None:
    space = _space(SimTier("redis", "redis", is_host=False), AGES * LONG, AGES + new)
    for run in range(AGES):
        space.store(([(run, (1 << LONG) - 1)], LONG, [run]))
    for run in range(AGES, AGES + new):
        space.store(([(run, 1)], 1, [run]))
    whole = sum(leading(space.held[run]) for run in range(AGES))

    blocks = list(product(range(AGES), range(LONG)))
    with RedisServer(binary, **{"maxmemory-policy": "allkeys-lru"}) as server:
        client = redis.Redis.from_url(server.url)
        client.set("like", bytes(4096))
        one = client.dump("like") or b""
        many = client.pipeline(transaction=False)
        for run, block in blocks:
            many.restore(f"{run}-{block}", 0, one, idletime=60 * (AGES - run))
        many.delete("like")
        many.execute()
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        for run in range(new):
            many.set(f"new-{run}", bytes(4096))
        many.execute()
        for run, block in blocks:
            many.exists(f"{run}-{block}")
        there = many.execute()

    exact = AGES * LONG - new
    found = sum([*row, 0].index(0) for row in zip(*[iter(there)] * LONG, strict=True))
    assert found < 0.95 * exact, "a server evicts by samples"
    assert whole == pytest.approx(found, abs=0.05 * AGES * LONG)


@pytest.mark.parametrize("ttl", [None, "1d"])
@pytest.mark.parametrize("use", ["look up", "offer again", "load"])
@pytest.mark.parametrize("binary", binaries().values(), ids=binaries())
def test_a_server_and_its_space_count_the_same_as_used(
    binary: Path, use: str, ttl: str | None
) -> None:
    """What requests have from the engine or from a tier above is offered again."""
    key, used = bytes(32), use != "look up"
    with RedisServer(binary) as server:
        client = redis.Redis.from_url(server.url)
        spec = RedisSpec.model_validate({"url": server.url, "ttl": ttl})
        with closing(spec.open(StoreContext(64))) as store:
            block = Block(key, memoryview(bytearray(64)))
            assert store.put([block]) == [True]
            (name,) = client.keys()
            client.restore(name, 0, client.dump(name) or b"", replace=True, idletime=900)
            moves = {"offer again": store.put, "load": store.get}
            assert (moves[use]([block]) if use in moves else store.has([key])) == [True]
            assert (client.object("idletime", name) < 600) == used

    space = _space(SimTier.of(spec), 100, 150)
    for run in range(100):
        space.store(([(run, 1)], 1, [run]))
    space.pass_time(900)
    if use != "look up":
        (space.load if use == "load" else space.touch)(range(50))
    for run in range(100, 150):
        space.store(([(run, 1)], 1, [run]))
    kept = sum(space.held[:50])
    assert kept > 40 if used else kept < 20


@pytest.mark.parametrize("capacity", [math.inf, 5000])
def test_of_what_expired_a_simulated_redis_remembers_nothing(capacity: float) -> None:
    """A day's trace may store a hundred times what is held at once."""
    runs, blocks = 1000, 50
    space = TimedSpace(capacity, runs, ttl=50.0)
    tracemalloc.start()
    for run in range(runs):
        space.pass_time(float(run))
        space.known[run] = (1 << blocks) - 1
        space.store(([(run, space.known[run])], blocks, [run]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert space.used <= 52 * blocks
    assert peak < 1 << 20, "bytes, as for the 2,600 blocks that are held"
