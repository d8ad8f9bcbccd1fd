"""The load policy `soonest` over real tiers: whoever serves which block, every answer is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from spec.chain import ChainSpec
from tests.engine.replay.test_cheapest import WildClock
from tests.support.replay_chains import MODEL, SLOT, crowded, drive, total
from tests.support.servers import RedisServer
from tiers.engine.replay import ReplayEngine, answer
from tiers.errors import TierUnavailable
from tiers.testing import Faults, FaultyStore, GivenSpec, MemoryStore

PROMPT = list(range(50))
"""Twelve full blocks, and two tokens more."""

MakeEngine = Callable[..., ReplayEngine]


@pytest.mark.parametrize("world_size", [1, 2])
def test_answers_stay_right_whatever_is_chosen(
    engine: MakeEngine, tmp_path: Path, shared_server: RedisServer, world_size: int
) -> None:
    made = engine(
        crowded(tmp_path, shared_server, world_size, load_policy="soonest"),
        num_blocks=24,
        prefix_caching=False,
        world_size=world_size,
        now=WildClock(world_size),
    )
    drive(made, world_size, abort=0.3 * (world_size - 1), world_size=world_size)
    counted = made.stats.data
    assert {tier for tier, c in counted.items() if c.get("loaded_tokens")} == set(counted)


class PromptSpec(GivenSpec):
    """A tier that answers in the step that asks. Of tiers that answer later, the first to answer
    may serve alone."""

    is_prompt: ClassVar[bool] = True


def given(name: str, faults: Faults) -> GivenSpec:
    return GivenSpec(type="given", name=name).over(FaultyStore(MemoryStore(), faults))


def soonest_of(*tiers: GivenSpec) -> ChainSpec:
    return ChainSpec(version=1, load_policy="soonest", staging=64 * SLOT, tiers=tiers)


def ask(made: ReplayEngine) -> int:
    """Tokens that the usual prompt loads."""
    request = made.generate(PROMPT, 1)
    made.settle()
    assert request.output == answer(MODEL, PROMPT, 1)
    return request.loaded_tokens


def test_two_tiers_share_a_prefix_that_both_have(engine: MakeEngine) -> None:
    tiers = [PromptSpec(type="given", name=name).over(MemoryStore()) for name in ("one", "other")]
    made = engine(soonest_of(*tiers), prefix_caching=False)
    assert [ask(made), ask(made)] == [0, 48]
    loaded = [made.stats.data[name]["loaded_tokens"] for name in ("one", "other")]
    assert loaded == [24, 24], "neither was ever measured"


def test_a_tier_that_is_down_is_left_to_the_others(engine: MakeEngine) -> None:
    down = Faults()
    tiers = given("one", down), given("other", Faults())
    made = engine(soonest_of(*tiers), prefix_caching=False)
    ask(made)
    down.fail("has", "get", error=TierUnavailable("down"), chance=1.0)
    loaded = [ask(made) for _ in range(8)]
    assert loaded[-1] == 48
    assert total(made, "loaded_tokens") >= 48


def test_a_tier_that_boasts_loses_its_part(engine: MakeEngine) -> None:
    """It says that it has all, at once, and delivers nothing: with each failure less is asked of
    it, and what precedes its part is used."""
    boasts = Faults()
    boasts.invented, boasts.missing = 1.0, 1.0
    tiers = given("boastful", boasts), given("honest", Faults())
    made = engine(soonest_of(*tiers), prefix_caching=False)
    loaded = [ask(made) for _ in range(8)]
    assert loaded[0] == 0 and loaded[-1] == 48
    assert total(made, "load_failures") > 0
