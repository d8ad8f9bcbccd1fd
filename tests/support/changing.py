"""Engines whose chain changes while they run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spec.chain import ChainSpec
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import MODEL, measured
from tiers.connector.multi.changes import Changes, PendingChange
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.stats import STATES

LIMIT = 60.0
"""Seconds, only to keep a test from hanging."""


@contextmanager
def running(chain: ChainSpec, ranks: int = 2, **more: Any) -> Iterator[ReplayEngine]:
    """An engine, of which nothing may be left in the end."""
    engine = ReplayEngine(chain, MODEL, world_size=ranks, **more)
    try:
        yield engine
        engine.settle()
        assert engine.scheduler.pool.num_free == engine.num_blocks
        for tier in tiers_of(engine):
            assert not tier.jobs_in_flight and not tier._stores.slots_pinned
    finally:
        if not engine.closed:
            engine.close()


def tiers_of(engine: ReplayEngine) -> list[OffloadingScheduler]:
    assert engine.connector is not None
    return [tier for tier in engine.connector.children if isinstance(tier, OffloadingScheduler)]


def changes_of(engine: ReplayEngine) -> Changes:
    assert engine.connector is not None and engine.connector.changes is not None
    return engine.connector.changes


def ask_for(engine: ReplayEngine, chain: ChainSpec, if_version: int | None = None) -> PendingChange:
    return changes_of(engine).request(chain, if_version)


def change(engine: ReplayEngine, chain: ChainSpec) -> PendingChange:
    """Ask for another chain, and step until that is over."""
    pending = ask_for(engine, chain)
    finish(engine, pending)
    return pending


def finish(engine: ReplayEngine, pending: PendingChange) -> None:
    until = time.monotonic() + LIMIT
    while not pending.wait(0):
        assert changes_of(engine).waits, "an engine that idles would make no step"
        if not engine.step():
            time.sleep(0.0005)
        assert time.monotonic() < until, "the change does not end"


def until_open(engine: ReplayEngine, tier: str) -> None:
    """Step until a tier is open, which may join later than its change is over."""
    until = time.monotonic() + LIMIT
    while measured(engine, "tier_state", tier) != STATES.index("open"):
        engine.step()
        time.sleep(0.0005)
        assert time.monotonic() < until, f"{tier} does not open"


def served(engine: ReplayEngine, prompt: list[int]) -> dict[str, float]:
    """Run a request, whose answer must be right; the tokens that each tier loaded for it."""
    before = {name: found.get("loaded_tokens", 0.0) for name, found in engine.stats.data.items()}
    assert engine.connector is not None
    engine.scheduler.pool.forget_all()
    request: ReplayRequest = engine.generate(prompt, 2)
    assert request.output == answer(MODEL, prompt, 2, len(engine.workers))
    engine.settle()
    engine.step()
    after = {name: found.get("loaded_tokens", 0.0) for name, found in engine.stats.data.items()}
    gained = {name: count - before.get(name, 0.0) for name, count in after.items()}  # type: ignore[operator]
    return {name: count for name, count in gained.items() if count}
