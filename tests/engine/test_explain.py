"""Where requests' tokens came from: what the scheduler noted, and what the engine counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES
from tests.support.explaining import Told, check_sums, explained, last_told, tier_of
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.replay_chains import (
    HYBRID,
    MODEL,
    WINDOWS,
    chain_of,
    cpu,
    disk,
    drive,
    measured,
    workload,
)

MakeEngine = Callable[..., ReplayEngine]


@pytest.fixture
def explaining(engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    """Make engines that explain over these tiers."""

    def make(*tiers: dict[str, Any], options: Any = None, **chain: Any) -> ReplayEngine:
        return engine(chain_of(*tiers, explain={}, **chain), **(options or {}))

    return make


def check(told: list[Told], engine: ReplayEngine) -> None:
    """Each request adds up, and all of them to what the engine and the tiers counted."""
    check_sums(told, engine.scheduler.external_hits)
    hits = [one["external_hits"]["tiers"] for one in told]
    for tier in engine.stats.data:
        assert sum(one.get(tier, 0) for one in hits) == measured(engine, "hit_tokens", tier)


@pytest.mark.parametrize(
    ("load", "model"),
    [*((load, MODEL) for load in LOAD_POLICIES), ("first", HYBRID), ("stitched", WINDOWS)],
)
def test_every_request_adds_up(
    explaining: MakeEngine, tmp_path: Path, load: str, model: ReplayModel
) -> None:
    blocks = 24 * len(model.windows)
    made = explaining(
        cpu(30), disk(tmp_path), load_policy=load, options={"num_blocks": blocks, "model": model}
    )
    for seed in (5, 5):
        if model is MODEL:
            drive(made, seed, abort=0.1)
        else:
            for prompt, tokens in workload(seed):
                made.add(prompt, tokens)
                made.step()
            made.run()
        made.settle()
    told = explained(made)
    assert len(told) > 110
    check(told, made)
    assert made.scheduler.external_hits > 0


def test_a_prefix_in_two_tiers_and_the_engine(explaining: MakeEngine, tmp_path: Path) -> None:
    made = explaining(cpu(4), disk(tmp_path), options={"num_blocks": 20})
    prompt = [*range(60)]
    made.generate(prompt, 2)
    made.settle()
    made.generate([*range(900, 950)], 2)
    made.settle()
    made.generate(prompt, 2)
    told = last_told(made)
    (attempt,) = told["attempts"]
    assert attempt["own_cache"] + sum(attempt["loaded"].values()) + attempt["computed"] == 60
    assert tier_of(told, "disk")["why"] == "served"
    assert told["state"] == "finished"
