"""Loading compared with computing over real tiers: whoever serves, every answer is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from spec.chain import ChainSpec
from tests.support.faulty_stores import Faults, FaultyStore, Pace, SlowStore
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, SLOT, crowded, drive, measured, total
from tests.support.servers import RedisServer
from tiers.errors import TierUnavailable
from tiers.loading import comparison
from tiers.testing import GivenSpec, MemoryStore

PROMPT = list(range(402))
"""A hundred full blocks, and two tokens more."""

MakeEngine = Callable[..., ReplayEngine]


class WildClock:
    """A clock that jumps, so that nothing can be foreseen and all is chosen now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._time = 0.0

    def __call__(self) -> float:
        self._time += self._random.choice([0.0, 1e-6, 1e-4, 1e-3, 0.01])
        return self._time


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("load", ["longest", "stitched"])
def test_answers_stay_right_whatever_is_chosen(
    engine: MakeEngine, tmp_path: Path, shared_server: RedisServer, world_size: int, load: str
) -> None:
    made = engine(
        crowded(tmp_path, shared_server, world_size, load_policy=load, load_when="sooner"),
        num_blocks=24,
        prefix_caching=False,
        world_size=world_size,
        now=WildClock(world_size),
    )
    for seed in range(2):
        drive(made, seed, abort=0.3 * seed, world_size=world_size)
    assert total(made, "loaded_tokens") > 0
    assert measured(made, "load_tokens_per_second", "disk") > 0


class PromptSpec(GivenSpec):
    """A tier that answers in the step that asks. Of tiers that answer later, the first to answer
    may serve alone."""

    is_prompt: ClassVar[bool] = True


def given(name: str, faults: Faults) -> GivenSpec:
    return PromptSpec(type="given", name=name).over(FaultyStore(MemoryStore(), faults))


def chain(*tiers: GivenSpec) -> ChainSpec:
    # All is loaded that comes in time, so that no engine is too fast for these tests.
    return ChainSpec(version=1, load_when="always", staging=256 * SLOT, tiers=tiers)


def ask(made: ReplayEngine) -> int:
    """Tokens that the usual prompt loads."""
    request = made.generate(PROMPT, 1)
    made.settle()
    assert request.output == answer(MODEL, PROMPT, 1)
    return request.loaded_tokens


@pytest.fixture
def all_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every load be long beside computing, however fast this machine is."""
    monkeypatch.setattr(comparison, "ENOUGH", 0.0)


@pytest.mark.usefixtures("all_long")
def test_two_tiers_share_a_prefix_that_both_have_once_they_are_measured(
    engine: MakeEngine,
) -> None:
    made = engine(
        chain(given("one", Faults()), given("other", Faults())),
        prefix_caching=False,
        num_blocks=128,
    )
    loaded = [ask(made) for _ in range(30)]
    assert loaded == [0] + [400] * 29
    assert made.stats.data["one"]["loaded_tokens"] != 29 * 400
    assert total(made, "loaded_tokens") == 29 * 400


def test_a_tier_that_is_down_is_left_to_the_others(engine: MakeEngine) -> None:
    down = Faults()
    made = engine(
        chain(given("one", down), given("other", Faults())), prefix_caching=False, num_blocks=128
    )
    for _ in range(10):
        ask(made)
    down.fail("has", "get", error=TierUnavailable("down"), chance=1.0)
    loaded = [ask(made) for _ in range(8)]
    assert loaded[-1] == 400


@pytest.mark.usefixtures("all_long")
def test_a_tier_that_boasts_loses_its_part(engine: MakeEngine) -> None:
    """It says that it has all, at once, and delivers nothing: with each failure less is asked of
    it, and what precedes its part is used."""
    boasts = Faults()
    # The boastful tier was the faster one, on whatever machine this runs: much is asked of it.
    slower = SlowStore(MemoryStore(), Pace(lambda verb, num_bytes: 0.02 * (verb == "get")))
    made = engine(
        chain(given("boastful", boasts), PromptSpec(type="given", name="honest").over(slower)),
        prefix_caching=False,
        num_blocks=128,
    )
    for _ in range(10):
        ask(made)
    boasts.invented, boasts.missing = 1.0, 1.0
    loaded = [ask(made) for _ in range(30)]
    assert max(loaded[-5:]) >= 390
    assert total(made, "load_failures") > 0
