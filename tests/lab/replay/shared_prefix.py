"""Requests of one prefix in the replay engine."""

from __future__ import annotations

from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import MODEL, total

PREFIX = [7 * token % 997 for token in range(16 * MODEL.block_tokens)]


def fill(made: ReplayEngine, salt: str = "") -> ReplayRequest:
    """Store the prefix in the tiers; the engine itself forgets it."""
    request = made.generate([*PREFIX, 1], 1, salt)
    made.settle()
    made.scheduler.pool.forget_all()
    return request


def add(made: ReplayEngine, number: int, salt: str = "") -> ReplayRequest:
    """Add a request of the prefix and some tokens of its own."""
    return made.add([*PREFIX, 1000 + number, 3], 3, salt)


def ended(made: ReplayEngine, requests: list[ReplayRequest], world_size: int = 1) -> None:
    """Run to the end; every answer must be right."""
    made.run()
    for request in requests:
        assert request.output == answer(made.model, request.prompt, 3, world_size)
    made.settle()


def hits(made: ReplayEngine) -> float:
    """Blocks that requests were to load."""
    return total(made, "hit_tokens") / MODEL.block_tokens
