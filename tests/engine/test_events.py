"""Events tell which tier holds which block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.replay_chains import (
    MODEL,
    chain_of,
    coverage_of,
    cpu,
    damage_disk,
    disk,
    drive,
    redis,
    workload,
)
from tests.support.servers import RedisServer
from tiers.engine.replay import ReplayEngine
from tiers.engine.replay.requests import ReplayRequest


def told(engine: ReplayEngine, tier: str) -> set[bytes]:
    """The blocks that a tier holds by its events, each of which must change something."""
    held: set[bytes] = set()
    for event in engine.events:
        if event.tier == tier:
            hashes = set(event.hashes)
            assert hashes.isdisjoint(held) if event.stored else hashes <= held
            held = held | hashes if event.stored else held - hashes
    return held


def test_events_of_a_small_host_tier_are_what_it_holds(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    made = engine(chain_of(cpu(20), disk(tmp_path)), num_blocks=24, kv_events=True)
    drive(made, seed=5, abort=0.2)
    made.settle()
    held = told(made, "cpu")
    assert 0 < len(held) <= 20
    assert any(not event.stored for event in made.events), "the tier was meant to be too small"
    for number, (prompt, _) in enumerate(workload(5)):
        request = ReplayRequest(f"probe-{number}", prompt, 1, MODEL.block_tokens)
        assert coverage_of(made, request) == [one in held for one in request.block_hashes]


def test_a_reset_removes_what_a_host_tier_held(engine: Callable[..., ReplayEngine]) -> None:
    made = engine(chain_of(cpu()), kv_events=True)
    made.generate(range(40), 1)
    made.settle()
    assert len(told(made, "cpu")) == 10
    made.reset_cache()
    made.step()
    assert told(made, "cpu") == set()


def test_a_block_that_failed_to_load_is_told_as_removed(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    made = engine(chain_of(disk(tmp_path)), prefix_caching=False, kv_events=True)
    made.generate(range(40), 1)
    made.settle()
    assert len(told(made, "disk")) == 10
    damage_disk(tmp_path)
    made.generate([*range(38), 1, 2], 1)
    assert any(not event.stored for event in made.events)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_that_engines_share_is_told_by_the_one_that_stored_it(
    engine: Callable[..., ReplayEngine],
    shared_server: RedisServer,
    tmp_path: Path,
    world_size: int,
) -> None:
    tiers = redis(shared_server, tmp_path, name="slow"), disk(tmp_path)
    options = {"kv_events": True, "world_size": world_size}
    first, second = (engine(chain_of(*tiers, promote=False), **options) for _ in range(2))
    for made in (first, second):
        made.generate(range(40), 1)
        made.settle()
    second.generate([*range(40), *range(7, 27)], 1)
    second.settle()
    for tier in ("slow", "disk"):
        assert len(told(first, tier)) == 10
        assert len(told(second, tier)) == 5, "what followed the first engine's blocks is its own"


def test_nothing_is_kept_for_an_engine_that_takes_no_events(
    engine: Callable[..., ReplayEngine],
) -> None:
    made = engine(chain_of(cpu(4)))
    drive(made, seed=1)
    assert made.events == []
