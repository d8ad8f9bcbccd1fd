"""Ghosts of a replay engine's tiers say what more room or another threshold would have brought."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from spec.errors import SpecError
from tests.support.clock import Clock, wait_for
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.replay_chains import HYBRID, MODEL, Marked, chain_of, cpu, measured
from tiers.connector.observers import GhostWatcher
from tiers.contract.engine_info import EngineInfo

SIZE = MODEL.block_tokens
GHOSTS: list[dict[str, Any]] = [
    {"tier": "cpu", "capacity": "4x"},
    {"tier": "cpu", "store_threshold": 2},
]
LABELS = ["cpu", "cpu (capacity: 4x)", "cpu (store_threshold: 2)"]
ABSENT: dict[str, Any] = {"tier": "disk", "capacity": "1MiB", "load_rate": "1GB/s"}


def report(engine: ReplayEngine, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Let the ghosts report on all requests so far."""
    assert engine.connector is not None
    *_, watcher = engine.connector._observers
    assert isinstance(watcher, GhostWatcher)
    # They look at the time only when they have followed what they took.
    wait_for(lambda: not len(watcher._ghosts._handoff))
    clock.now += 700
    wait_for(lambda: "ghosts: " in caplog.text)


def test_more_room_and_another_threshold(caplog: pytest.LogCaptureFixture) -> None:
    """Ten prompts in turn, of which the tier holds four: by turns it has lost each."""
    clock = Clock()
    with caplog.at_level(logging.INFO):
        chain = chain_of(cpu(17), ghosts=[*GHOSTS, ABSENT])
        engine = ReplayEngine(chain, num_blocks=8, now=clock)
        for _ in range(5):
            for prompt in range(10):
                engine.generate([prompt] * (4 * SIZE), max_tokens=1)
        report(engine, clock, caplog)
        engine.generate([99], max_tokens=1)
        engine.settle()
        engine.close()
    hits = {label: measured(engine, "ghost_hit_ratio", label) for label in LABELS}
    stores = {label: measured(engine, "ghost_store_ratio", label) for label in LABELS}
    assert hits == pytest.approx({LABELS[0]: 0.0, LABELS[1]: 0.8, LABELS[2]: 0.0})
    assert stores[LABELS[0]] == pytest.approx(1.0) and stores[LABELS[1]] == pytest.approx(0.2)
    assert stores[LABELS[2]] < 0.9
    assert measured(engine, "hit_tokens", "cpu") == 0, "the tier itself had nothing, indeed"
    assert "cpu (capacity: 4x) would have 80.0%" in caplog.text
    assert measured(engine, "ghost_hit_ratio", "disk (capacity: 1MiB)") == pytest.approx(0.8)


def test_what_windows_reach_takes_room_at_the_ends_of_prefixes_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of three parts that blocks have most are kept of the last few of each prompt."""
    clock = Clock()
    with caplog.at_level(logging.INFO):
        chain = chain_of(cpu(200), ghosts=GHOSTS[:1])
        engine = ReplayEngine(chain, HYBRID, prefix_caching=False, now=clock)
        for _ in range(5):
            for prompt in range(5):
                engine.generate([prompt] * (20 * SIZE), max_tokens=1)
        report(engine, clock, caplog)
        engine.generate([99], max_tokens=1)
        engine.settle()
        engine.close()
    assert measured(engine, "hit_tokens", "cpu") == 4 * 5 * 19 * SIZE
    assert measured(engine, "ghost_hit_ratio", "cpu") == pytest.approx(4 / 5)


def test_other_adapters_and_generations_are_other_blocks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are to the tier: what was stored for one is not found for the other."""
    plain, mark, clock = ReplayModel.engine_info, b"", Clock()

    def engine_info(model: ReplayModel, num_blocks: int) -> EngineInfo:
        return replace(plain(model, num_blocks), marks=Marked(lambda: mark))

    monkeypatch.setattr(ReplayModel, "engine_info", engine_info)
    with caplog.at_level(logging.INFO):
        chain = chain_of(cpu(), ghosts=GHOSTS[:1])
        engine = ReplayEngine(chain, prefix_caching=False, now=clock)
        for _ in range(2):
            engine.generate(range(4 * SIZE), max_tokens=1)
        mark = b"adapter"
        engine.generate(range(4 * SIZE), max_tokens=1)
        engine.reset_cache()
        engine.generate(range(4 * SIZE), max_tokens=1)
        report(engine, clock, caplog)
        engine.settle()
        engine.close()
    assert "cpu would have 25.0%" in caplog.text


@pytest.mark.parametrize(
    ("ghosts", "why"),
    [
        ([{"tier": "disk", "capacity": "2x"}], "no tier is called 'disk'; use cpu"),
        ([{"tier": "disk", "capacity": "1TB"}], "use cpu, or write load_rate for one that the"),
        ([{**ABSENT, "capacity": "2x"}], "the chain lacks tier 'disk'; write capacity as a size"),
        ([{**ABSENT, "tier": "cpu"}], "what tier 'cpu' loads is measured; remove load_rate"),
        ([{"tier": "cpu"}], "write capacity or store_threshold, or both"),
        ([{"tier": "cpu", "capacity": "2 x"}], "write a size like 64GiB, or a factor like 2x"),
        ([{"tier": "cpu", "capacity": "0x"}], "write a size like 64GiB, or a factor like 2x"),
        ([GHOSTS[0], GHOSTS[0]], r"two ghosts are cpu \(capacity: 4x\)"),
        ([{"tier": "cpu", "capacity": f"{n}x"} for n in range(1, 6)], "keep 4 ghosts at most"),
    ],
)
def test_what_is_no_ghost(ghosts: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        chain_of(cpu(), ghosts=ghosts)


def test_a_tier_without_a_capacity_has_none() -> None:
    redis = {"type": "redis", "url": "redis://cache"}
    with pytest.raises(SpecError, match="tier 'redis' has no capacity here"):
        chain_of(redis, ghosts=[{"tier": "redis", "capacity": "1TiB"}])
