"""Blocks of which each rank holds a shard: present, loaded and of use only on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.damage import damage_blocks
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    disk,
    drop_from_disk,
    measured,
    names,
    redis,
)
from tests.support.servers import RedisServer

PROMPT = list(range(50))
"""Twelve full blocks, and two tokens more."""
OTHER = list(range(1000, 1050))

MakeEngine = Callable[..., ReplayEngine]
RANKS = pytest.mark.parametrize(
    ("rank", "processes"),
    [(0, False), (1, False), pytest.param(1, True, marks=pytest.mark.faults)],
    ids=["0", "1", "1 of two processes"],
)


def shard(made: ReplayEngine, rank: int, block_hash: bytes) -> bytes:
    """What stores call one rank's part of a block."""
    return names(made, [block_hash])[rank]


def fill(made: ReplayEngine, *prompts: list[int]) -> list[bytes]:
    """Compute the prompts, so that all tiers hold them; the first one's block hashes."""
    requests = []
    for prompt in prompts:
        requests.append(made.generate(prompt, 1))
        made.settle()
    return requests[0].block_hashes[:12]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_one_rank_lacks_ends_the_prefix(
    engine: MakeEngine, tmp_path: Path, shared_server: RedisServer, rank: int
) -> None:
    for tier in (disk(tmp_path), redis(shared_server, tmp_path)):
        made = engine(chain_of(tier), prefix_caching=False, world_size=2)
        missing = shard(made, rank, fill(made, PROMPT)[5])
        if tier["type"] == "disk":
            drop_from_disk(tmp_path, [missing])
        else:
            client = shared_server.client()
            gone = [key for key in client.scan_iter(f"{tmp_path}*") if missing in key]
            assert client.delete(*gone) == 1
        # The same blocks of the prompt, in a request that stores none of them again.
        limits = {"kvtiers": {"store": False}}
        request = made.generate(PROMPT, 3, kv_transfer_params=limits)
        assert request.output == answer(MODEL, PROMPT, 3, 2)
        assert request.loaded_tokens == 5 * 4
        assert measured(made, "load_failures", tier["type"]) == 0


@RANKS
@pytest.mark.parametrize("load", ["first", "stitched"])
def test_a_shard_damaged_on_one_rank_is_recomputed_on_all_and_others_load_on(
    engine: MakeEngine, tmp_path: Path, rank: int, processes: bool, load: str
) -> None:
    chain = chain_of(disk(tmp_path), load_policy=load)
    made = engine(chain, prefix_caching=False, world_size=2, processes=processes)
    bad = shard(made, rank, fill(made, PROMPT, OTHER)[5])
    assert damage_blocks(tmp_path, bad.__eq__) == 1
    before = measured(made, "loaded_tokens", "disk")
    requests = [(made.add(prompt, 3), prompt) for prompt in (PROMPT, OTHER)]
    made.run()
    for request, prompt in requests:
        assert request.output == answer(MODEL, prompt, 3, 2)
    assert measured(made, "loaded_tokens", "disk") - before == (5 + 12) * 4
    assert measured(made, "load_failures", "disk") > 0


@RANKS
def test_one_of_two_tiers_fails_on_one_rank(
    engine: MakeEngine, tmp_path: Path, rank: int, processes: bool
) -> None:
    """Each tier has half of the blocks; what the other loaded behind the failed one is no use."""
    one, two = tmp_path / "one", tmp_path / "two"
    chain = chain_of(disk(one), disk(two), load_policy="stitched")
    made = engine(chain, prefix_caching=False, world_size=2, processes=processes)
    hashes = fill(made, PROMPT, OTHER)
    drop_from_disk(one, names(made, hashes[1::2]))
    drop_from_disk(two, names(made, hashes[0::2]))
    bad = shard(made, rank, hashes[7])
    assert damage_blocks(two, bad.__eq__) == 1
    requests = [(made.add(prompt, 3), prompt) for prompt in (PROMPT, OTHER)]
    made.run()
    for request, prompt in requests:
        assert request.output == answer(MODEL, prompt, 3, 2)
    assert measured(made, "loaded_tokens", "disk") == (4 + 12) * 4
    assert measured(made, "loaded_tokens", "disk-2") == 3 * 4
    assert measured(made, "load_failures", "disk-2") > 0 == measured(made, "load_failures", "disk")
