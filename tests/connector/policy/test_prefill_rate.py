"""How fast an engine computes prompts, whatever else it does meanwhile."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from tests.support.fake_requests import FakeRequest, first_step
from tiers.connector.policy.cheapest.prefill_rate import UNDER_WAY, PrefillRate


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> PrefillRate:
    made = PrefillRate(clock, min_tokens=64)
    for name in "abc":
        made.expect(FakeRequest(name, 1000))
    return made


def test_idle_time_counts_for_nothing(meter: PrefillRate, clock: Clock) -> None:
    for name in "abc":
        clock.now += 3600
        number = meter.step_begins(first_step(name, 0, 1000))
        clock.now += 2
        meter.step_ended(number)
    assert meter.seconds_per_token == pytest.approx(0.002)


def test_an_engine_that_schedules_ahead_is_measured_by_its_results(
    meter: PrefillRate, clock: Clock
) -> None:
    numbers = [meter.step_begins(first_step("a", start, 250)) for start in (0, 250)]
    for start in (500, 750, 1000, 1001):
        clock.now += 0.5
        meter.step_ended(numbers.pop(0))
        numbers.append(meter.step_begins(first_step("a", start, 250 if start < 1000 else 1)))
    assert meter.seconds_per_token == pytest.approx(0.002)


def test_decoding_is_no_prefill(meter: PrefillRate, clock: Clock) -> None:
    assert meter.step_begins(first_step("a", 1000, 1)) is None, "it answers"
    assert meter.step_begins(first_step("a", 990, 100)) is None, "drafts are no prompt"
    assert meter.step_begins(first_step("unknown", 0, 1000)) is None
    meter.step_ended(None)
    assert meter.seconds_per_token is None
    number = meter.step_begins(first_step("b", 0, 1000))
    clock.now += 1
    meter.step_ended(number)
    assert meter.seconds_per_token == pytest.approx(0.001)


def test_steps_whose_results_never_come_are_forgotten(meter: PrefillRate, clock: Clock) -> None:
    first = meter.step_begins(first_step("a", 0, 500))
    for _ in range(UNDER_WAY):
        meter.step_begins(first_step("b", 0, 500))
    clock.now += 100
    assert meter.step_ended(first) == 0
    assert meter.seconds_per_token is None
