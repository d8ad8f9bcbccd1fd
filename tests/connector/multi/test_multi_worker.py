"""Loads and saves by several children: told once, and exactly when the last has ended."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.children import Child
from tiers.connector.multi.multi_connector import MultiConnectorMetadata
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.multi.worker_changes import ChangeParts
from tiers.contract.messages import LoadJob, OffloadingConnectorMetadata, TransferResults
from tiers.contract.weight_reports import WeightOrders

CHILDREN = 4
REQUESTS = "abcdef"


@given(
    st.dictionaries(
        st.sampled_from(REQUESTS),
        st.tuples(
            st.sets(st.integers(0, CHILDREN - 1)), st.sets(st.integers(0, CHILDREN - 1))
        ).filter(any),
        min_size=1,
    ),
    st.randoms(use_true_random=False),
)
def test_each_request_ends_once_whatever_the_order(
    in_flight: dict[str, tuple[set[int], set[int]]], order: Random
) -> None:
    """`under_way`: the children that save, and that load, each request."""
    children = [Child(str(number), []) for number in range(CHILDREN)]
    worker = MultiWorker(children)
    extra = {name: len(saves) - 1 for name, (saves, _) in in_flight.items() if len(saves) > 1}
    orders = tuple(
        OffloadingConnectorMetadata(
            [LoadJob(0, name, []) for name, (_, loads) in in_flight.items() if child in loads]
        )
        for child in range(CHILDREN)
    )
    worker.bind_connector_metadata(MultiConnectorMetadata(orders, extra))
    worker.start_load_kv(None)
    ends = [
        (child, what, name)
        for name, both in in_flight.items()
        for what in (0, 1)
        for child in both[what]
    ]
    order.shuffle(ends)
    told: tuple[list[str], list[str]] = ([], [])
    while ends:
        step = [ends.pop() for _ in range(min(len(ends), order.randint(1, 5)))]
        for number, child in enumerate(children):
            mine = [(what, name) for c, what, name in step if c == number]
            child.finished = TransferResults(
                {name for what, name in mine if what == 0},
                {name for what, name in mine if what == 1},
            )
        for kind, names in enumerate(worker.get_finished(set())):
            for name in names or ():
                told[kind].append(name)
                assert not [e for e in ends if e[1:] == (kind, name)], "another child is at it"
    for kind in (0, 1):
        expected = sorted(name for name, both in in_flight.items() if both[kind])
        assert sorted(told[kind]) == expected


class Ending(Child):
    """A connector that reports what ended, and what failed, once."""

    def __init__(self) -> None:
        super().__init__("", [])
        self.failed: set[int] = set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        found, self.finished = self.finished, TransferResults()
        return found

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


@pytest.mark.parametrize("pieces", [{}, {"r": {0: [1, 2], 1: [3, 4]}}])
def test_a_list_reports_again_for_its_chain_and_each_end_once(
    pieces: dict[str, dict[int, list[int]]],
) -> None:
    """Else a chain's end would count twice, beside another connector that still loads."""
    ours, other = Ending(), Ending()
    parts = ChangeParts(0, lambda spec: None, lambda: None)
    worker = MultiWorker([MultiWorker([ours], parts=parts), other])
    heard: list[int] = []
    ended, failed = list[str](), set[int]()
    for number in range(8):
        inner = MultiConnectorMetadata((OffloadingConnectorMetadata(),), {})
        weights, told = WeightOrders(step=number), {0: {*heard[-1:]}} if heard else {}
        orders: Any = (inner, None), {}, None, weights, (), {} if number else pieces, (), told
        worker.bind_connector_metadata(MultiConnectorMetadata(*orders))
        worker.start_load_kv(None)
        if number == 1:
            ours.finished, ours.failed = TransferResults(set(), {"r"}), {1}
        if number == 5:
            other.finished = TransferResults(set(), {"r"} if pieces else {"other's"})
        results = worker.get_transfer_results(set())
        blocks, meta = worker.get_block_ids_with_load_errors(), worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        if number not in (1, 5):  # those raised behind it
            ended += sorted(results.finished_recving)
            failed |= blocks
            if meta is not None and meta.reports:
                heard.append(meta.reports[0][0])
        assert number > 4 or not pieces or not ended, "the other still loads"
    assert ended == (["r"] if pieces else ["r", "other's"]) and failed == {1}
