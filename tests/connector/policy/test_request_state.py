"""What a request has waited for all tiers together, and which of its blocks are not stored."""

from __future__ import annotations

import pytest

from bench.scheduled import Step
from tests.support.clock import Clock
from tests.support.fake_requests import FakeNewRequest, FakeRequest, FakeStep, first_step
from tiers.connector.policy.request_params import UNLIMITED
from tiers.connector.policy.request_state import (
    NO_BLOCKS,
    RequestState,
    RequestTable,
    WaitBudget,
    lookup_seconds,
)
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.marks import MediaMark, RequestMark
from tiers.lab.replay.requests import CachedRequests


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


@pytest.mark.parametrize(
    ("before", "loads", "omitted"),
    [
        (0, NO_BLOCKS, ()),
        (8, NO_BLOCKS, (range(2),)),
        (39, NO_BLOCKS, (range(10),)),
        (38, NO_BLOCKS, (range(9),)),
        (8, range(2), ()),
        (16, range(1, 3), (range(1), range(3, 4))),
        (8, range(1, 5), (range(1),)),
    ],
    ids=[
        "nothing was there",
        "the engine's own, or from another connector",
        "all, of which the last token is computed again",
        "all but a token of a whole block",
        "from tiers",
        "own, tiers, another connector",
        "tiers failed in the midst",
    ],
)
def test_blocks_that_neither_engine_nor_tiers_brought_are_not_stored(
    before: int, loads: range, omitted: tuple[range, ...]
) -> None:
    """Blocks of four tokens; of another request all are."""
    table = RequestTable(EngineInfo({}, 4, 4, 100), store="computed")
    params = {"kvtiers": {"store": True}}
    requests = FakeRequest(), FakeRequest("other", kv_transfer_params=params)
    for request in requests:
        request_state = table.of(request)
        request_state.loads, request_state.tables = loads, ([*range(10)],)
        table.begin_step(first_step(request.request_id, before, 1))
    first, other = (table.of(request).omitted for request in requests)
    assert (first, other) == (omitted, ())


def test_a_request_may_ask_that_nothing_of_it_is_stored() -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    for store in (False, True):
        params = {"kvtiers": {"store": store}}
        assert table.of(FakeRequest(str(store), kv_transfer_params=params)).stores is store


def test_a_step_that_completes_no_block_is_one_of_an_answer_unless_it_computes_a_prompt() -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    request_state = table.of(FakeRequest("r", block_hashes=[b"a", b"b"]))
    request_state.prompt_tokens = 6
    table.begin_step(FakeStep({"r": 5}, FakeNewRequest("r", 0, ([3, 4],))))
    found = []
    for before in (5, 6, 7):
        again = CachedRequests(["r"], set(), [None], [before])
        step = table.begin_step(Step([], {"r": 1}, again))
        found.append((step.prompt_tokens, [run.complete for run in step.scheduled]))
        assert step.overwritten == {4}, "whoever reads it yet must have ended"
    assert found == [(1, [1]), (0, []), (0, [2])]
    assert request_state.computed == 8


def test_what_an_answer_computes_since_the_weights_changed_is_not_older() -> None:
    """A group of small blocks has completed some of which another request finds, and stores on."""
    table = RequestTable(EngineInfo({}, 8, 8, 100, groups=(KVGroup(8), KVGroup(4))))
    table.weights_changed()
    first, other = (table.of(FakeRequest(name, block_hashes=[b"a", b"b"])) for name in "ro")
    first.prompt_tokens = 8
    table.begin_step(FakeStep({"r": 8}, FakeNewRequest("r", 0, ([1], [2, 3]))))
    added = {8: ([4], [5]), 12: ([], [6])}
    for before in range(8, 16):
        again = CachedRequests(["r"], set(), [added.get(before)], [before])
        table.begin_step(Step([], {"r": 1}, again))
    table.begin_step(FakeStep({"o": 1}, FakeNewRequest("o", 16, ([1, 4, 7], [2, 3, 5, 6, 8]))))
    assert not other.is_outdated


@pytest.mark.parametrize("why", ["limits", "a reset", "its adapter", "its media"])
def test_what_may_not_be_stored_is_not(why: str) -> None:
    marks = RequestMark(shared=why != "its adapter"), MediaMark(shared=why != "its media")
    budget = WaitBudget(Clock())
    state = RequestState(FakeRequest(), UNLIMITED, *marks, budget, why != "limits", "all")
    state.is_outdated = why == "a reset"
    assert not state.stores
