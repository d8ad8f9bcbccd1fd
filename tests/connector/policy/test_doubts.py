"""Blocks with KV that another node sent, as the engine gives them to others."""

from __future__ import annotations

from tests.support.fake_requests import FakeNewRequest, FakeRequest, FakeStep
from tiers.connector.policy.doubts import Doubts
from tiers.connector.policy.request_state import RequestState, RequestTable
from tiers.contract.engine_info import EngineInfo


def test_neither_the_null_block_nor_one_that_is_loaded_anew_is_in_doubt() -> None:
    requests = RequestTable(EngineInfo({}, 4, 4, 100))
    requests.know_weights("ours")
    doubts = Doubts(requests)

    def begins(name: str, table: list[int], new: int, sent: str | None = None) -> RequestState:
        """The engine gives a request blocks, those from a place on anew."""
        params = {"kvtiers": {} if sent is None else {"weights": sent}}
        state = requests.of(FakeRequest(name, kv_transfer_params=params))
        state.given((table,))
        doubts.allocated(state, new, in_step=False)
        return state

    def stores(name: str, table: list[int], new: int) -> bool:
        """Whether a request's blocks may be stored that begins so; tiers load one of them."""
        state = begins(name, table, new)
        step = FakeStep({name: 4}, FakeNewRequest(name, (new + 1) * 4, (table,)))
        assert [*doubts.step_begins(requests.begin_step(step).scheduled, None)] == []
        return state.stores

    begins("pulled", [0, 1, 2, 3], 1, sent="others")
    assert not stores("finds it as soon", [0, 1, 4, 5], 2)
    assert stores("finds nothing of it", [0, 6, 7], 1)
    assert stores("is given its blocks", [8, 1, 9], 1)
