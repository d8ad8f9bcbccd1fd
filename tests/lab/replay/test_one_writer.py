"""Ranks that have the same KV, as of MLA: one stores it, all load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import SLOT, chain_of, cpu, damage_disk, disk, measured, redis
from tests.support.servers import RedisServer

MLA = ReplayModel(replicated=True)
PROMPT = [*range(50)]
BLOCKS = 12
"""Full blocks of the prompt."""
MakeEngine = Callable[..., ReplayEngine]


def ask(engine: ReplayEngine) -> None:
    ranks = len(engine.workers)
    assert engine.generate(PROMPT, 2).output == answer(MLA, PROMPT, 2, ranks)
    engine.settle()


@pytest.mark.parametrize(
    ("ranks", "processes"),
    [(2, False), (8, False), pytest.param(2, True, marks=pytest.mark.faults)],
    ids=["2", "8", "own processes"],
)
def test_a_block_is_stored_once_and_loaded_by_all(
    engine: MakeEngine, shared_server: RedisServer, tmp_path: Path, ranks: int, processes: bool
) -> None:
    room = 16 * ranks
    tiers = [cpu(room), disk(tmp_path), redis(shared_server, tmp_path)]
    options: dict[str, Any] = {"world_size": ranks, "processes": processes}
    options |= {"prefix_caching": False}
    first = engine(chain_of(*tiers, staging=2 * room * SLOT), model=MLA, **options)
    ask(first)
    for name in ("disk", "redis"):
        assert measured(first, "stored_blocks", name) == BLOCKS
        assert measured(first, "stored_bytes", name) == BLOCKS * MLA.payload_bytes
    assert measured(first, "stored_blocks", "cpu") == BLOCKS * ranks, "each has memory of its own"
    ask(first)
    for tier in tiers[1:]:
        restarted = engine(chain_of(tier, staging=2 * room * SLOT), model=MLA, **options)
        ask(restarted)
        assert measured(restarted, "loaded_tokens", str(tier["type"])) == BLOCKS * 4
        assert measured(restarted, "loaded_blocks", str(tier["type"])) == BLOCKS * ranks


def test_what_one_stored_badly_none_loads(engine: MakeEngine, tmp_path: Path) -> None:
    first = engine(chain_of(disk(tmp_path)), model=MLA, world_size=2, prefix_caching=False)
    ask(first)
    damage_disk(tmp_path)
    ask(first)
    assert measured(first, "load_failures", "disk") > 0
    ask(first)


class OwnFacts:
    """Late facts that no two ranks share, as of weights that can't be identified."""

    def __init__(self) -> None:
        self._asked = 0

    def known(self, seconds: float = 0.0) -> Mapping[str, str]:
        self._asked += 1
        return {"weights": str(self._asked)}


def test_ranks_that_do_not_find_each_others_blocks_store_their_own(
    engine: MakeEngine, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"world_size": 2, "prefix_caching": False, "late_facts": OwnFacts()}
    one = engine(chain_of(disk(tmp_path)), model=MLA, **options)
    ask(one)
    assert measured(one, "stored_blocks", "disk") == BLOCKS * 2
    ask(one)
    assert measured(one, "loaded_tokens", "disk") == BLOCKS * 4
