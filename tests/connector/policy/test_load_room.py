"""Which requests may load at once, so that each can be computed behind what it loads."""

from __future__ import annotations

import pytest

from tests.support.fake_requests import FakeRequest
from tiers.connector.policy.load_room import LoadRoom
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo, KVGroup

TOKENS = 4
WINDOW = 8
"""Two blocks, and what is left of a third."""
STEP = 16


class Setting:
    """Two groups of an engine, and the blocks that it has free."""

    def __init__(self, free: int, window: int | None = WINDOW, lookahead: int = 0) -> None:
        groups = (KVGroup(TOKENS), KVGroup(TOKENS, window))
        info = EngineInfo(
            {}, TOKENS, TOKENS, 99, groups=groups, step_tokens=STEP, lookahead_tokens=lookahead
        )
        self.requests = RequestTable(info)
        self.room = LoadRoom(info)
        self.room.free_blocks = lambda: free

    def state(self, name: str, tokens: int) -> RequestState:
        return self.requests.of(FakeRequest(name, tokens, []))

    def begin(self, name: str, tokens: int, end: int) -> RequestState:
        state = self.state(name, tokens)
        self.room.begins(state, end)
        return state

    def fits(self, name: str, tokens: int, end: int) -> bool:
        return self.room.fits(self.state(name, tokens), end)


@pytest.mark.parametrize(("left", "needed"), [(4, 4), (8, 6), (16, 10), (40, 16)])
def test_one_more_loads_where_the_next_step_of_any_fits_beside_its_blocks(
    left: int, needed: int
) -> None:
    """Without windows a step wants room for all that is left, with them for what it computes; and
    a block of each for drafts. The other has loaded five blocks of one group and three of one."""
    for free in (8 + needed - 1, 8 + needed):
        setting = Setting(free)
        setting.begin("a", 20 + left, end=20)
        assert setting.fits("b", 21, end=20) is (free == 8 + needed)
        own = Setting(free)
        own.begin("a", 21, end=20)
        assert own.fits("b", 20 + left, end=20) is (free == 8 + needed)


@pytest.mark.parametrize(("lookahead", "needed"), [(3, 4), (4, 6), (9, 8)])
def test_a_step_has_room_for_what_it_drafts(lookahead: int, needed: int) -> None:
    for free in (8 + needed - 1, 8 + needed):
        setting = Setting(free, lookahead=lookahead)
        setting.begin("a", 21, end=20)
        assert setting.fits("b", 21, end=20) is (free == 8 + needed)


def test_one_alone_always_loads() -> None:
    setting = Setting(free=0)
    assert setting.fits("a", 60, end=40)
    state = setting.begin("a", 60, end=40)
    assert not setting.fits("b", 21, end=20)
    setting.room.ends(state)
    assert setting.fits("b", 21, end=20)


def test_nobody_passes_one_that_waits_for_room() -> None:
    setting = Setting(free=20)
    setting.begin("a", 41, end=40)
    assert not setting.fits("b", 90, end=80)
    assert not setting.fits("c", 9, end=8), "else small ones might pass it for ever"
    setting.room.step_begins()
    assert setting.fits("c", 9, end=8), "b has gone, or is asked about first"


def test_without_windows_the_engine_itself_keeps_room() -> None:
    setting = Setting(free=0, window=None)
    setting.begin("a", 41, end=40)
    assert setting.fits("b", 41, end=40)


def test_an_engine_that_does_not_show_what_is_free() -> None:
    setting = Setting(free=0)
    setting.room.free_blocks = None
    setting.begin("a", 41, end=40)
    assert setting.fits("b", 41, end=40)
