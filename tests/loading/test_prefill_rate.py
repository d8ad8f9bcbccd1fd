"""How fast an engine computes prompts, whatever else it does meanwhile."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from tests.support.fake_requests import FakeRequest, first_step
from tiers.connector.policy.request_state import RequestTable
from tiers.contract.engine_info import EngineInfo
from tiers.loading.prefill_rate import IN_FLIGHT, PrefillRate


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> PrefillRate:
    return PrefillRate(clock)


class Steps:
    """Steps of requests of a thousand tokens each."""

    def __init__(self, meter: PrefillRate) -> None:
        self._meter = meter
        self._requests = RequestTable(EngineInfo({}, 16, 16, num_blocks=0))
        for name in "abc":
            self._requests.of(FakeRequest(name, 1000)).prompt_tokens = 1000

    def begin(self, name: str, computed: int, tokens: int) -> int | None:
        step = self._requests.begin_step(first_step(name, computed, tokens))
        return self._meter.step_begins(step.prompt_tokens)


@pytest.fixture
def steps(meter: PrefillRate) -> Steps:
    return Steps(meter)


def test_idle_time_counts_for_nothing(meter: PrefillRate, steps: Steps, clock: Clock) -> None:
    for name in "abc":
        clock.now += 3600
        number = steps.begin(name, 0, 1000)
        clock.now += 2
        meter.step_ended(number)
    assert meter.seconds_per_token == pytest.approx(0.002)


def test_an_engine_that_schedules_ahead_is_measured_by_its_results(
    meter: PrefillRate, steps: Steps, clock: Clock
) -> None:
    numbers = [steps.begin("a", start, 250) for start in (0, 250)]
    for start in (500, 750, 1000, 1001):
        clock.now += 0.5
        meter.step_ended(numbers.pop(0))
        numbers.append(steps.begin("a", start, 250 if start < 1000 else 1))
    assert meter.seconds_per_token == pytest.approx(0.002)


def test_decoding_is_no_prefill(meter: PrefillRate, steps: Steps, clock: Clock) -> None:
    assert steps.begin("a", 1000, 1) is None, "it answers"
    assert steps.begin("a", 990, 100) is None, "drafts are no prompt"
    assert steps.begin("unknown", 0, 1000) is None
    meter.step_ended(None)
    assert meter.seconds_per_token is None
    number = steps.begin("b", 0, 1000)
    clock.now += 1
    meter.step_ended(number)
    assert meter.seconds_per_token == pytest.approx(0.001)


def test_steps_whose_results_never_come_are_forgotten(
    meter: PrefillRate, steps: Steps, clock: Clock
) -> None:
    first = steps.begin("a", 0, 500)
    for _ in range(IN_FLIGHT):
        steps.begin("b", 0, 500)
    clock.now += 100
    assert not meter.step_ended(first)
    assert meter.seconds_per_token is None
