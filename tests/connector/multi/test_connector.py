"""MultiConnector over children that record what they are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tiers.connector.contract.connector import Connector
from tiers.connector.contract.engine import Role
from tiers.connector.multi.connector import MultiConnector
from tiers.connector.multi.metadata import (
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
)


@dataclass
class FakeRequest:
    request_id: str = "r"
    num_tokens: int = 8
    block_hashes: list[bytes] = field(default_factory=list)


class Child(Connector):
    """Answers as it is told to, and writes down each call."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        super().__init__(Role.SCHEDULER)
        self.name = name
        self.calls = calls
        self.tokens: int | None = 0
        self.finished: tuple[set[str] | None, set[str] | None] = (None, None)
        self.saving: tuple[bool, dict[str, Any] | None] = (False, None)
        self.error: Exception | None = None
        self.meta: Any = None
        self.errors: set[int] = set()

    def _note(self, what: str, *args: Any) -> None:
        self.calls.append((self.name, what, *args))
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self._note("shutdown")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._note("match", num_computed_tokens)
        return self.tokens, bool(self.tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self._note("alloc", blocks, tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return f"orders of {self.name}"

    def update_connector_output(self, connector_output: Any) -> None:
        self._note("output", connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._note("finished", block_ids)
        return self.saving

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self._note("handshake", dict(metadata))

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._note("register")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._note("preempt", kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("load", self._metadata)

    def wait_for_save(self) -> None:
        self._note("save", self._metadata)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return self.finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.errors

    def build_connector_worker_meta(self) -> Any:
        return self.meta


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def children(calls: list[Any]) -> list[Child]:
    return [Child(name, calls) for name in "abc"]


@pytest.fixture
def multi(children: list[Child]) -> MultiConnector:
    return MultiConnector(Role.SCHEDULER, children)


def test_the_serving_child_loads_and_the_others_learn_of_the_blocks(
    multi: MultiConnector, children: list[Child], calls: list[Any]
) -> None:
    children[1].tokens = 16
    assert multi.get_num_new_matched_tokens(FakeRequest(), 32) == (16, True)
    calls.clear()
    multi.update_state_after_alloc(FakeRequest(), "blocks", 16)
    assert calls == [
        ("a", "alloc", "blocks", 0),
        ("b", "alloc", "blocks", 16),
        ("c", "alloc", "blocks", 0),
    ]


def test_a_later_answer_replaces_an_earlier_choice(
    multi: MultiConnector, children: list[Child], calls: list[Any]
) -> None:
    children[0].tokens = 16
    multi.get_num_new_matched_tokens(FakeRequest(), 0)
    children[0].tokens, children[2].tokens = 0, 8
    multi.get_num_new_matched_tokens(FakeRequest(), 0)
    calls.clear()
    multi.update_state_after_alloc(FakeRequest(), "blocks", 8)
    assert [call[-1] for call in calls] == [0, 0, 8]


def test_orders_reach_their_children_in_order(
    multi: MultiConnector, children: list[Child], calls: list[Any]
) -> None:
    orders = multi.build_connector_meta(None)
    assert orders.metadata == ("orders of a", "orders of b", "orders of c")
    multi.handle_preemptions(orders)
    assert not multi.has_connector_metadata()
    multi.bind_connector_metadata(orders)
    assert multi.has_connector_metadata()
    multi.start_load_kv(None)
    multi.wait_for_save()
    expected = [
        (name, what, f"orders of {name}") for what in ("preempt", "load", "save") for name in "abc"
    ]
    assert calls == expected
    multi.clear_connector_metadata()
    assert not any(child.has_connector_metadata() for child in [multi, *children])


def test_a_request_is_sent_when_every_saving_child_has_finished(
    multi: MultiConnector, children: list[Child]
) -> None:
    for child in children:
        child.saving = (True, None)
    assert multi.request_finished(FakeRequest("r"), [1, 2]) == (True, None)
    orders = multi.build_connector_meta(None)
    assert orders.extra_async_saves == {"r": 2}
    assert multi.build_connector_meta(None).extra_async_saves == {}, "they travel once"

    worker = MultiConnector(Role.WORKER, children)
    worker.bind_connector_metadata(orders)
    children[0].finished = ({"r"}, None)
    assert worker.get_finished(set()) == (None, None)
    children[0].finished = (None, None)
    children[1].finished = children[2].finished = ({"r"}, None)
    assert worker.get_finished(set()) == ({"r"}, None)


def test_receives_and_load_errors_are_united(multi: MultiConnector, children: list[Child]) -> None:
    children[0].finished = (None, {"x"})
    children[2].finished = (None, {"y"})
    assert multi.get_finished(set()) == (None, {"x", "y"})
    children[0].errors, children[1].errors = {1, 2}, {2, 7}
    assert multi.get_block_ids_with_load_errors() == {1, 2, 7}


def test_transfer_parameters_are_merged_and_a_clash_names_the_key(
    multi: MultiConnector, children: list[Child]
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


def test_each_child_sees_only_its_own_worker_metadata(
    multi: MultiConnector, children: list[Child], calls: list[Any]
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
    multi: MultiConnector, children: list[Child]
) -> None:
    assert multi.build_connector_worker_meta() is None
    children[1].meta = Sum(5)
    ours = multi.build_connector_worker_meta()
    assert ours is not None
    total = ours.aggregate(MultiWorkerMetadata((Sum(1), Sum(2), None)))
    assert total.metadata == (1, 7, None)


def test_handshakes_reach_their_children(multi: MultiConnector, calls: list[Any]) -> None:
    multi.set_xfer_handshake_metadata(
        {
            0: MultiHandshakeMetadata(("a0", None, "c0")),
            1: MultiHandshakeMetadata(("a1", None, "c1")),
        }
    )
    assert calls == [
        ("a", "handshake", {0: "a0", 1: "a1"}),
        ("b", "handshake", {}),
        ("c", "handshake", {0: "c0", 1: "c1"}),
    ]


def test_shutdown_reaches_every_child_and_raises_what_one_did(
    multi: MultiConnector, children: list[Child], calls: list[Any]
) -> None:
    children[0].error = OSError("first")
    with pytest.raises(OSError, match="first"):
        multi.shutdown()
    assert [name for name, *_ in calls] == ["a", "b", "c"]


def test_orders_of_another_connector_are_refused(multi: MultiConnector) -> None:
    with pytest.raises(AssertionError):
        multi.bind_connector_metadata("not ours")
    with pytest.raises(ValueError, match="zip"):
        multi.bind_connector_metadata(MultiConnectorMetadata(("one",), {}))
