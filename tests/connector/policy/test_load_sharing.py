"""Which loads are waited for, and for how long."""

from __future__ import annotations

import pytest

from tests.support.fake_requests import FakeRequest
from tiers.connector.policy.load_sharing import LoadSharing
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo, KVGroup

TOKENS = 4


def request_of(request_id: str, text: str) -> FakeRequest:
    """A request whose blocks are the letters of `text`; it has two tokens beyond them."""
    halves = [text[: block + 1].encode() + bytes([n]) for block in range(len(text)) for n in (0, 1)]
    return FakeRequest(request_id, TOKENS * len(text) + 2, halves)


class Setting:
    """A chain in which `a` loads some blocks, and a clock."""

    def __init__(
        self, loads: str, first: int = 0, windows: bool = False, drops: bool = False
    ) -> None:
        self.time = 0.0
        groups = (KVGroup(TOKENS, 6),) if windows else ()
        info = EngineInfo({}, TOKENS, TOKENS // 2, num_blocks=99, groups=groups, drops_last=drops)
        self.requests = RequestTable(info, now=lambda: self.time, max_wait=10.0)
        self.sharing = LoadSharing(info)
        self.begin("a", loads, first)

    def state(self, name: str, text: str = "") -> RequestState:
        state = self.requests.of(request_of(name, text))
        if text:
            state.request = request_of(name, text)
        return state

    def begin(self, name: str, text: str, first: int = 0) -> None:
        state = self.state(name, text)
        state.wait_budget.loads()
        self.sharing.begins(state, first * TOKENS, (len(text) - first) * TOKENS)

    def joins(self, text: str, first: int = 0, found: int | None = None, name: str = "b") -> bool:
        blocks = len(text) - first if found is None else found
        return self.sharing.joins(self.state(name, text), first * TOKENS, blocks * TOKENS)

    def end(self, name: str) -> None:
        self.state(name).wait_budget.loaded()

    def waits(self, name: str) -> bool:
        return self.sharing.waits(self.state(name))

    def forget(self, name: str) -> None:
        self.sharing.ends(self.state(name))
        self.requests.forget(request_of(name, ""))


@pytest.mark.parametrize(
    ("loads", "asks", "joins"),
    [
        ("pppp", "pppp", True),
        ("pppp", "ppppxxxx", True),
        ("ppppyyyy", "ppppxxxx", True),
        ("ppppyyyy", "pppp", True),
        ("pppp", "ppppxxxxx", False),
        ("ppppyyyyy", "pppp", False),
        ("pppp", "xppp", False),
        ("pppp", "pxxx", False),
    ],
)
def test_a_load_is_waited_for_that_is_about_as_long_as_what_it_brings(
    loads: str, asks: str, joins: bool
) -> None:
    assert Setting(loads).joins(asks) is joins


def test_what_the_engine_has_already_is_no_part_of_it() -> None:
    assert Setting("rrpppp", first=2).joins("rrppppx", first=2)
    assert not Setting("rrpppp", first=2).joins("sspppp", first=2)
    assert not Setting("pppp").joins("pppp", first=4, found=0)


def test_nobody_waits_for_a_block_that_the_engine_does_not_take_from_its_cache() -> None:
    setting = Setting("p")
    state, request = setting.state("b", "p"), request_of("b", "p")
    request.num_tokens = TOKENS  # all of it is that block, whose last token is computed
    state.request = request
    assert not setting.sharing.joins(state, 0, TOKENS)
    assert not Setting("p", drops=True).joins("p"), "it drops the last that it finds"
    assert Setting("pppp", drops=True).joins("pppp")


def test_windows_are_found_at_the_end_of_a_load_alone() -> None:
    assert Setting("pppp", windows=True).joins("ppppxx")
    assert not Setting("ppppyy", windows=True).joins("ppppxx")
    assert not Setting("pppp", windows=True, drops=True).joins("ppppxx"), "its end is dropped"


def test_who_waits_goes_on_when_the_load_has_ended() -> None:
    setting = Setting("pppp")
    assert setting.joins("pppp")
    setting.time = 4.0
    assert setting.waits("b")
    setting.end("a")
    assert not setting.waits("b")
    assert setting.state("b").wait_budget.left() == 6.0, "the wait is charged"
    assert not setting.joins("pppp", name="c"), "nothing is in flight"


def test_who_is_asked_long_after_the_load_has_waited_for_no_more_than_that() -> None:
    """An engine with as many requests as may run asks nobody."""
    setting = Setting("pppp")
    assert setting.joins("pppp")
    setting.time = 0.5
    setting.end("a")
    setting.time = 60.0
    assert not setting.waits("b")
    assert setting.state("b").wait_budget.left() == 9.5


def test_who_waits_goes_on_when_the_loader_is_gone() -> None:
    setting = Setting("pppp")
    assert setting.joins("pppp")
    setting.forget("a")
    assert not setting.waits("b")


def test_a_load_that_never_ends_is_waited_for_as_long_as_a_request_may_wait() -> None:
    setting = Setting("pppp")
    assert setting.joins("pppp")
    setting.time = 9.9
    assert setting.waits("b")
    setting.time = 10.0
    assert not setting.waits("b")
    assert setting.state("b").wait_budget.left() == 0.0


def test_nobody_waits_for_a_request_that_waits() -> None:
    setting = Setting("pppp")
    setting.end("a")
    setting.begin("b", "pppp")
    assert setting.joins("pppp", name="a"), "preempted, and asks anew"
    setting.forget("b")
    assert not setting.joins("pppp", name="c")


def test_the_later_of_two_loads_counts_until_it_ends() -> None:
    setting = Setting("pppppppp")
    assert not setting.joins("ppp"), "its load takes much longer"
    setting.begin("b", "ppp")
    assert setting.joins("ppp", name="c")
    for name in ("b", "a"):
        setting.end(name)
        setting.forget(name)
    assert not setting.waits("c")
    assert not setting.sharing._loaders, "nothing is kept of them"


def test_those_who_have_waited_do_not_wait_for_one_who_comes_anew() -> None:
    """Else who loads and is aborted again and again uses up all of their time."""
    setting = Setting("pppp")
    assert setting.joins("pppp") and setting.joins("pppp", name="c")
    setting.time = 3.0
    setting.end("a")
    assert not setting.waits("b") and not setting.waits("c")
    setting.begin("d", "pppp")
    assert not setting.joins("pppp") and not setting.joins("pppp", name="c")
    setting.begin("b", "pppp")
    assert setting.joins("pppp", name="c"), "it has waited as long"
    assert setting.joins("pppp", name="e")
