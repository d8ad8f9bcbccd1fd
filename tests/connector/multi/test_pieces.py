"""Several connectors load one request, one behind the other: each its piece, and fails alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.children import Child
from tests.support.fake_requests import IDLE_STEP, FakeRequest
from tiers.connector.multi.multi_connector import MultiConnectorMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.messages import TransferResults

SIZE = 4


class Connector(Child):
    """Has the first `has` tokens of every request; None: it is still looking."""

    def __init__(self, has: int | None, is_async: bool = True) -> None:
        super().__init__("", [])
        self.has, self.is_async = has, is_async

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        self._note("match", computed)
        tokens = self.has if self.has is None else max(0, self.has - computed)
        return tokens, bool(tokens) and self.is_async

    def told(self, what: str) -> list[Any]:
        return [call[2:] for call in self.calls if call[1] == what]


class Table:
    """A request's paged blocks, of which the first `computed` look computed."""

    def __init__(self, blocks: list[int], computed: int = 0) -> None:
        self.blocks, self.computed = blocks, computed

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.blocks,)


PAGED = Table([*range(100, 110)])


def listed(*connectors: Connector, following: tuple[int, ...] = (0, 1, 2)) -> MultiScheduler:
    settings = MultiSettings(
        RequestTable.of_connectors(SIZE),
        "stitched",
        following=following,
        as_computed=lambda blocks, count: Table(blocks.get_block_ids()[0], count),
    )
    return MultiScheduler(connectors, settings)


@pytest.mark.parametrize(
    ("has", "computed", "loads", "asked"),
    [
        ((16, 40), 0, (16, 24), (0, 16)),
        ((16, 39), 8, (8, 23), (8, 16)),
        ((0, 40), 8, (0, 32), (8, 8)),
        ((16, 16), 0, (16, 0), (0, 16)),
        ((40, 40), 0, (40, 0), (0, 0)),
        ((14, 40), 0, (0, 40), (0, 0)),
        ((16, 20, 40), 0, (16, 4, 20), (0, 16, 20)),
    ],
    ids=[
        "a prefix and the rest",
        "behind what is computed, up to within a block",
        "one has nothing",
        "the other has no more",
        "nothing is left",
        "nobody follows one that ends within a block",
        "three",
    ],
)
def test_each_is_asked_for_what_is_behind_those_before_it(
    has: tuple[int, ...], computed: int, loads: tuple[int, ...], asked: tuple[int, ...]
) -> None:
    connectors = [Connector(tokens) for tokens in has]
    multi, request = listed(*connectors), FakeRequest()
    assert multi.get_num_new_matched_tokens(request, computed) == (sum(loads), True)
    multi.update_state_after_alloc(request, PAGED, sum(loads))
    at = computed
    for connector, tokens, start in zip(connectors, loads, asked, strict=True):
        assert connector.told("match")[0] == (start,)
        ((seen, told),) = connector.told("alloc")
        assert told == tokens
        if tokens and at > computed:
            assert seen.computed == at // SIZE, "what others load looks computed"
        at += tokens


def test_one_that_looks_is_waited_for_and_one_that_cannot_follow_has_all_or_nothing() -> None:
    looking = Connector(None)
    assert listed(looking, Connector(40)).get_num_new_matched_tokens(FakeRequest(), 0)[0] is None
    for other, chosen in ((Connector(24), 24), (Connector(8), 16), (Connector(24, False), 24)):
        multi, request = listed(Connector(16), other, following=(0,)), FakeRequest()
        is_async = other.is_async or chosen == 16
        assert multi.get_num_new_matched_tokens(request, 0) == (chosen, is_async)
        multi.update_state_after_alloc(request, PAGED, chosen)
        assert other.told("alloc")[0][1] == (chosen if chosen != 16 else 0)


def test_an_engine_that_takes_fewer_tokens_cuts_the_last_pieces() -> None:
    connectors = Connector(16), Connector(40)
    multi = listed(*connectors)
    for tokens, loads in ((40, [16, 24]), (20, [16, 4]), (12, [12, 0]), (0, [0, 0])):
        request = FakeRequest(f"takes {tokens}")
        assert multi.get_num_new_matched_tokens(request, 0) == (40, True)
        multi.update_state_after_alloc(request, PAGED, tokens)
        assert [connector.told("alloc")[-1][1] for connector in connectors] == loads
        shown = multi.get_external_cache_hit_sources(request, tokens)
        assert sum(shown.values()) == tokens


def test_a_limit_is_one_of_all_pieces_together() -> None:
    params = {"kvtiers": {"max_load_tokens": 24}}
    for second, tokens in ((40, 16), (24, 24)):
        multi = listed(Connector(16), Connector(second))
        request = FakeRequest(kv_transfer_params=params)
        assert multi.get_num_new_matched_tokens(request, 0) == (tokens, True)


def ordered(*connectors: Connector) -> tuple[MultiWorker, MultiConnectorMetadata]:
    """A worker that has begun to load a request of 38 tokens, 18 of them from the second."""
    multi, request = listed(*connectors), FakeRequest(num_tokens=38)
    multi.get_num_new_matched_tokens(request, 0)
    multi.update_state_after_alloc(request, PAGED, 38)
    orders = multi.build_connector_meta(IDLE_STEP)
    assert multi.build_connector_meta(IDLE_STEP).pieces == {}, "once"
    worker = MultiWorker(connectors)
    worker.bind_connector_metadata(orders)
    worker.start_load_kv(None)
    return worker, orders


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("fails", [None, 0, 1])
def test_it_is_received_with_the_last_piece_and_just_the_failed_one_is_reported(
    order: tuple[int, int], fails: int | None
) -> None:
    connectors = Connector(20), Connector(38)
    worker, _ = ordered(*connectors)
    failed: set[int] = set()
    for number, place in enumerate(order):
        lost = {"r"} if place == fails else set()
        connectors[place].finished = TransferResults(finished_recving={"r"}, failed_recving=lost)
        results = worker.get_transfer_results(set())
        failed |= worker.get_block_ids_with_load_errors()
        assert results.failed_recving == set(), "the other piece has not"
        assert results.finished_recving == ({"r"} if number else set())
        connectors[place].finished = TransferResults()
    first, second = set(range(100, 105)), set(range(105, 110))
    assert failed == {None: set(), 0: first, 1: second}[fails]
    connectors[0].finished = TransferResults(finished_recving={"r"}, failed_recving={"r"})
    assert worker.get_transfer_results(set()).failed_recving == {"r"}, "a load of its own"


def test_one_connector_alone_fails_as_ever() -> None:
    connectors = Connector(0), Connector(38)
    worker, orders = ordered(*connectors)
    assert orders.pieces == {}
    connectors[1].finished = TransferResults(finished_recving={"r"}, failed_recving={"r"})
    assert worker.get_transfer_results(set()).failed_recving == {"r"}
    assert worker.get_block_ids_with_load_errors() == set()


def test_none_that_left_the_request_nothing_loads_it_again() -> None:
    connectors = Connector(16), Connector(40)
    multi, request = listed(*connectors), FakeRequest()
    assert multi.get_num_new_matched_tokens(request, 0) == (40, True)
    multi.update_state_after_alloc(request, PAGED, 40)
    assert multi.get_num_new_matched_tokens(request, 0) == (0, False)
