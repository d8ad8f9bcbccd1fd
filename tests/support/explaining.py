"""What replay engines tell of their requests."""

from __future__ import annotations

from typing import Any

from tests.support.replay import ReplayEngine
from tiers.explain.explanations import Explanations

Told = dict[str, Any]


def explanations_of(engine: ReplayEngine) -> Explanations:
    """Those of the engine's chain."""
    assert engine.connector is not None
    explainer = engine.connector.explainer
    assert isinstance(explainer, Explanations)
    return explainer


def explained(engine: ReplayEngine) -> list[Told]:
    """All requests that are known, oldest first."""
    known = explanations_of(engine)
    return [known.accounts.of(notes) for notes in known.all()]


def last_told(engine: ReplayEngine) -> Told:
    """The last request."""
    return explained(engine)[-1]


def tier_of(told: Told, name: str, attempt: int = -1) -> Told:
    """What is told of one tier in an attempt of a request."""
    (one,) = [tier for tier in told["attempts"][attempt]["tiers"] if tier["tier"] == name]
    return dict(one)


def check_sums(told: list[Told], external_hits: float) -> None:
    """Each request adds up, and all of them to what the engine counted."""
    assert [one for one in told if not one["holds"]] == []
    for one in told:
        for attempt in one["attempts"]:
            if attempt["computed"] is None:
                continue  # it never ran
            loaded = sum(attempt["loaded"].values())
            parts = attempt["own_cache"], loaded, attempt["elsewhere"], attempt["computed"]
            assert attempt["tokens"] == sum(parts)
            assert min(parts) >= 0 == attempt["elsewhere"]
            assert loaded == sum(tier["tokens"] for tier in attempt["tiers"])
    assert sum(sum(one["external_hits"]["tiers"].values()) for one in told) == external_hits
