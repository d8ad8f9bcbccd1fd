"""Weights that change while the engine says nothing: no tier serves what they did not compute."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    cpu,
    disk,
    measured,
    redis,
    scheduler_of,
    total,
)
from tests.support.servers import RedisServer
from tiers.contract.stats import CHAIN

MakeEngine = Callable[..., ReplayEngine]
PROMPT, OTHER = list(range(50)), list(range(100, 150))
FULL = 48
"""Tokens of either prompt that lie in full blocks."""
NEW = dataclasses.replace(MODEL, weights=1)


class Shown:
    """What a rank shows of its weights, as a look finds it; by part."""

    parts = 3

    def __init__(self) -> None:
        self.weights = 0
        self.seen_parts: list[int] = []

    def look(self, part: int) -> Snapshot:
        self.seen_parts.append(part)
        return Snapshot(f"{part} of {self.weights}".encode())


class Snapshot:
    def __init__(self, shown: bytes) -> None:
        self._shown = shown

    def ready(self) -> bool:
        return True

    def seen(self) -> bytes:
        return self._shown


def change(made: ReplayEngine, shown: list[Shown], weights: int = 1) -> None:
    """Change the weights of all ranks, which some of them show."""
    worker: Any
    for worker in made.workers:
        worker._model = dataclasses.replace(worker._model, weights=weights)
    for one in shown:
        one.weights = weights


@pytest.mark.fault
@pytest.mark.parametrize(("ranks", "on_reset"), [(1, "forget"), (2, "keep")])
def test_nothing_is_served_to_or_by_other_weights(
    engine: MakeEngine,
    tiers: list[dict[str, Any]],
    ranks: int,
    on_reset: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two ranks one alone sees the change, as a stage of a pipeline whose own weights stay."""
    chain = chain_of(*tiers, on_reset=on_reset)
    shown = [Shown() for _ in range(ranks)]
    made = engine(chain, prefix_caching=False, world_size=ranks, weights=shown)
    made.generate(PROMPT, 3)
    made.settle()
    assert made.generate(PROMPT, 3).loaded_tokens == FULL

    change(made, shown[:1])
    for prompt in (PROMPT, OTHER):
        assert made.generate(prompt, 3).output == answer(NEW, prompt, 3, ranks)
        made.settle()
    (line,) = [r.getMessage() for r in caplog.records if "was not reset" in r.getMessage()]
    assert "weights" in line
    assert total(made, "load_failures") == 0, "no tier failed to load what was not wanted any more"
    assert made.connector is not None
    costs: list[Any] = [child.load_cost for child in made.connector.children]  # type: ignore[attr-defined]
    assert [cost.failures for cost in costs] == [0] * len(tiers), "nor counts as slower"
    assert made.generate(OTHER, 3).loaded_tokens == FULL, "what they compute is theirs"
    assert made.generate(OTHER, 3).output == answer(NEW, OTHER, 3, ranks)

    for loaded in (0, 0 if tiers[0]["type"] == "cpu" and len(tiers) == 1 else FULL):
        sibling = engine(chain, prefix_caching=False, world_size=ranks)
        request = sibling.generate(OTHER, 3)
        assert (request.loaded_tokens, request.output) == (loaded, answer(MODEL, OTHER, 3, ranks))
        sibling.settle()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_that_is_first_asked_after_a_change_is_nobody_else_s(
    engine: MakeEngine, tmp_path: Path, ranks: int
) -> None:
    """No load fails before it is stored."""
    chain = chain_of(disk(tmp_path))
    shown = [Shown() for _ in range(ranks)]
    made = engine(chain, prefix_caching=False, world_size=ranks, weights=shown)
    change(made, shown[-1:])
    made.generate(PROMPT, 3)
    made.settle()
    for loaded in (0, FULL):
        sibling = engine(chain, prefix_caching=False, world_size=ranks)
        request = sibling.generate(PROMPT, 3)
        assert (request.loaded_tokens, request.output) == (loaded, answer(MODEL, PROMPT, 3, ranks))
        sibling.settle()


def test_a_change_before_each_of_many_requests(engine: MakeEngine, tmp_path: Path) -> None:
    shown = Shown()
    made = engine(chain_of(cpu(), disk(tmp_path)), prefix_caching=False, weights=[shown])
    for weights in range(8):
        change(made, [shown], weights)
        model = dataclasses.replace(MODEL, weights=weights)
        for prompt in (PROMPT, OTHER, PROMPT):
            assert made.generate(prompt, 3).output == answer(model, prompt, 3)
    assert set(shown.seen_parts) == {0, 1, 2}, "all parts are looked at"


def test_what_the_engine_itself_keeps_of_other_weights_is_not_kept_for_it(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own cache still has it, and serves it, until it is evicted; a tier would go on."""
    shown = Shown()
    made = engine(chain_of(cpu(), disk(tmp_path)), weights=[shown])
    made.generate(PROMPT, 3)
    change(made, [shown])
    made.generate(OTHER, 3)
    made.settle()
    assert made.generate(PROMPT, 3).output != answer(NEW, PROMPT, 3), "as without tiers"
    made.settle()
    (said,) = [one for one in caplog.messages if "the weights changed" in one]
    assert "what begins with such KV is not stored (outdated_requests_total)" in said
    assert measured(made, "outdated_requests", CHAIN) == 1
    made.scheduler.pool.forget_all()
    request = made.generate(PROMPT, 3)
    assert (request.loaded_tokens, request.output) == (0, answer(NEW, PROMPT, 3))
    made.settle()
    made.scheduler.pool.forget_all()
    assert made.generate(PROMPT, 3).loaded_tokens == FULL, "what was computed since is stored"
    assert measured(made, "outdated_requests", CHAIN) == 1
    assert made.generate(OTHER, 3).output == answer(NEW, OTHER, 3)


@pytest.mark.parametrize("begun", ["at the start", "by a reset", "of its own"])
def test_what_was_computed_before_the_first_block_was_full_is_of_its_weights(
    engine: MakeEngine, begun: str
) -> None:
    """A generation's first block is half of old weights: nothing has been stored yet. `of its own`:
    as of an engine that is made to take other weights, and pauses for that without a reset."""
    shown = Shown()
    more = {"weights_change": begun == "of its own", "prefix_caching": False}
    made = engine(chain_of(cpu()), weights=[shown], **more)
    if begun == "by a reset":
        made.generate(OTHER, 3)
        assert made.reset_cache()
    request = made.add(PROMPT[:2], 20)
    while not request.output:
        made.step()
    change(made, [shown])
    made.run()
    made.settle()
    prompt = [*PROMPT[:2], *request.output, 1]
    assert made.generate(prompt, 3).output == answer(NEW, prompt, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_goes_on_after_a_failed_step_shows_that_nothing_is_stored(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    """As one does whose caller catches what a step raises: workers never hear of that step."""
    made = engine(chain_of(cpu(), disk(tmp_path)), prefix_caching=False, world_size=ranks)
    made.generate(PROMPT, 3)
    made.settle()
    stored = total(made, "stored_blocks")
    assert made.connector is not None and stored
    made.scheduler.give_orders(made.scheduler.plan())
    for prompt in (OTHER, PROMPT, OTHER, range(200, 250)):
        assert made.generate(prompt, 3).output == answer(MODEL, list(prompt), 3, ranks)
    made.settle()
    assert total(made, "stored_blocks") == stored and total(made, "store_dropped_down")
    assert made.generate(PROMPT, 3).loaded_tokens == FULL, "what was stored before is right"
    said = ("degraded", "a step of the engine failed: start it again")
    for place in range(2):
        assert scheduler_of(made, place)._tier.condition() == said
    assert "stores nothing from now on" in caplog.text


def test_weights_change_among_many_requests(
    engine: MakeEngine, tmp_path: Path, shared_server: RedisServer
) -> None:
    """With loads and stores under way, on two ranks, of which either sees it."""
    chain = chain_of(cpu(12), disk(tmp_path / "disk"), redis(shared_server, tmp_path))
    shown = [Shown(), Shown()]
    made = engine(chain, prefix_caching=False, world_size=2, weights=shown)
    prompts = [list(range(at, at + 40)) for at in range(0, 200, 20)]
    for weights in range(6):
        change(made, [shown[weights % 2]], weights)
        model = dataclasses.replace(MODEL, weights=weights)
        for _ in range(2):
            requests = [made.add(prompt, 3) for prompt in prompts]
            while made.scheduler.requests:
                made.step()
            for request, prompt in zip(requests, prompts, strict=True):
                assert request.output == answer(model, prompt, 3, 2)
    sibling = engine(chain, prefix_caching=False, world_size=2)
    for prompt in prompts:
        assert sibling.generate(prompt, 3).output == answer(MODEL, prompt, 3, 2)


def test_an_engine_on_one_rank_asks_nobody(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    made = engine(chain_of(disk(tmp_path)), prefix_caching=False, weights=[Shown()])
    made.generate(PROMPT, 3)
    assert made.connector is not None and not made.connector._agreement.waits
    assert not caplog.records
