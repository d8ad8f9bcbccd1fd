"""Who loads, where loading is compared with computing and tiers are still looking."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES, LoadPolicy
from tests.support.clock import Clock
from tests.support.fake_requests import FakeRequest
from tiers.connector.policy import chooser
from tiers.connector.policy.choice import NO_LOAD, Choice, Stitch, stitched, tokens_of_each
from tiers.connector.policy.chooser import Chooser, LookupLatency
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import LookupTimes
from tiers.loading.comparison import SLOWER, Comparison
from tiers.loading.load_cost import LoadCost

BLOCK = 16
TOKENS = 1024
FAST, SLOW = 100_000.0, 100.0
"""Tokens a second; the engine computes 1,000."""


class Foreign:
    """Another connector of the engine, which has so many tokens of every request."""

    def __init__(self, tokens: int | None, is_async: bool = True) -> None:
        self.tokens, self.is_async = tokens, is_async
        self.asked = 0

    def get_num_new_matched_tokens(
        self, request: FakeRequest, computed: int
    ) -> tuple[int | None, bool]:
        self.asked += 1
        return self.tokens, self.is_async


class Ours(Foreign):
    """A tier whose loads are measured; None: it is looking. `engine`: seconds that the engine took
    beside each."""

    def __init__(self, tokens: int | None, rate: float, engine: float, clock: Clock) -> None:
        super().__init__(tokens)
        self.load_cost = LoadCost(clock)
        self.noted: dict[str, float] = {}
        for job in range(4):
            self.load_cost.began(job, TOKENS)
            clock.now += TOKENS / rate + engine
            self.load_cost.ended(job, TOKENS / rate, whole=True)

    def count(self, **measures: float) -> None:
        self.noted.update(measures)

    def coverage(self, state: RequestState, blocks: range) -> list[bool] | None:
        self.asked += len(blocks)
        if self.tokens is None:
            return None
        return [(block + 1) * BLOCK <= self.tokens for block in blocks]

    def version(self, state: RequestState) -> int | None:
        return None if self.tokens is None else self.tokens

    def load_blocks(self, *_: object) -> None: ...

    def missed(self, steps: object) -> None: ...

    def why_nothing(self, request: Any) -> str:
        return ""

    def lookup_times(self, request: Any) -> LookupTimes:
        """It answers when it is asked."""
        return LookupTimes(waited=math.inf)


class Chain:
    """A chain of `children`, asked for one request."""

    def __init__(
        self,
        *make: Callable[[Clock], Foreign],
        load: Any = "stitched",
        always: bool = False,
        following: Collection[int] = (),
        max_wait: float = math.inf,
    ) -> None:
        self.clock = Clock(1000.0)
        self.children: list[Any] = [one(self.clock) for one in make]
        engine = EngineInfo({}, BLOCK, BLOCK, num_blocks=0)
        requests = RequestTable(engine, now=self.clock, max_wait=max_wait)
        comparison = self.comparison = Comparison(BLOCK, self.clock)
        comparison.prefill.measured(TOKENS, TOKENS / 1000)
        names = [str(n) for n in range(len(make))]
        waits = LookupLatency(self.clock)
        self.chooser = Chooser(self.children, names, load, requests, comparison, waits, following)
        self.chooser.follow(self.children, names, range(len(make)), load, always)
        self.state = requests.of(FakeRequest("asked", TOKENS + 1))

    def choose(self) -> Choice:
        return self.chooser.choose(self.state, 0)

    def loaders(self) -> dict[int, int]:
        """Tokens by child."""
        choice = self.choose()
        return tokens_of_each(choice, choice.tokens or 0, BLOCK)


def ours(tokens: int | None, rate: float = FAST, engine: float = 0.0) -> Callable[[Clock], Ours]:
    return lambda clock: Ours(tokens, rate, engine, clock)


def foreign(tokens: int | None, is_async: bool = True) -> Callable[[Clock], Foreign]:
    return lambda clock: Foreign(tokens, is_async)


@pytest.mark.parametrize(
    ("load", "has", "serves"),
    [
        ("first", (0, 3, 7), ((1, 3),)),
        ("first", (0, 0), ()),
        ("first", (3, None), ((0, 3),)),
        ("first", (None, 3), None),
        ("longest", (3, 7, 7), ((1, 7),)),
        ("longest", (0, 0), ()),
        ("longest", (3, None), None),
        ("longest", (None, 3), None),
        ("longest", (None, TOKENS, None), ((1, TOKENS),)),
    ],
)
def test_the_first_that_has_tokens_serves_or_the_one_with_most(
    load: str, has: Sequence[int | None], serves: tuple[tuple[int, int], ...] | None
) -> None:
    """One that is still looking is waited for while it could win."""
    choice = Chain(*map(foreign, has), load=load).choose()
    assert (None if choice.tokens is None else choice.pieces) == serves
    assert choice.tokens is None or choice.tokens == sum(tokens for _, tokens in choice.pieces)


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_nothing_is_to_load_of_less_than_a_block(load: LoadPolicy) -> None:
    """Nor once no tier may load any more. An engine takes no load of nothing beside its steps."""
    chain = Chain(ours(TOKENS), ours(TOKENS), load=load)
    assert chain.chooser.choose(chain.state, TOKENS)[:3] == NO_LOAD[:3]
    chain.chooser.follow(chain.children, ["0", "1"], [], load, False)
    assert chain.chooser.choose(chain.state, TOKENS)[:3] == NO_LOAD[:3]


def test_tiers_below_the_one_that_serves_are_not_asked() -> None:
    for load in ("first", "longest"):
        chain = Chain(ours(TOKENS), ours(TOKENS), load=load)
        assert chain.loaders() == {0: TOKENS}
        assert [bool(child.asked) for child in chain.children] == [True, False]


def test_tiers_below_one_that_is_looking_are_asked_so_that_lookups_overlap() -> None:
    chain = Chain(foreign(None), foreign(None), foreign(None), load="first")
    assert chain.choose().tokens is None
    assert [child.asked for child in chain.children] == [1, 1, 1]


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_tier_that_is_slower_than_computing_is_left_out(load: str) -> None:
    chain = Chain(ours(512), ours(TOKENS, SLOW), load=load)
    assert chain.loaders() == {0: 512}
    chain.chooser.decided(chain.state, chain.choose())
    assert chain.children[1].noted == {}, "something is loaded"
    alone = Chain(ours(TOKENS, SLOW), load=load)
    choice = alone.choose()
    assert (choice.tokens, choice.passed) == (0, {0: SLOWER})
    alone.chooser.decided(alone.state, choice)
    assert alone.children[0].noted == {"recompute_preferred": 1}


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_metrics_tell_whether_tier_engine_or_max_wait_makes_a_load_too_slow(load: str) -> None:
    """Computing 64 tokens takes 64 ms. The engine takes 100 ms beside a load: that alone is too
    much for so few, whatever the tier takes, and not for all."""
    slower, engine = {"recompute_preferred": 1}, {"recompute_preferred_engine": 1}
    late, ever = {"recompute_late": 1}, math.inf
    for tokens, rate, waits, why in (
        (64, FAST, ever, engine),
        (64, SLOW, ever, slower),
        (TOKENS, FAST, ever, {}),
        (TOKENS, FAST, 0.005, late),
        (TOKENS, SLOW, 0.005, slower),
    ):
        chain = Chain(ours(tokens, rate, engine=0.1), load=load, max_wait=waits)
        assert chain.children[0].load_cost.gauges()["load_engine_seconds"] == pytest.approx(0.1)
        chain.chooser.decided(chain.state, chain.choose())
        assert chain.children[0].noted == why


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_what_the_engine_takes_for_a_load_decides_between_no_tiers(load: str) -> None:
    """It is as much for whichever tier loads, however little was heard of it yet."""
    known, unknown = (
        Chain(ours(TOKENS, 4000.0, engine), ours(TOKENS, 2000.0), load=load).loaders()
        for engine in (0.4, 0.0)
    )
    assert known == unknown
    assert set(known) == ({0, 1} if load == "stitched" else {0})


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_lower_tier_serves_where_an_upper_one_is_slower(load: str) -> None:
    chain = Chain(ours(TOKENS, SLOW), ours(TOKENS, FAST), load=load)
    assert chain.loaders() == {1: TOKENS}


def test_always_loads_from_the_slow_tier_too() -> None:
    assert Chain(ours(TOKENS, SLOW), load="first", always=True).loaders() == {0: TOKENS}


def test_a_lower_tier_is_not_asked_where_the_upper_one_is_soon() -> None:
    chain = Chain(ours(TOKENS), ours(TOKENS))
    assert chain.loaders() == {0: TOKENS}
    assert chain.children[1].asked == 0


def test_tiers_that_take_long_share_a_prefix() -> None:
    chain = Chain(ours(TOKENS, 2000.0), ours(TOKENS, 2000.0))
    assert chain.loaders() == {0: 512, 1: 512}


def test_a_tier_is_asked_once_for_a_request_that_waits() -> None:
    chain = Chain(ours(TOKENS, 2000.0), ours(TOKENS, 2000.0))
    chain.choose()
    asked = [child.asked for child in chain.children]
    for _ in range(10):
        chain.choose()
    assert [child.asked for child in chain.children] == asked
    chain.children[1].tokens = 512
    assert chain.choose().tokens == TOKENS
    assert [child.asked for child in chain.children] > asked


@pytest.mark.parametrize("load", ["first", "longest", "stitched"])
def test_a_prefix_is_put_together_once_for_a_request_that_waits(
    load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[range] = []

    def stitch(children: Any, blocks: range, window: int = 0) -> Stitch:
        made.append(blocks)
        return stitched(children, blocks, window)

    monkeypatch.setattr(chooser, "stitched", stitch)
    chain = Chain(ours(512), ours(TOKENS), load=load)
    first = chain.choose()
    count = len(made)
    assert count and [chain.choose() for _ in range(10)] == [first] * 10
    assert len(made) == count
    chain.children[1].tokens = 256
    assert (chain.choose().tokens, len(made) > count) == (512, True), "a tier has less now"


def test_a_tier_that_looks_a_long_prompt_up_by_and_by_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its version is the same meanwhile."""
    chain = Chain(ours(512), ours(None))
    chain.children[1].version = lambda state: 1
    assert chain.choose().tokens is None
    monkeypatch.setattr(chooser, "stitched", None)
    assert [chain.choose().tokens for _ in range(3)] == [None] * 3, "nothing is put together anew"
    monkeypatch.undo()
    chain.children[1].tokens = TOKENS
    assert chain.choose().tokens == TOKENS


def test_lookups_are_waited_for_while_that_can_pay() -> None:
    chain = Chain(ours(None), ours(TOKENS))
    assert chain.loaders() == {1: TOKENS}, "the other could not be sooner"
    chain = Chain(ours(None), ours(TOKENS, SLOW))
    assert chain.choose().tokens is None
    assert chain.children[0].asked == TOKENS // BLOCK, "once, however often it is planned"
    chain = Chain(ours(None), ours(0))
    assert chain.choose().tokens is None
    chain.clock.now += 0.4
    assert chain.choose().tokens is None, "computing takes a second"
    chain.clock.now += 0.7
    assert chain.choose().tokens == 0, "waited long enough"


def test_a_tier_whose_lookups_take_longer_than_they_save_is_not_waited_for_again() -> None:
    chain = Chain(ours(None))
    waited = 0
    for _ in range(100):
        before = waited
        while chain.choose().tokens is None:
            chain.clock.now += 0.01
            waited = before + 1
        chain.chooser.decided(chain.state, chain.choose())
    assert 1 <= waited <= 5


def test_how_long_lookups_are_expected_to_take() -> None:
    clock = Clock(1000.0)
    latency, state, tier = LookupLatency(clock), Chain(ours(None)).state, Ours(None, FAST, 0, clock)

    def left(*waited: float) -> list[float]:
        """What is left of the wait of a request, before and after it has waited."""
        nonlocal state
        state = Chain(ours(None)).state
        found = [latency.left(0, state)]
        for seconds in waited:
            clock.now += seconds
            found.append(latency.left(0, state))
        return found

    assert left(2.0) == [0.0, 2.0], "as long again"
    latency.answered(0, state, tier)
    assert left(0.5) == [2.0, 1.5]
    latency.answered(0, state, tier)
    latency.answered(0, state, tier)
    assert left(1.0) == pytest.approx([1.55, 1.0]), "0.3 of it is the last one's"
    latency.decided(state)
    assert not state.looking
    assert left(0.1) == pytest.approx([2.0, 1.9]), "a wait in vain counts twice"
    latency.decided(state)
    assert left() == pytest.approx([1.96]), "and is forgotten by and by"


def test_a_lookup_without_an_answer_took_no_longer_than_a_request_waits_for_one() -> None:
    """However long the engine asked nobody."""
    chain = Chain(ours(None), max_wait=4.0)
    latency, state = LookupLatency(chain.clock), chain.state
    assert latency.left(0, state) == 0.0
    chain.clock.now += 30.0
    assert latency.left(0, state) == 1.0
    latency.decided(state)
    assert latency.left(0, state) == 2.0


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_behind_a_part_of_a_block_nothing_is_loaded(load: str) -> None:
    """Tiers have whole blocks; the engine's own may be smaller, and its cache end between."""
    chain = Chain(ours(TOKENS), load=load)
    assert not chain.chooser.choose(chain.state, BLOCK // 2).tokens
    assert chain.chooser.choose(chain.state, BLOCK).tokens == TOKENS - BLOCK


@pytest.mark.parametrize("limits_itself", [False, True])
def test_a_chain_within_this_one_applies_the_limits_of_a_request_itself(
    limits_itself: bool,
) -> None:
    chain = Chain(foreign(512))
    chain.children[0].limits_requests = limits_itself
    params = {"kvtiers": {"tiers": ["a tier of that chain"]}}
    limited = FakeRequest("limited", TOKENS + 1, kv_transfer_params=params)
    state = chain.chooser._requests.of(limited)
    assert chain.chooser.choose(state, 0).tokens == (512 if limits_itself else 0)


@pytest.mark.parametrize(
    ("has", "following", "expected"),
    [
        ([(64, True), (32, True)], [1], Choice(96, True, pieces=((0, 64), (1, 32)))),
        ([(64, True), (160, False)], [1], Choice(64, True, pieces=((0, 64),))),
        ([(70, True), (32, True)], [1], Choice(70, True, pieces=((0, 70),))),
        ([(64, False), (32, True)], [], Choice(64, False, pieces=((0, 64),))),
        ([(64, False), (0, True)], [], Choice(64, False, pieces=((0, 64),))),
        ([(64, False), (64, False)], [], Choice(64, False, pieces=((0, 64),))),
        ([(64, True), (0, False)], [1], Choice(64, True, pieces=((0, 64),))),
        ([(0, True), (0, False)], [1], NO_LOAD),
    ],
    ids=[
        "both",
        "in a step, behind what is loaded beside it",
        "behind a part of a block",
        "in a step, and longer",
        "one has it",
        "the first of equal ones",
        "nothing is behind it",
        "nothing",
    ],
)
def test_other_connectors_load_pieces_only_where_each_begins_as_the_one_before_ends(
    has: list[tuple[int, bool]], following: list[int], expected: Choice
) -> None:
    """What one has behind a prefix is not at the beginning of the prompt."""
    chain = Chain(*(foreign(*one) for one in has), following=following)
    assert chain.choose() == expected


def test_a_request_is_compared_beside_the_others_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each counts until it begins or has ended, once; some engines announce none."""
    chain, others = Chain(ours(TOKENS)), list[int]()
    choose = chain.comparison.choose

    def noted(propose: Any, wish: Any) -> Any:
        others.append(wish.others)
        return choose(propose, wish)

    monkeypatch.setattr(chain.comparison, "choose", noted)
    chooser, state = chain.chooser, chain.state

    def waiting() -> int:
        chain.choose()
        return others[-1]

    assert waiting() == 0
    for arrived in range(4):
        chooser.arrived()
        assert waiting() == arrived
    chooser.gone(None)
    assert waiting() == 2
    chooser.decided(state, chain.choose())
    assert waiting() == 2, "and it itself waits no more"
    chooser.gone(state)
    assert waiting() == 2, "it has begun before"
    for _ in range(3):
        chooser.gone(None)
    chooser.arrived()
    assert waiting() == 1


def test_a_change_of_the_chain_leaves_the_tiers_of_its_places_in_its_order() -> None:
    chain = Chain(ours(512), ours(TOKENS), ours(TOKENS), load="first")
    assert chain.loaders() == {0: 512}
    for order, serves in (([2, 1], {2: TOKENS}), ([1], {1: TOKENS}), ([], {})):
        chain.chooser.follow(chain.children, ["0", "1", "2"], order, "first", False)
        assert chain.loaders() == serves and chain.comparison.meters.keys() == set(order)
    other: Any = ours(64)(chain.clock)
    chain.chooser.follow([other], ["new"], [0], "first", False)
    may_load: Any = SimpleNamespace(may_load=lambda name: name == "new", max_load_tokens=None)
    chain.state.limits = may_load
    assert chain.loaders() == {0: 64}
    for load in LOAD_POLICIES:
        chain.chooser.follow([other], ["new"], [0], load, False)
        assert chain.comparison.shares == (load == "stitched")


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_tier_that_knows_no_version_of_its_answers_is_asked_each_time(load: str) -> None:
    chain = Chain(ours(512), load=load)
    chain.children[0].version = lambda state: None
    for tokens in (512, 64, 256):
        chain.children[0].tokens = tokens
        assert chain.loaders() == {0: tokens}
