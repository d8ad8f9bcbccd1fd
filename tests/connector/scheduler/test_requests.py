"""Which of a request's blocks are offered, where the engine's count differs from the steps'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tiers.connector.contract.engine import EngineInfo
from tiers.connector.policy.requests import RequestTable
from tiers.connector.scheduler.storing.offers import TierRequest, new_offers


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
