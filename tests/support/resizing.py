"""Changes of a tier's capacity in a running replay engine, in the two phases of every change."""

from __future__ import annotations

from typing import Any

from spec.offloading import OffloadingSpec
from tests.support.replay import ReplayEngine


def halves(engine: ReplayEngine, tier: str) -> tuple[Any, list[Any]]:
    """The scheduler's half of a tier, and each worker's."""
    assert engine.connector is not None
    place = engine.connector.names.index(tier)
    workers = [worker.connector.children[place] for worker in engine.workers]  # type: ignore[attr-defined]
    return engine.connector.children[place], workers


def resize(engine: ReplayEngine, spec: OffloadingSpec, capacity: int) -> list[str]:
    """Give a tier this capacity, between two steps; the reasons of ranks that refuse it: then
    nothing changes."""
    scheduler, workers = halves(engine, spec.tier_name)
    resized = spec.model_copy(update={"capacity": capacity})
    reasons = [reason for worker in workers if (reason := worker.prepare_resize(resized))]
    for worker in workers:
        worker.abort_resize() if reasons else worker.retune(resized)
    if not reasons:
        scheduler.retune(resized, scheduler._chain)
    return reasons
