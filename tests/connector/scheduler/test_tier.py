"""Which of a request's blocks are offered, where the engine's count differs from the steps'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.clock import Clock
from tiers.connector.policy.request_state import RequestTable
from tiers.connector.scheduler.tier import TierRequest
from tiers.connector.scheduler.tier_stores import new_offers
from tiers.contract.engine_info import EngineInfo
from tiers.contract.marks import MediaMarks


def test_a_token_that_was_computed_and_taken_back_completes_no_block() -> None:
    """vLLM takes back a turn's last token, which it has computed ahead, when the turn is followed
    by another one, whose first token gets its place. The request may end before that is computed.
    """
    engine = EngineInfo({}, 4, 4, num_blocks=9)
    table = RequestTable(engine)
    request: Any = SimpleNamespace(
        request_id="1",
        num_tokens=7,
        num_prompt_tokens=6,
        num_computed_tokens=8,
        block_hashes=[b"first" * 6],
    )
    state = table.of(request)
    own = TierRequest(state, offered=1)
    state.computed = 8
    request.num_tokens, request.num_computed_tokens = 10, 7
    request.block_hashes.append(b"other" * 6)
    assert new_offers(table, own, table.ended(state, ([3, 4],))).keys == ()
    request.num_computed_tokens = 8
    offers = new_offers(table, own, table.ended(state, ([3, 4],)))
    assert offers.paged == [4]


def test_what_a_request_waited_for_its_media_is_taken_from_its_time_and_no_more() -> None:
    clock = Clock(100.0)

    class Media(MediaMarks):
        is_ready = False

        def ready(self, request: Any) -> bool:
            return self.is_ready

    media = Media()
    table = RequestTable(EngineInfo({}, 4, 4, num_blocks=9, media=media), now=clock, max_wait=10.0)
    request: Any = SimpleNamespace(request_id="1")
    assert not table.is_marked(request, wait=True)
    clock.now += 4
    assert not table.is_marked(request, wait=True)
    media.is_ready = True
    assert table.is_marked(request, wait=True)
    budget = table.of(request).wait_budget
    clock.now += 5
    assert budget.left() == 6 and not budget.is_loading
