"""The load policy `cheapest` over real tiers: whatever it chooses, every answer is right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.replay_chains import MODEL, chain_of, cpu, crowded, disk, drive, measured, total
from tests.support.servers import RedisServer
from tiers.engine.replay import ReplayEngine, answer

PROMPT = list(range(50))
"""Twelve full blocks, and two tokens more."""

MakeEngine = Callable[..., ReplayEngine]


class WildClock:
    """A clock that jumps, so that nothing can be foreseen and all is chosen now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._time = 0.0

    def __call__(self) -> float:
        self._time += self._random.choice([0.0, 1e-6, 1e-4, 1e-3, 0.01])
        return self._time


CHEAPEST: dict[str, Any] = {"load_policy": "cheapest", "cheapest": {"min_tokens": 4}}


@pytest.mark.parametrize("world_size", [1, 2])
def test_answers_stay_right_whatever_is_chosen(
    engine: MakeEngine, tmp_path: Path, shared_server: RedisServer, world_size: int
) -> None:
    made = engine(
        crowded(tmp_path, shared_server, world_size, **CHEAPEST),
        num_blocks=24,
        prefix_caching=False,
        world_size=world_size,
        now=WildClock(world_size),
    )
    for seed in range(2):
        drive(made, seed, abort=0.3 * seed, world_size=world_size)
    counted = made.stats.data
    assert {tier for tier, c in counted.items() if c.get("loaded_tokens")} == set(counted)
    assert total(made, "recompute_preferred") > 0
    assert measured(made, "prefill_tokens_per_second", "disk") > 0
    assert measured(made, "load_tokens_per_second", "disk") > 0


def test_a_prefix_that_is_quicker_to_load_is_loaded(engine: MakeEngine, tmp_path: Path) -> None:
    """Every look at the clock takes a second, so that a step does; loads take real time."""
    looks = itertools.count()
    chain = chain_of(cpu(), disk(tmp_path), **CHEAPEST)
    made = engine(chain, prefix_caching=False, now=lambda: float(next(looks)))

    def ask(prompt: list[int]) -> int:
        request = made.generate(prompt, 1)
        made.settle()
        assert request.output == answer(MODEL, prompt, 1)
        return request.loaded_tokens

    assert ask(PROMPT) == 0
    assert ask(PROMPT) == 48
    assert ask([*PROMPT[:40], *range(90, 100)]) == 40


def test_a_prefix_shorter_than_the_least_is_computed(engine: MakeEngine, tmp_path: Path) -> None:
    careful = CHEAPEST | {"cheapest": {"min_tokens": 20}}
    made = engine(chain_of(cpu(), disk(tmp_path), **careful), prefix_caching=False)
    made.generate(PROMPT, 1)
    made.settle()
    other = [*PROMPT[:16], *range(90, 120)]
    assert made.generate(other, 1).loaded_tokens == 0
