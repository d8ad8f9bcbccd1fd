"""Which of a request's blocks are offered, where the engine's count differs from the steps'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.fake_requests import FakeRequest
from tiers.connector.policy.request_state import Scheduled
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.tier import TierRequest
from tiers.connector.scheduler.tier_stores import Offers, new_offers
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.marks import MediaMark, MediaMarks
from tiers.contract.protocols import NULL_BLOCK, Request


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


THREE = Offers(range(3), [b"a", b"b", b"c"], [5, 6, 7])


@pytest.mark.parametrize(
    ("overwritten", "numbers"),
    [({9}, [0, 1, 2]), ({6}, [0, 2]), ({5, 7, 8}, [1]), ({5, 6, 7}, [])],
)
def test_what_the_engine_has_given_away_is_not_offered(
    overwritten: set[int], numbers: list[int]
) -> None:
    """It would be read when others have written into it."""
    left = THREE.without(overwritten)
    assert [*zip(*left, strict=True)] == [[*zip(*THREE, strict=True)][n] for n in numbers]


@pytest.mark.parametrize(
    ("omitted", "numbers"),
    [
        ([range(0)], [2, 3, 4, 5]),
        ([range(1)], [2, 3, 4, 5]),
        ([range(1, 2)], [4, 5]),
        ([range(1), range(2, 3)], [2, 3]),
        ([range(3)], []),
    ],
)
def test_blocks_that_may_not_be_stored_are_offered_in_no_part(
    omitted: list[range], numbers: list[int]
) -> None:
    """Two parts a block, from the second one on."""
    offers = Offers(range(2, 6), [b"%d" % number for number in range(2, 6)], range(12, 16))
    left = offers.outside(omitted, 2)
    assert [*left.numbers] == numbers and [*left.paged] == [10 + number for number in numbers]
    assert [*left.keys] == [b"%d" % number for number in numbers]


def test_omitted_blocks_are_not_among_new_offers() -> None:
    table = RequestTable(EngineInfo({}, 4, 4, num_blocks=9))
    state = table.of(FakeRequest(block_hashes=[b"a", b"b"]))
    state.given([[3, 4]])
    state.omitted = (range(1),)
    offers = new_offers(table, TierRequest(state), Scheduled(state, 0, 8, 2))
    assert [*offers.paged] == [4]


class InDoubt(MediaMarks):
    """Marks of media whose content is not sure."""

    def of(self, request: Request) -> MediaMark:
        return MediaMark(shared=False)


def test_blocks_of_media_that_are_in_doubt_are_not_offered() -> None:
    """Their keys would name what they may not be computed from."""
    table = RequestTable(EngineInfo({}, 4, 4, num_blocks=9, media=InDoubt()))
    state = table.of(FakeRequest(block_hashes=[b"a", b"b"]))
    state.given([[3, 4]])
    own = TierRequest(state)
    assert not new_offers(table, own, Scheduled(state, 0, 8, 2)).keys and not own.offered


@pytest.mark.parametrize("place", [0, 1])
def test_a_state_is_offered_with_its_block_and_no_other_one(place: int) -> None:
    """Whether it is the first part of a block or the last."""
    groups = [KVGroup(8)]
    groups.insert(place, KVGroup(8, window=1, is_state=True))
    table = RequestTable(EngineInfo({}, 8, 8, num_blocks=9, groups=tuple(groups)))
    state = table.of(FakeRequest(block_hashes=[b"a", b"b", b"c"]))
    tables = [[1, 2, 3]]
    tables.insert(place, [4, 5, 6])
    state.given(tables)
    left = [(2 * block + place, 30 + block) for block in range(3)]
    for offered in (0, 1):
        scheduled = Scheduled(state, 0, 16, 2, states=left)
        offers = new_offers(table, TierRequest(state, offered=offered), scheduled)
        whole = [(2 * block + 1 - place, 1 + block) for block in range(offered, 2)]
        expected = sorted([*whole, *left[offered:2]])
        assert [*zip(offers.numbers, offers.paged, strict=True)] == expected


def test_a_part_that_no_window_reaches_any_more_is_not_offered() -> None:
    """The engine has given it away, and says so by the block that stands for none."""
    groups = (KVGroup(8), KVGroup(8, window=9))
    table = RequestTable(EngineInfo({}, 8, 8, num_blocks=9, groups=groups))
    state = table.of(FakeRequest(block_hashes=[b"a", b"b", b"c"]))
    state.given([[1, 2, 3], [NULL_BLOCK, 5, 6]])
    offers = new_offers(table, TierRequest(state), Scheduled(state, 8, 24, 3))
    assert [*zip(offers.numbers, offers.paged, strict=True)] == [
        (0, 1),
        (2, 2),
        (3, 5),
        (4, 3),
        (5, 6),
    ]
    offers = new_offers(table, TierRequest(state), Scheduled(state, 16, 24, 3))
    assert [*offers.numbers] == [0, 2, 3, 4, 5]


def test_what_a_request_waited_for_its_media_is_taken_from_its_time_and_no_more() -> None:
    clock = Clock(100.0)

    class Media(MediaMarks):
        is_ready = False

        def ready(self, request: Any) -> bool:
            return self.is_ready

    media = Media()
    table = RequestTable(EngineInfo({}, 4, 4, num_blocks=9, media=media), now=clock, max_wait=10.0)
    request: Any = SimpleNamespace(request_id="1")
    for _ in range(4):
        assert not table.is_marked(request, wait=True)
        clock.now += 1
    media.is_ready = True
    assert table.is_marked(request, wait=True)
    budget = table.of(request).wait_budget
    clock.now += 5
    assert budget.left() == 6 and not budget.is_loading
