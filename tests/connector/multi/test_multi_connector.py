"""Both halves of a MultiConnector over children that record what they are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.children import BlockTier, Child, chain
from tests.support.fake_requests import BLOCKS, IDLE_STEP, FakeRequest
from tiers.connector.multi.multi_connector import (
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
)
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.marks import MediaMarks
from tiers.contract.messages import TransferResults


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def children(calls: list[Any]) -> list[Child]:
    return [Child(name, calls) for name in "abc"]


@pytest.fixture
def multi(children: list[Child]) -> MultiScheduler:
    return chain(*children, load="first")


@pytest.fixture
def worker(children: list[Child]) -> MultiWorker:
    return MultiWorker(children)


def test_the_serving_child_loads_and_the_others_learn_of_the_blocks(
    multi: MultiScheduler, children: list[Child], calls: list[Any]
) -> None:
    children[1].tokens = 16
    assert multi.get_num_new_matched_tokens(FakeRequest(), 32) == (16, True)
    calls.clear()
    multi.update_state_after_alloc(FakeRequest(), BLOCKS, 16)
    assert calls == [
        ("a", "alloc", BLOCKS, 0),
        ("b", "alloc", BLOCKS, 16),
        ("c", "alloc", BLOCKS, 0),
    ]


def test_a_later_answer_replaces_an_earlier_choice(
    multi: MultiScheduler, children: list[Child], calls: list[Any]
) -> None:
    children[0].tokens = 16
    multi.get_num_new_matched_tokens(FakeRequest(), 0)
    children[0].tokens, children[2].tokens = 0, 8
    multi.get_num_new_matched_tokens(FakeRequest(), 0)
    calls.clear()
    multi.update_state_after_alloc(FakeRequest(), BLOCKS, 8)
    assert [call[-1] for call in calls] == [0, 0, 8]


def test_orders_reach_their_children_in_order(
    multi: MultiScheduler, worker: MultiWorker, children: list[Child], calls: list[Any]
) -> None:
    orders = multi.build_connector_meta(IDLE_STEP)
    assert orders.metadata == ("orders of a", "orders of b", "orders of c")
    worker.handle_preemptions(orders)
    assert not worker.has_connector_metadata()
    worker.bind_connector_metadata(orders)
    assert worker.has_connector_metadata()
    worker.start_load_kv(None)
    worker.wait_for_save()
    expected = [
        (name, what, f"orders of {name}") for what in ("preempt", "load", "save") for name in "abc"
    ]
    assert calls == expected
    worker.clear_connector_metadata()
    assert not any(child.has_connector_metadata() for child in [worker, *children])


def test_a_request_is_sent_when_every_saving_child_has_finished(
    multi: MultiScheduler, worker: MultiWorker, children: list[Child]
) -> None:
    for more, child in enumerate(children):
        child.saving = (True, None)
        assert multi.request_finished(FakeRequest("r"), [1, 2]) == (True, None)
        orders = multi.build_connector_meta(IDLE_STEP)
        assert orders.extra_async_saves == ({"r": more} if more else {})
    assert multi.build_connector_meta(IDLE_STEP).extra_async_saves == {}, "they travel once"

    worker.bind_connector_metadata(orders)
    children[0].finished = TransferResults({"r"})
    assert worker.get_finished(set()) == (None, None)
    children[0].finished = TransferResults()
    children[1].finished = children[2].finished = TransferResults({"r"})
    assert worker.get_finished(set()) == ({"r"}, None)


def test_load_errors_are_united(worker: MultiWorker, children: list[Child]) -> None:
    children[0].errors, children[1].errors = {1, 2}, {2, 7}
    assert worker.get_block_ids_with_load_errors() == {1, 2, 7}


def test_transfer_parameters_are_merged_and_a_clash_names_the_key(
    multi: MultiScheduler, children: list[Child]
) -> None:
    children[0].saving = (False, {"left": 1})
    children[1].saving = (False, {"right": 2})
    assert multi.request_finished(FakeRequest(), []) == (False, {"left": 1, "right": 2})
    children[2].saving = (False, {"left": 3})
    with pytest.raises(RuntimeError, match="left"):
        multi.request_finished(FakeRequest(), [])


@dataclass
class Output:
    kv_connector_worker_meta: Any
    invalid_block_ids: frozenset[int] = frozenset()
    finished_recving: frozenset[str] = frozenset()


def test_each_child_sees_only_its_own_worker_metadata(
    multi: MultiScheduler, children: list[Child], calls: list[Any]
) -> None:
    whole = MultiWorkerMetadata((1, None, 3))
    output = Output(whole)
    multi.update_connector_output(output)
    assert [call[-1] for call in calls] == [1, None, 3]
    children[1].error = ValueError("child")
    with pytest.raises(ValueError, match="child"):
        multi.update_connector_output(output)
    assert output.kv_connector_worker_meta is whole


class Sum(int):
    def aggregate(self, other: int) -> Sum:
        return Sum(self + other)


def test_worker_metadata_adds_up_over_ranks_child_by_child(
    worker: MultiWorker, children: list[Child]
) -> None:
    assert worker.build_connector_worker_meta() is None
    children[1].meta = Sum(5)
    ours = worker.build_connector_worker_meta()
    assert ours is not None
    total = ours.aggregate(MultiWorkerMetadata((Sum(1), Sum(2), None)))
    assert total.metadata == (1, 7, None)


def test_orders_of_another_connector_are_refused(worker: MultiWorker) -> None:
    with pytest.raises(AssertionError):
        worker.bind_connector_metadata("not ours")
    with pytest.raises(ValueError, match="zip"):
        worker.bind_connector_metadata(MultiConnectorMetadata(("one",), {}))


@pytest.mark.parametrize("of_worker", [["cpu"], ["disk", "cpu"], ["cpu", "disk", "more"]])
def test_a_worker_that_read_another_chain_says_so_before_there_are_requests(
    of_worker: list[str],
) -> None:
    """Each process reads the chain's file, which somebody may change while an engine starts."""
    names = ["cpu", "disk"]
    settings = MultiSettings(RequestTable.of_connectors(4))
    scheduler = MultiScheduler([Child(name, []) for name in names], settings, names, "one chain")
    worker = MultiWorker([Child(name, []) for name in of_worker], of_worker, "another chain")
    assert not scheduler.has_pending_push_work()
    scheduler.set_xfer_handshake_metadata({0: MultiHandshakeMetadata((None,), "another chain")})
    assert scheduler.has_pending_push_work(), "an idle engine makes no step"
    orders = scheduler.build_connector_meta(IDLE_STEP)
    for told in (worker.handle_preemptions, worker.bind_connector_metadata):
        with pytest.raises(ValueError, match=f"tiers cpu, disk, .* {', '.join(of_worker)}:"):
            told(orders)
    assert not scheduler.has_pending_push_work()


@pytest.mark.parametrize(
    ("lost", "gives_up"),
    [((True, False), False), ((None, False), False), ((True, None), True), ((True, True), True)],
)
def test_images_are_not_marked_where_all_tiers_are_lost(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[bool | None, ...], gives_up: bool
) -> None:
    """Another connector of the engine, which is neither lost nor not, needs no marks of ours."""
    children = [BlockTier("xxxx") for _ in lost]
    for child, is_lost in zip(children, lost, strict=True):
        vars(child).update({} if is_lost is None else {"is_lost": is_lost})
    given_up: list[bool] = []
    monkeypatch.setattr(MediaMarks, "give_up", lambda *_, late: given_up.append(late))
    chain(*children).get_num_new_matched_tokens(FakeRequest(num_tokens=16), 0)
    assert given_up == [False] * gives_up, "nothing is late"
