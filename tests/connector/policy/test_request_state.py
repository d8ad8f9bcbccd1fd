"""What a request has waited for all tiers together."""

from __future__ import annotations

from tests.support.clock import Clock
from tiers.connector.policy.request_state import WaitBudget, lookup_seconds


def test_lookups_and_loads_of_all_tiers_count_together() -> None:
    clock = Clock()
    wait_budget = WaitBudget(clock, 2.0)
    wait_budget.looks()
    clock.now += 0.25
    wait_budget.found()
    wait_budget.loads()
    clock.now += 1.25
    assert wait_budget.left() == 0.5
    wait_budget.loaded()
    clock.now += 5  # the request runs
    wait_budget.loads()
    clock.now += 0.5
    assert wait_budget.left() == 0


def test_a_step_that_takes_long_is_no_wait_for_a_tier() -> None:
    clock = Clock()
    wait_budget = WaitBudget(clock, 2.0)
    wait_budget.looks()
    clock.now += 60
    wait_budget.found()
    assert wait_budget.left() == 2.0 - lookup_seconds(2.0) == 1.0


def test_a_short_wait_leaves_half_of_it_for_the_load() -> None:
    assert lookup_seconds(0.5) == 0.25
    assert lookup_seconds(3) == lookup_seconds(10) == 1.0


def test_whoever_waits_long_for_loads_waits_longer_for_lookups() -> None:
    assert lookup_seconds(100) == 10.0
