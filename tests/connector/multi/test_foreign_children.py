"""Connectors of the engine's own as children: asked as their engine asks them, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES, LoadPolicy
from tests.support.children import BlockTier, Tier, chain
from tests.support.clock import Clock
from tests.support.fake_requests import (
    BLOCKS,
    IDLE_STEP,
    FakeNewRequest,
    FakeRequest,
    FakeStep,
    first_step,
)
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo


class Foreign(Tier):
    """Writes down for which requests, and from which token on, it was asked."""

    limits_requests = False

    def __init__(self, tokens: int | None = 0) -> None:
        super().__init__(tokens=tokens)
        self.asked: list[tuple[str, int]] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        self.asked.append((request.request_id, computed))
        return super().get_num_new_matched_tokens(request, computed)

    def update_connector_output(self, output: Any) -> None:
        """It learns of no end."""


@pytest.mark.parametrize("policy", ["first", "longest", "stitched"])
@pytest.mark.parametrize("answer", [0, 4, None])
def test_it_is_asked_once_each_time_a_request_begins_whoever_serves(
    policy: LoadPolicy, answer: int | None
) -> None:
    foreign = Foreign(answer)
    multi = chain(Tier(tokens=40), foreign, load=policy)
    for computed in (0, 8):
        assert multi.get_num_new_matched_tokens(FakeRequest(num_tokens=40), computed)[0]
    assert foreign.asked == [("r", 0), ("r", 8)]


@pytest.mark.parametrize(
    "limits", [{"tiers": ["0"]}, {"tiers": []}, {"max_load_tokens": 0}, {"max_load_tokens": 4}]
)
def test_it_is_asked_also_where_a_request_does_not_let_it_load(limits: dict[str, Any]) -> None:
    foreign = Foreign(12)
    multi = chain(Tier(tokens=4), foreign)
    request = FakeRequest(kv_transfer_params={"kvtiers": limits})
    tokens, _ = multi.get_num_new_matched_tokens(request, 0)
    assert tokens in (0, 4), "its own 12 tokens are not loaded"
    assert foreign.asked == [("r", 0)]


@pytest.mark.parametrize("policy", LOAD_POLICIES)
def test_one_that_fails_all_of_a_request_does_not_load_it_again(policy: LoadPolicy) -> None:
    """The request comes back without having run, as if it had never been loaded."""
    foreign, lower = Foreign(40), Tier(tokens=4)
    multi = chain(foreign, lower, load=policy)
    request = FakeRequest()
    assert multi.get_num_new_matched_tokens(request, 0) == (40, True)
    multi.update_state_after_alloc(request, BLOCKS, 40)
    multi.build_connector_meta(IDLE_STEP)
    assert multi.get_num_new_matched_tokens(request, 0) == (4, True), "another may"
    assert foreign.asked == [("r", 0)] * 2, "it still learns that the request begins"
    assert multi.get_num_new_matched_tokens(FakeRequest("other"), 0) == (40, True)
    multi.request_finished(request, [])
    assert multi.get_num_new_matched_tokens(request, 0) == (40, True), "another of the same name"


def test_a_chain_within_the_chain_knows_itself_what_it_failed_to_load() -> None:
    inner = Foreign(40)
    inner.limits_requests = True
    multi, request = chain(inner, Tier(tokens=4)), FakeRequest()
    for _ in range(2):
        assert multi.get_num_new_matched_tokens(request, 0) == (40, True)
        multi.update_state_after_alloc(request, BLOCKS, 40)
        multi.build_connector_meta(IDLE_STEP)


@pytest.mark.parametrize("policy", LOAD_POLICIES)
def test_one_whose_request_ran_and_was_preempted_loads_it_again(policy: LoadPolicy) -> None:
    multi = chain(Foreign(40), Tier(tokens=4), load=policy)
    request = FakeRequest()
    for _ in range(5):
        assert multi.get_num_new_matched_tokens(request, 0) == (40, True)
        multi.update_state_after_alloc(request, BLOCKS, 40)
        multi.build_connector_meta(first_step("r", 40, 1))


@pytest.mark.parametrize("end", ["its load ends", "it ends"])
@pytest.mark.parametrize("by", ["a child", "the list that it is in"])
def test_who_finds_no_room_beside_its_load_waits_for_that_and_then_goes_on_without_one(
    end: str, by: str
) -> None:
    """Nothing runs meanwhile, as on a decode node that pulls all that it answers."""
    multi, first, other = chain(Foreign(40)), FakeRequest(), FakeRequest("other")
    assert multi.get_num_new_matched_tokens(first, 0) == (40, True)
    multi.update_state_after_alloc(first, BLOCKS, 40 if by == "a child" else 0)

    def asked() -> list[Any]:
        return [
            (multi.build_connector_meta(IDLE_STEP), multi.get_num_new_matched_tokens(other, 0))[1]
            for _ in range(5)
        ]

    assert asked() == [(40, True)] * 5
    if end == "it ends":
        multi.request_finished(first, [])
    output: Any = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"r"})
    if end == "its load ends":
        multi.update_connector_output(output)
    assert (0, False) in asked(), "what has loaded may need the room"


def test_what_another_child_pulls_is_known_to_a_chain_that_is_not_asked() -> None:
    """A list has enough of a connector before it."""

    def given(table: list[int]) -> Any:
        return SimpleNamespace(get_block_ids=lambda: (table,))

    multi, pulled = chain(BlockTier("")), FakeRequest("pulled")
    multi._requests.know_weights("ours")
    entry = {"weights": "others@node"}
    pulled.kv_transfer_params = {"kvtiers": entry, "do_remote_prefill": True}
    multi.update_state_after_alloc(pulled, given([1, 2]), 0)
    finds = FakeRequest("finds")
    assert multi.get_num_new_matched_tokens(finds, 8)[0] == 0
    multi.update_state_after_alloc(finds, given([1, 2, 3]), 0)
    step = FakeStep({"finds": 4}, FakeNewRequest("finds", 8, ([1, 2, 3],)))
    multi.build_connector_meta(step)
    assert not multi._requests.of(finds).stores


def test_what_a_request_waits_for_its_answers_is_taken_from_its_time() -> None:
    clock = Clock()
    foreign: Any = Foreign(None)
    engine = EngineInfo({}, 4, 4, 0, caches_prefixes=False)
    requests = RequestTable(engine, now=clock, max_wait=2.0)
    multi = MultiScheduler([foreign], MultiSettings(requests))
    for _ in range(2):
        assert multi.get_num_new_matched_tokens(FakeRequest(), 0)[0] is None
        clock.now += 60
        foreign.tokens = 40
        assert multi.get_num_new_matched_tokens(FakeRequest(), 0) == (40, True)
        foreign.tokens = None
    foreign.tokens = 40
    assert multi.get_num_new_matched_tokens(FakeRequest(), 0) == (0, False), "it is over"
