"""Several children load for one request: it is received once, when the last of them has ended."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES
from tests.support.children import BlockTier, Child, Tier, chain
from tests.support.fake_requests import BLOCKS, IDLE_STEP, FakeRequest
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.block_loader import SharedLoad


def load(multi: MultiScheduler, request: FakeRequest, take: int | None = None) -> dict[str, int]:
    """Match and allocate as an engine does; which loads a worker then awaits, and how often."""
    tokens, is_async = multi.get_num_new_matched_tokens(request, 0)
    assert tokens and is_async
    multi.update_state_after_alloc(request, BLOCKS, tokens if take is None else take)
    worker = MultiWorker([Child("", []) for _ in multi.children])
    worker.bind_connector_metadata(multi.build_connector_meta(IDLE_STEP))
    worker.start_load_kv(None)
    return {request: load.left for request, load in worker._loads_awaited.items()}


def test_each_child_loads_its_ranges_and_the_others_nothing() -> None:
    tiers: list[Any] = [BlockTier("x..x"), BlockTier(), BlockTier("xxx.")]
    assert load(chain(*tiers), FakeRequest()) == {"r": 2}
    assert [tier.loads for tier in tiers] == [[[range(1), range(3, 4)]], [0], [[range(1, 3)]]]


def test_an_engine_that_takes_less_loads_less() -> None:
    tiers: list[Any] = [BlockTier("xx"), BlockTier("xxxx")]
    assert load(chain(*tiers), FakeRequest(), take=8) == {}
    assert [tier.loads for tier in tiers] == [[[range(2)]], [0]]


@pytest.mark.parametrize("times", [1, 2])
def test_a_request_is_received_when_the_last_child_has_ended(times: int) -> None:
    tiers: list[Any] = [BlockTier("x"), BlockTier("xx"), BlockTier("xxx")]
    multi = chain(*tiers)
    worker = MultiWorker(tiers)
    for _ in range(times):  # a preempted request is loaded again
        tokens, _ = multi.get_num_new_matched_tokens(FakeRequest(), 0)
        assert tokens
        multi.update_state_after_alloc(FakeRequest(), BLOCKS, tokens)
        orders = pickle.loads(pickle.dumps(multi.build_connector_meta(IDLE_STEP)))
        multi.request_finished(FakeRequest(), [])  # an abort changes nothing of that
        worker.bind_connector_metadata(orders)
        worker.start_load_kv(None)
        tiers[1].ended = {"r"}
        assert worker.get_finished(set()) == (None, None)
        assert worker.get_finished(set()) == (None, None)
        tiers[0].ended = tiers[2].ended = {"r"}
        assert worker.get_finished(set()) == (None, {"r"})
        assert worker.get_finished(set()) == (None, None)


def test_a_request_of_one_child_is_received_when_that_has_ended() -> None:
    tiers: list[Any] = [BlockTier("xx"), BlockTier("xx")]
    assert load(chain(*tiers), FakeRequest()) == {}
    worker = MultiWorker(tiers)
    tiers[0].ended = {"r"}
    assert worker.get_finished(set()) == (None, {"r"})


def test_another_connector_is_never_told_to_load_less_than_it_said() -> None:
    request = FakeRequest(kv_transfer_params={"kvtiers": {"max_load_tokens": 8}})
    for policy in LOAD_POLICIES:
        multi = chain(Tier(tokens=12), Tier(tokens=8), load=policy)
        assert multi.get_num_new_matched_tokens(request, 0) == (8, True)


def test_blocks_are_of_use_up_to_the_first_that_failed_in_any_tier() -> None:
    usable = SimpleNamespace(a=-1, b=-1)
    shared = SharedLoad(2)
    shared.end([0, 1, 4, 5], [], lambda blocks: setattr(usable, "a", blocks))
    assert usable.a == -1, "not known yet"
    shared.end([2, 3, 6], [3, 6], lambda blocks: setattr(usable, "b", blocks))
    assert (usable.a, usable.b) == (2, 1)


def test_a_chain_within_a_chain_is_asked_whatever_tiers_a_request_names() -> None:
    inner = chain(BlockTier("xx", tokens=8), BlockTier("xx", tokens=8), load="first")
    outer = chain(Tier(tokens=12), inner, load="first")
    ask = outer.get_num_new_matched_tokens
    named = {"kvtiers": {"tiers": ["1"]}}  # the names of children that are no tiers are numbers
    assert ask(FakeRequest("a", kv_transfer_params=named), 0) == (8, True)
    nobody = {"kvtiers": {"tiers": ["no such tier"]}}
    assert ask(FakeRequest("b", kv_transfer_params=nobody), 0) == (0, False)
