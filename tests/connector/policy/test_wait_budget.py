"""WaitBudget: what a request has waited for all tiers together."""

from __future__ import annotations

from tests.support.clock import Clock
from tiers.connector.policy.wait_budget import WaitBudget


def test_lookups_and_loads_of_all_tiers_count_together() -> None:
    clock = Clock()
    wait_budget = WaitBudget(clock, 2.0)
    wait_budget.looks("a")
    clock.now += 0.25
    wait_budget.found("a")
    wait_budget.loads("a")
    clock.now += 1.25
    assert wait_budget.left("a") == 0.5 and wait_budget.left("b") == 2.0
    wait_budget.loaded("a")
    clock.now += 5  # the request runs
    wait_budget.loads("a")
    clock.now += 0.5
    assert wait_budget.left("a") == 0
    wait_budget.forget("a")
    assert wait_budget.left("a") == 2.0


def test_a_step_that_takes_long_is_no_wait_for_a_tier() -> None:
    clock = Clock()
    wait_budget = WaitBudget(clock, 2.0)
    wait_budget.looks("a")
    clock.now += 60
    wait_budget.found("a")
    assert wait_budget.left("a") == 2.0 - wait_budget.lookup_seconds == 1.0


def test_a_short_wait_leaves_half_of_it_for_the_load() -> None:
    assert WaitBudget(Clock(), 0.5).lookup_seconds == 0.25
    assert WaitBudget(Clock()).lookup_seconds == 1.0
