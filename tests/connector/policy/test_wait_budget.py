"""Patience: what a request has waited for all tiers together."""

from __future__ import annotations

from tiers.connector.policy.wait_budget import Patience


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lookups_and_loads_of_all_tiers_count_together() -> None:
    clock = Clock()
    patience = Patience(clock, 2.0)
    patience.looks("a")
    clock.now += 0.25
    patience.found("a")
    patience.loads("a")
    clock.now += 1.25
    assert patience.left("a") == 0.5 and patience.left("b") == 2.0
    patience.loaded("a")
    clock.now += 5  # the request runs
    patience.loads("a")
    clock.now += 0.5
    assert patience.left("a") == 0
    patience.forget("a")
    assert patience.left("a") == 2.0


def test_a_step_that_takes_long_is_no_wait_for_a_tier() -> None:
    clock = Clock()
    patience = Patience(clock, 2.0)
    patience.looks("a")
    clock.now += 60
    patience.found("a")
    assert patience.left("a") == 2.0 - patience.lookup_seconds == 1.0


def test_a_short_wait_leaves_half_of_it_for_the_load() -> None:
    assert Patience(Clock(), 0.5).lookup_seconds == 0.25
    assert Patience(Clock()).lookup_seconds == 1.0
