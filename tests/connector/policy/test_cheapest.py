"""The load policy `cheapest`, in a world whose clock, links and engine are what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spec.chain import CheapestSpec
from tests.support.clock import Clock
from tests.support.fake_requests import FakeRequest, first_step
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.policy.cheapest.cheapest import Cheapest
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.choice import NOBODY, Choice
from tiers.connector.policy.chooser import Chooser
from tiers.connector.policy.requests import RequestState, RequestTable

BLOCK = 16
PROMPT = range(64)
"""Blocks of the usual prompt: 1,024 tokens."""


class World:
    """Tiers that hold everything; `links` are their (seconds each time, tokens per second)."""

    def __init__(
        self, *links: tuple[float, float], prefill: float = 1000.0, settings: CheapestSpec | None
    ) -> None:
        self.clock = Clock(1000.0)
        self.links = list(links)
        self.prefill = prefill
        self.meters = {child: LoadCost(self.clock) for child in range(len(links))}
        self.policy = Cheapest(settings or CheapestSpec(), BLOCK, self.meters, self.clock)
        self.requests = RequestTable(EngineInfo({}, BLOCK, BLOCK, num_blocks=0), now=self.clock)
        self.asked = self.request("asked")
        self._jobs = iter(range(1_000_000))
        self._names = iter(range(1_000_000))

    def request(self, name: str, tokens: int = 1024) -> RequestState:
        return self.requests.of(FakeRequest(name, tokens))

    def choose(self, blocks: range = PROMPT, has: Sequence[int | None] | None = None) -> Choice:
        """What the policy would do for a request that begins now; it is not begun."""
        tokens = [len(blocks) * BLOCK] * len(self.links) if has is None else has
        answers = [(one, bool(one)) for one in tokens]
        return self.policy.choose(self.asked, answers, blocks)

    def run(self, blocks: range = PROMPT, has: Sequence[int | None] | None = None) -> float:
        """Seconds that one request takes from its beginning to the end of its prompt."""
        name = f"request-{next(self._names)}"
        whole = len(blocks) * BLOCK
        state = self.request(name, whole)
        self.policy.prefill.expect(state)
        choice = self.choose(blocks, has)
        self.policy.decided(state, choice)
        tokens = choice.tokens or 0
        shares = choice.shares or {}
        parts = {child: sum(map(len, ranges)) * BLOCK for child, ranges in shares.items()}
        if choice.child is not None:
            parts = {choice.child: tokens}
        began = self.clock.now
        self._load(parts)
        output = first_step(name, tokens, whole - tokens)
        step = self.policy.prefill.step_begins(self.requests.begin_step(output).scheduled)
        self.clock.now += (whole - tokens) / self.prefill
        self.policy.step_ended(step)
        self.requests.forget(state.request)
        return self.clock.now - began

    def _load(self, parts: dict[int, int]) -> None:
        taken = {c: self.links[c][0] + tokens / self.links[c][1] for c, tokens in parts.items()}
        jobs = {child: next(self._jobs) for child in parts}
        for child, tokens in parts.items():
            self.meters[child].began(jobs[child], tokens)
        self.clock.now += max(taken.values(), default=0.0)
        for child, seconds in taken.items():
            self.meters[child].ended(jobs[child], seconds, whole=True)

    def run_many(self, count: int, pause: float = 1.0) -> list[float]:
        """So many requests, one after the other."""
        times = []
        for _ in range(count):
            times.append(self.run())
            self.clock.now += pause
        return times


def world(
    *links: tuple[float, float], prefill: float = 1000.0, settings: CheapestSpec | None = None
) -> World:
    made = World(*links, prefill=prefill, settings=settings)
    made.run(has=[0] * len(links))  # the engine's rate is known
    return made


FAST = (0.001, 100_000.0)
SLOW = (0.001, 100.0)


def test_before_anything_is_measured_the_longest_prefix_is_loaded() -> None:
    made = World(SLOW, SLOW, settings=None)
    assert made.choose(has=[16, 512]) == Choice(1, 512, True)
    assert made.choose(has=[16, None]).tokens is None, "it might have more"
    made.run(has=[0, 0])
    shares = made.choose(has=[512, 512]).shares
    assert shares == {0: [range(4, 32)], 1: [range(4)]}, "what was never measured is measured"


@pytest.mark.parametrize(("latency", "rate"), [FAST, SLOW, (0.5, 1e6), (0.0, 900), (0.0, 1200)])
def test_it_is_as_quick_as_the_better_of_loading_and_computing(latency: float, rate: float) -> None:
    made = world((latency, rate))
    loading, computing = latency + 1024 / rate, 1024 / 1000
    made.run_many(3)
    times = made.run_many(200)
    assert sum(times) / len(times) < 1.1 * min(loading, computing)
    assert max(times) < 2.2 * computing, "no single request pays much for a probe"


@pytest.mark.parametrize("bandwidth", [10, 20, 30, 35, 40, 45, 60, 100, 300, 1000, 3000, 10_000])
def test_from_10_mb_to_10_gb_a_second_it_is_never_a_tenth_slower(bandwidth: float) -> None:
    """A token has 4 KiB of KV and takes 0.1 ms to compute; the first request counts too."""
    made = World((0.0005, bandwidth * 1e6 / 4096), prefill=10_000.0, settings=None)
    lengths = (range(32), range(64), range(128)) * 300
    loading = sum(0.0005 + len(r) * BLOCK * 4096 / (bandwidth * 1e6) for r in lengths)
    computing = sum(len(blocks) * BLOCK / 10_000 for blocks in lengths)
    assert sum(map(made.run, lengths)) < 1.1 * min(loading, computing)


@pytest.mark.parametrize("order", [(SLOW, FAST), (FAST, SLOW)])
def test_the_quicker_tier_serves(order: tuple[tuple[float, float], ...]) -> None:
    made = world(*order)
    made.run_many(5)
    choices = [made.choose() for _ in range(3)]
    assert {choice.child for choice in choices} == {order.index(FAST)}
    assert sum(made.run_many(200)) / 200 < 1.1 * (0.001 + 1024 / 100_000) + 0.01


def test_a_longer_prefix_from_a_slower_tier_can_be_sooner() -> None:
    made = world((0.0, 100_000.0), (0.0, 10_000.0))
    made.run_many(3, pause=0.0)
    made.run(has=[0, 1024])
    assert made.choose(has=[1024, 1024]).child == 0
    assert made.choose(has=[1008, 1024]).child == 0
    sooner = made.choose(has=[512, 1024])
    assert sooner.tokens == 1024, "from the other the rest would have to be computed"


def test_short_prefixes_are_computed() -> None:
    made = world(FAST, settings=CheapestSpec(min_tokens=100))
    assert made.choose(has=[96]).tokens == 0
    assert made.choose(has=[112])[:2] == (0, 112)


def test_loading_must_be_quicker_by_the_margin() -> None:
    for margin, child in ((0.0, 0), (0.5, None)):
        made = world((0.0, 1250.0), settings=CheapestSpec(margin=margin))
        made.run(blocks=range(4))
        choice = made.choose()
        assert choice.child == child
        assert choice.passed == (() if child == 0 else (0,))


def test_a_tier_that_becomes_slow_costs_few_requests() -> None:
    made = world(FAST)
    made.run_many(50)
    made.links[0] = SLOW
    times = made.run_many(300)
    assert sum(taken > 2.2 for taken in times) <= 2
    assert sum(times) - 2 * 10.24 < 1.1 * 300 * 1.024


def test_a_tier_that_becomes_quick_again_is_used_again() -> None:
    made = world(SLOW)
    made.run_many(100)
    assert made.choose().child is None
    made.links[0] = FAST
    times = made.run_many(300)
    assert times[-1] < 0.1, f"back to loading after {sum(t > 0.1 for t in times)} requests"
    assert sum(taken > 0.1 for taken in times) < 150


def test_a_latency_that_is_small_beside_long_loads_is_found_out() -> None:
    """Small probes alone would make a tier with a latency look slow for ever."""
    made = world((20.0, 100_000.0))
    made.run_many(50)
    made.links[0] = (0.2, 100_000.0)
    made.run_many(1000)
    assert made.choose().child == 0
    assert made.choose(blocks=range(4), has=[64]).child is None, "64 tokens take 0.06 s to compute"


def test_one_odd_load_does_not_condemn_a_tier() -> None:
    made = world((0.0, 50_000.0))
    made.run_many(20)
    made.links[0] = (0.0, 100.0)
    made.run()
    made.links[0] = (0.0, 50_000.0)
    assert made.choose().child == 0


def test_requests_keep_away_from_a_tier_that_hangs() -> None:
    made = world(FAST)
    made.run_many(20)
    made.meters[0].began(-1, 1024)
    for _ in range(3):
        made.meters[0].stepped()
        assert made.choose().child == 0, "it may be about to end"
        made.clock.now += 0.4
    made.clock.now += 1.0
    made.meters[0].stepped()
    assert made.choose().child is None
    made.meters[0].ended(-1, 1.0, whole=False)
    assert made.choose().child == 0, "what was not loaded says nothing of speed"


def test_what_is_queued_counts() -> None:
    made = world((0.0, 10_000.0))
    made.run_many(5)
    for job in range(-1, -11, -1):
        assert made.choose().child == 0
        made.meters[0].began(job, 1024)
    for job in range(-11, -21, -1):
        made.meters[0].began(job, 1024)
    assert made.meters[0].queued_tokens == 20 * 1024
    assert made.choose().child is None, "twenty others are before it"


def test_the_engine_is_measured_also_where_everything_could_be_loaded() -> None:
    made = World(SLOW, settings=None)
    times = made.run_many(10)
    assert times[0] > 10, "nothing is known yet"
    assert made.choose().child is None
    assert times[-1] < 1.2


def test_lookups_are_waited_for_while_that_can_pay() -> None:
    made = world(FAST, FAST)
    made.run_many(5)
    assert made.choose(has=[None, 1024]).child == 1, "the other could not be sooner"
    assert made.choose(has=[None, 0]).tokens is None
    made.clock.now += 0.4
    assert made.choose(has=[None, 0]).tokens is None, "computing takes a second"
    made.clock.now += 0.7
    assert made.choose(has=[None, 0]).tokens == 0, "waited long enough"


def test_a_tier_whose_lookups_take_longer_than_they_save_is_not_waited_for_again() -> None:
    made = world(FAST, prefill=10_000.0)
    made.run_many(5)
    waited = 0
    for _ in range(100):
        before = waited
        while made.choose(has=[None]).tokens is None:
            made.clock.now += 0.01
            waited = before + 1
        made.policy.decided(made.asked, NOBODY)
    assert 1 <= waited <= 5


class Foreign:
    """Another connector of the engine, which has so many tokens of every request."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def get_num_new_matched_tokens(self, request: FakeRequest, computed: int) -> tuple[int, bool]:
        return self.tokens, True


class Ours(Foreign):
    """A tier whose loads are measured."""

    def __init__(self, tokens: int, meter: LoadCost) -> None:
        super().__init__(tokens)
        self.load_cost = meter
        self.noted: dict[str, float] = {}

    def note(self, **measures: float) -> None:
        self.noted.update(measures)

    def coverage(self, state: RequestState, blocks: range) -> list[bool]:
        return [(block + 1) * BLOCK <= self.tokens for block in blocks]

    def version(self, state: RequestState) -> int | None:
        return None

    def load_blocks(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("link", "tokens", "child"),
    [(FAST, 512, 0), (FAST, 768, 0), (FAST, 1008, 1), (SLOW, 64, 1), (SLOW, 0, None)],
)
def test_another_connector_serves_where_it_has_more_than_ours_are_to_load(
    link: tuple[float, float], tokens: int, child: int | None
) -> None:
    made = world(link)
    made.run_many(3)
    ours = Ours(768, made.meters[0])
    children: list[Any] = [ours, Foreign(tokens)]
    chooser = Chooser(children, "ab", "cheapest", made.requests, made.policy)
    choice = chooser.choose(made.asked, 0)
    assert choice.child == child
    chooser.decided(made.asked, choice)
    assert ours.noted == ({"recompute_preferred": 1} if child is None else {})


def test_computing_counts_for_those_too_who_wait_to_begin() -> None:
    """A load that takes half as long again as computing delays nobody else."""
    made = world((0.0, 1000 / 1.5))
    made.run_many(3)
    made.asked.has_begun = False
    assert made.choose().child is None
    made.policy.arrived()
    assert made.choose().child is None, "it does not wait for itself"
    made.policy.arrived()
    assert made.choose().child == 0
    made.policy.gone(None)
    assert made.choose().child is None


def test_a_crowd_counts_four_times_at_most() -> None:
    made = world((0.0, 1000 / 5))
    made.run_many(3)
    for _ in range(100):
        made.policy.arrived()
    assert made.choose().child is None
    assert made.choose().seconds == pytest.approx(1.024)
