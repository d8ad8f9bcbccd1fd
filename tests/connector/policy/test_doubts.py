"""Blocks with KV that another node sent, as the engine gives them to others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.scheduled import Step
from tests.support.fake_requests import FakeNewRequest, FakeRequest, FakeStep
from tiers.connector.policy.doubts import Doubts
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.lab.replay.requests import CachedRequests

PULLS = {"do_remote_prefill": True}


class Node:
    """An engine with blocks of four tokens, to which others send KV."""

    def __init__(self, weights: str = "ours", is_alone: bool = False) -> None:
        self.requests = RequestTable(EngineInfo({}, 4, 4, 100, is_alone=is_alone))
        self.requests.know_weights(weights)
        self.doubts = Doubts(self.requests)

    def begins(
        self, name: str, table: list[int], new: int, sent: str | None = None, **more: Any
    ) -> RequestState:
        """The engine gives a request blocks, those from a place on anew; `sent`: what the node
        says that sends them, "node" before it knows."""
        entry = {"weights": "@node" if sent == "node" else f"{sent}@node"}
        params = {} if sent is None else {"kvtiers": entry, **PULLS, **more}
        state = self.requests.of(FakeRequest(name, kv_transfer_params=params))
        state.given((table,))
        state.in_doubt = True
        self.doubts.allocated(state, 4 * new, in_step=False)
        return state

    def step(
        self,
        *new: tuple[str, list[int], int],
        copied: tuple[int, int] | None = None,
        **on: tuple[int, list[int]],
    ) -> None:
        """New requests compute the block behind those that they have; others that run go on from a
        token, with more blocks."""
        tokens = {name: 4 for name, *_ in new} | dict.fromkeys(on, 4)
        began = [FakeNewRequest(name, 4 * before, (table,)) for name, table, before in new]
        added: list[Any] = [(more,) for _, more in on.values()]
        cached: Any = CachedRequests([*on], set(), added, [before for before, _ in on.values()])
        step: Any = FakeStep(tokens, *began)
        step.scheduled_cached_reqs = cached
        if copied:
            pair = SimpleNamespace(src_block_id=copied[0], dst_block_id=copied[1])
            step.kv_cache_block_copies = [pair]
        assert self.doubts.step_begins(self.requests.begin_step(step), None) == []

    def stores(self, name: str, table: list[int], new: int) -> bool:
        """Whether a request's blocks may be stored that begins so; tiers load one of them."""
        state = self.begins(name, table, new)
        self.step((name, table, new + 1))
        return state.stores


def test_neither_the_null_block_nor_one_that_is_loaded_anew_is_in_doubt() -> None:
    node = Node()
    node.begins("pulled", [0, 1, 2, 3], 0, sent="others")
    assert not node.stores("finds it as soon", [0, 1, 4, 5], 2)
    assert {*node.doubts._sent} == {1, 2, 3, 5}
    assert node.stores("finds nothing of it", [0, 6, 7], 1)
    assert node.stores("is given its blocks", [8, 1, 9], 1)


@pytest.mark.parametrize("sent", ["others", "node"])
def test_what_comes_before_that_is_not(sent: str) -> None:
    """As a system prompt that all requests have, and that was here."""
    node = Node()
    node.begins("pulled", [1, 2, 3, 4], 2, sent=sent)
    node.step(("pulled", [1, 2, 3, 4], 3))
    assert node.stores("has the beginning", [1, 2, 5, 6], 2)
    assert not node.stores("finds what was sent", [1, 2, 3, 7, 8], 3)
    assert not node.stores("finds what was computed behind", [1, 2, 3, 4, 9, 10], 4)


@pytest.mark.parametrize(("more", "is_alone"), [({}, False), (PULLS, True)])
def test_a_client_that_only_says_so_is_not_heeded(more: dict[str, Any], is_alone: bool) -> None:
    """No connector is asked to take anything up, or there is none: what it computes is as any
    other's."""
    node = Node(is_alone=is_alone)
    params = {"kvtiers": {"weights": "others@node"}, **more}
    client = node.requests.of(FakeRequest("client", kv_transfer_params=params))
    client.given(([1, 2, 3],))
    node.doubts.allocated(client, 0, in_step=False)
    node.step(("client", [1, 2, 3], 0))
    assert client.stores and not client.sent and node.requests.weights._named.get("node") is None
    assert node.stores("has the same beginning", [1, 2, 4], 2)


@pytest.mark.parametrize("name", ["x" * 509 + "@one", ["list"], None])
def test_what_is_no_name_is_of_weights_that_nobody_knows_and_is_not_kept(name: Any) -> None:
    node = Node()
    params = {"kvtiers": {"weights": name}, **PULLS}
    state = node.requests.of(FakeRequest("pulled", kv_transfer_params=params))
    state.given(([1, 2],))
    node.doubts.allocated(state, 0, in_step=False)
    assert not state.stores and state.sent == {""}
    early = Node("")
    state = early.requests.of(FakeRequest("pulled", kv_transfer_params=params))
    state.given(([1, 2],))
    early.doubts.allocated(state, 0, in_step=False)
    assert not early.stores("finds it before our own are known", [1, 2, 3], 2)
    early.requests.know_weights("ours")
    assert not early.stores("finds it later", [1, 2, 4], 2)


@pytest.mark.parametrize("named", ["ours", "others"])
def test_a_node_that_names_its_weights_later_is_believed_for_what_it_sent_before(
    named: str,
) -> None:
    node = Node()
    assert not node.begins("pulled", [1, 2, 3], 0, sent="node").stores
    assert not node.stores("finds it meanwhile", [1, 2, 5, 6], 2)
    node.begins("pulled from an other node", [20, 21], 0, sent=named, kvtiers={"weights": named})
    assert not node.stores("finds it yet", [1, 2, 7, 8], 2)
    node.begins("pulled later", [10, 11], 0, sent=named)
    for number in (30, 40):
        is_stored = node.stores(f"finds it {number}", [1, 2, number, number + 1], 2)
        assert is_stored == (named == "ours")
    assert bool({1, 2} & node.doubts._sent.keys()) == (named != "ours")


def test_a_node_that_knows_them_no_more_has_others() -> None:
    """As one that loads an adapter anew in its place."""
    node = Node()
    assert node.begins("pulled", [1, 2], 0, sent="ours").stores
    assert not node.begins("pulled later", [3, 4], 0, sent="node").stores
    node.begins("pulled again", [5, 6], 0, sent="ours")
    assert not node.stores("finds it", [3, 4, 7, 8], 2)


def test_what_a_node_names_first_was_sent_before() -> None:
    node = Node()
    node.begins("pulled", [1, 2], 0, sent="node")
    node.begins("pulled later", [3, 4], 0, sent="others")
    node.begins("pulled again", [5, 6], 0, sent="ours")
    assert not node.stores("finds it", [1, 2, 7, 8], 2)


def test_a_node_stands_for_itself_with_an_adapter_from_one_place() -> None:
    table = Node("").requests

    def node(*adapter: str) -> str:
        request: Any = FakeRequest("r")
        if adapter:
            request.lora_request = SimpleNamespace(lora_name=adapter[0], lora_path=adapter[1])
        weights, _, node = str(table.weights.entry(request)["weights"]).partition("@")
        assert weights == ""
        return node

    places = [(), ("sql", "/v1"), ("sql", "/v2")]
    assert [node(*place) for place in places] == [node(*place) for place in places]
    assert len({node(*place) for place in places} | {Node("").requests.weights._here.hex()}) == 4


def test_a_copy_of_a_part_is_what_it_was_copied_from() -> None:
    node = Node()
    node.begins("pulled", [1, 2], 0, sent="others")
    finds = node.begins("finds a part", [1, 5, 6], 1)
    node.doubts._sent.pop(1)
    node.step(("finds a part", [1, 5, 6], 2), copied=(2, 5))
    assert not finds.stores


def test_groups_of_other_blocks_have_their_own_places() -> None:
    groups = KVGroup(4), KVGroup(8)
    requests = RequestTable(EngineInfo({}, 8, 4, 100, groups=groups))
    requests.know_weights("ours")
    doubts = Doubts(requests)
    params = {"kvtiers": {"weights": "others@node"}, **PULLS}
    state = requests.of(FakeRequest("pulled", kv_transfer_params=params))
    state.given(([1, 2, 3, 4], [5, 6]))
    doubts.allocated(state, 8, in_step=False)
    assert {*doubts._sent} == {3, 4, 6}


def test_a_block_of_what_goes_on_is_unsure_before_the_larger_one_is_full_that_it_is_in() -> None:
    groups = KVGroup(4), KVGroup(8)
    node = Node()
    node.requests = RequestTable(EngineInfo({}, 8, 4, 100, groups=groups, goes_on_right=False))
    node.doubts = Doubts(node.requests)
    session: Any = FakeRequest("session", 8, [b"a", b"b"])
    session.resumable = True
    node.requests.of(session)
    first = FakeStep({"session": 8}, FakeNewRequest("session", 0, ([1, 2], [3])))
    node.doubts.step_begins(node.requests.begin_step(first), None)
    added: Any = CachedRequests(["session"], set(), [([4], [5])], [8])
    node.doubts.step_begins(node.requests.begin_step(Step([], {"session": 1}, added)), None)
    assert node.doubts._failed == {4, 5}


def test_what_goes_on_casts_no_doubt_on_a_block_that_it_has_left_to_another() -> None:
    """As windows do."""
    groups, node = (KVGroup(4), KVGroup(4, 8)), Node()
    node.requests = RequestTable(EngineInfo({}, 4, 4, 100, groups=groups, goes_on_right=False))
    node.doubts = Doubts(node.requests)
    session: Any = FakeRequest("session", 4, [b"%d" % number for number in range(8)])
    session.resumable = True
    node.requests.of(session)
    first = FakeStep({"session": 4}, FakeNewRequest("session", 0, ([1], [2])))
    node.doubts.step_begins(node.requests.begin_step(first), None)
    other = node.requests.of(FakeRequest("other", 4, [b"x"]))
    for number in (1, 2, 3):
        blocks: Any = [2 * number + 1], [2 * number + 2]
        added: Any = CachedRequests(["session"], set(), [blocks], [4 * number])
        step = Step([], {"session": 4}, added)
        if number == 3:
            new: Any = FakeNewRequest("other", 0, ([20], [4]))
            step = Step([new], {"session": 4, "other": 4}, added)
            other.in_doubt = True
        found = node.doubts.step_begins(node.requests.begin_step(step), None)
        assert found == []
    assert {3, 5, 7, 8} <= node.doubts._failed and 4 not in node.doubts._failed


def test_what_another_computes_behind_it_in_the_same_step_is_found_by_who_comes_first() -> None:
    """The engine's step has those that begin before those that go on."""
    node = Node()
    node.begins("pulled", [1, 2], 0, sent="others")
    node.step(("pulled", [1, 2], 1))
    finder = node.begins("finder", [1, 2, 3, 4], 3)
    node.doubts._sent.pop(1)
    node.doubts._sent.pop(2)
    node.step(("finder", [1, 2, 3, 4], 3), pulled=(8, [3]))
    assert not finder.stores


def test_a_block_that_another_computes_anew_is_right_and_nobody_is_looked_at_twice() -> None:
    node = Node()
    node.begins("pulled", [1, 2, 3], 0, sent="others")
    runs = node.begins("runs", [4], 1)
    node.step(("runs", [4], 0))
    assert not runs.in_doubt
    node.requests.forget(FakeRequest("pulled"))
    node.step(runs=(4, [2]))
    assert node.stores("finds that", [4, 2, 5, 6], 2)
    assert not node.stores("finds the other", [1, 7, 8], 1)


def test_until_its_own_weights_are_known_a_node_stores_nothing_of_it() -> None:
    node = Node("")
    pulled = node.begins("pulled", [1, 2], 0, sent="ours")
    found = node.begins("found", [1, 3, 4], 1)
    node.step(("found", [1, 3, 4], 2))
    assert not pulled.stores and not found.stores
    node.requests.know_weights("ours")
    assert pulled.stores and found.stores
    assert node.stores("later", [1, 5, 6], 1)
