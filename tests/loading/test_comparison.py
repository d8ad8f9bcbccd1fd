"""Loading compared with computing, where clock, links and engine are what a test says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from spec.load import load_chain
from spec.offloading import LOADS_AT_ONCE
from tests.support.clock import Clock
from tests.support.fake_requests import FakeRequest, first_step
from tiers.connector.assembly import scheduler_parts
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo
from tiers.loading import comparison
from tiers.loading.comparison import (
    BLIND,
    FIRST_PATIENCE,
    IN_FLIGHT,
    LEAST_PATIENCE,
    Comparison,
    PrefillRate,
    Verdict,
    Wish,
)
from tiers.loading.load_cost import LEAST_TOKENS, LinearFit, LoadCost
from tiers.tuning.simulation.loads import SimPlan

BLOCK = 16
PROMPT = 64
"""Blocks of the usual prompt: 1,024 tokens."""


class World:
    """Tiers that hold everything; `links` are their (seconds each time, tokens per second). The
    policy takes the longest prefix."""

    def __init__(
        self,
        *links: tuple[float, float],
        prefill: float = 1000.0,
        always: bool = False,
        engine: float = 0.0,
        at_once: int = LOADS_AT_ONCE,
    ) -> None:
        """`engine`: seconds from the end of a load until the engine goes on."""
        self.engine = engine
        self.clock = Clock(1000.0)
        self.links = list(links)
        self.prefill = prefill
        self.meters = {child: LoadCost(self.clock, at_once) for child in range(len(links))}
        self.comparison = Comparison(BLOCK, self.clock)
        self.comparison.follow(self.meters, always, shares=False)
        self._jobs = iter(range(1_000_000))

    def choose(
        self,
        blocks: int = PROMPT,
        has: Sequence[int] | None = None,
        left: float = 1e9,
        others: int = 0,
    ) -> Verdict[SimPlan]:
        """What would be done for a request that begins now; it is not begun. `has`: tokens."""
        held = [blocks * BLOCK] * len(self.links) if has is None else has

        def propose(but: Collection[int], most: int | None) -> SimPlan | None:
            free = {c: held[c] // BLOCK for c in range(len(held)) if c not in but and held[c]}
            if not free:
                return None
            best = max(free, key=free.__getitem__)
            return SimPlan([(best, min(free[best], blocks if most is None else most))], BLOCK)

        return self.comparison.choose(propose, Wish(blocks, left, others))

    def child(self, blocks: int = PROMPT, has: Sequence[int] | None = None) -> int | None:
        """The tier that loads."""
        plan = self.choose(blocks, has).plan
        return None if plan is None else plan.pieces[-1][0]

    def run(self, blocks: int = PROMPT, has: Sequence[int] | None = None) -> float:
        """Seconds that one request takes from its beginning to the end of its prompt."""
        verdict = self.choose(blocks, has)
        parts = verdict.plan.parts if verdict.plan is not None else {}
        self.comparison.decided(parts, verdict.probed, verdict.seconds)
        began = self.clock.now
        self._load(dict(parts), verdict.within)
        computed = blocks * BLOCK - sum(parts.values())
        self.clock.now += computed / self.prefill
        self.comparison.prefill.measured(computed, computed / self.prefill)
        return self.clock.now - began

    def _load(self, parts: dict[int, int], within: float) -> None:
        taken = {c: self.links[c][0] + tokens / self.links[c][1] for c, tokens in parts.items()}
        jobs = {child: next(self._jobs) for child in parts}
        for child, tokens in parts.items():
            self.meters[child].began(jobs[child], tokens)
        self.clock.now += min(within, max(taken.values(), default=0.0))
        self.clock.now += self.engine * bool(parts)
        for child, seconds in taken.items():
            whole = seconds <= within
            arrived = 0 if whole else int(parts[child] * within / seconds)
            self.meters[child].ended(jobs[child], min(seconds, within), whole, arrived, not whole)
            if not whole:  # what did not arrive is computed
                self.clock.now += (parts[child] - arrived) / self.prefill

    def run_many(self, count: int, pause: float = 1.0) -> list[float]:
        """So many requests, one after the other."""
        times = []
        for _ in range(count):
            times.append(self.run())
            self.clock.now += pause
        return times


def world(*links: tuple[float, float], prefill: float = 1000.0) -> World:
    made = World(*links, prefill=prefill)
    made.run(has=[0] * len(links))  # the engine's rate is known
    return made


def test_what_the_engine_takes_for_a_load_counts_at_the_least() -> None:
    """A prefix is computed that takes no longer than the step that is lost to a load of it."""
    made = World(FAST, prefill=10_000.0, engine=0.005)
    made.run(has=[0])
    assert made.child(blocks=3) == 0, "it is not known yet"
    made.run()
    assert made.child(blocks=3) is None and made.child(blocks=10) == 0
    made.engine = 1.0  # the steps of others, between which a load is heard of
    made.run_many(3)
    assert made.child(blocks=3) is None and made.child(blocks=10) == 0
    made.engine = 0.0
    made.run()
    assert made.child(blocks=3) == 0


FAST = (0.001, 100_000.0)
SLOW = (0.001, 100.0)


@pytest.mark.parametrize("bandwidth", [10, 30, 40, 60, 300, 10_000])
def test_from_10_mb_to_10_gb_a_second_it_is_never_a_tenth_slower(bandwidth: float) -> None:
    """A token has 4 KiB of KV and takes 0.1 ms to compute; the first request counts too."""
    made = World((0.0005, bandwidth * 1e6 / 4096), prefill=10_000.0)
    lengths = (32, 64, 128) * 300
    loading = sum(0.0005 + blocks * BLOCK * 4096 / (bandwidth * 1e6) for blocks in lengths)
    computing = sum(blocks * BLOCK / 10_000 for blocks in lengths)
    learning = sum(lengths[:3]) * BLOCK / 10_000
    assert sum(map(made.run, lengths)) < 1.1 * min(loading, computing) + learning


@pytest.mark.parametrize("latency", [0.0001, 0.0005, 0.01, 0.1])
def test_prompts_that_never_measure_the_engine_are_compared_with_its_short_steps(
    latency: float,
) -> None:
    """The engine computes 16 tokens of each, or all 48."""
    made = World((latency, 1e6), prefill=10_000.0)
    loading, computing = latency + 32 / 1e6 + 16 / 10_000, 48 / 10_000
    made.run(blocks=3, has=[32])
    times = [made.run(blocks=3, has=[32]) for _ in range(300)]
    assert made.comparison.prefill.seconds_per_token is None
    assert sum(times) / len(times) < 1.1 * min(loading, computing)


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
    assert made.child() is None
    made.links[0] = FAST
    times = made.run_many(400)
    assert times[-1] < 0.1, f"back to loading after {sum(t > 0.1 for t in times)} requests"
    assert sum(taken > 0.1 for taken in times) < 300


def test_a_latency_that_is_small_beside_long_loads_is_found_out() -> None:
    """Small probes alone would make a tier with a latency look slow for ever."""
    made = world((20.0, 100_000.0))
    made.run_many(50)
    made.links[0] = (0.2, 100_000.0)
    made.run_many(1000)
    assert made.child() == 0
    made.run(blocks=4, has=[64])
    assert made.child(blocks=4, has=[64]) is None, "64 tokens take 0.06 s to compute"


def test_the_first_request_after_a_start_is_served_as_any_other() -> None:
    made = World(FAST)
    plan = made.choose().plan
    assert plan is not None and plan.tokens == 1024
    assert made.run() < 0.02


@pytest.mark.parametrize("known", [True, False])
def test_a_link_of_unknown_speed_costs_one_request_no_more_than_computing_twice(
    known: bool,
) -> None:
    made = world(SLOW) if known else World(SLOW)
    first, *times = made.run_many(20)
    assert first < (2.1 * 1.024 if known else FIRST_PATIENCE + 1.024)
    assert made.child() is None and times[-1] < 1.2


def test_requests_that_come_together_load_from_a_tier_of_unknown_speed_until_it_is_late() -> None:
    made = world(FAST)
    for job in range(-1, -9, -1):
        assert made.child() == 0
        made.meters[0].began(job, 1024)
    for _ in range(2):
        made.meters[0].stepped()
    made.clock.now += 1.1
    made.meters[0].stepped()
    assert made.child() is None, "computing takes a second"


def test_a_tier_whose_first_loads_all_come_too_late_is_measured_all_the_same() -> None:
    made = world((0.0, 0.5))
    assert sum(made.run_many(50)) < 1.1 * 50 * 1.024 + 4
    assert made.meters[0].line is not None
    assert made.child() is None


@pytest.mark.parametrize("order", [(SLOW, FAST), (FAST, SLOW)])
def test_the_quicker_tier_serves(order: tuple[tuple[float, float], ...]) -> None:
    made = world(*order)
    made.run_many(10)
    assert {made.child() for _ in range(3)} == {order.index(FAST)}
    assert sum(made.run_many(200)) / 200 < 1.1 * (0.001 + 1024 / 100_000) + 0.01


def test_a_longer_prefix_from_a_slower_tier_can_be_sooner() -> None:
    made = world((0.0, 4_000.0), (0.0, 2_000.0))
    for has in ([1024, 0], [0, 1024]) * 4:
        made.run(has=has)
    assert made.child(has=[1024, 1024]) == 0
    assert made.child(has=[1008, 1024]) == 0, "the last block is computed sooner"
    assert made.child(has=[512, 1024]) == 1, "from the other the rest would have to be computed"
    made.meters[1].began(-1, 10_000)
    found = made.choose(has=[512, 1024])
    assert found.plan is not None and found.plan.pieces == [(0, 32)]
    assert found.passed == {1: comparison.SLOWER}


def test_loading_must_be_quicker_by_a_margin() -> None:
    made = world((0.0, 1030.0))
    made.run_many(4)
    assert made.choose().passed == {0: comparison.SLOWER}


def test_what_is_queued_counts() -> None:
    made = world((0.0, 10_000.0))
    made.run_many(5)
    for job in range(-1, -11, -1):
        assert made.child() == 0
        made.meters[0].began(job, 1024)
    for job in range(-11, -21, -1):
        made.meters[0].began(job, 1024)
    assert made.child() is None, "twenty others are before it"


def test_what_is_under_way_is_not_looked_through_for_each_request_that_waits() -> None:
    class Counted(dict[int, Any]):
        looks = 0

        def values(self) -> Any:
            for load in super().values():
                Counted.looks += 1
                yield load

    made = world(FAST)
    made.run_many(3)
    meter = made.meters[0]
    meter._loads = Counted()
    for job in range(1000):
        meter.began(-1 - job, 64)
    for _ in range(100):
        made.choose()
    assert Counted.looks < 100 * 20


def test_however_often_a_tier_is_probed_a_probe_has_a_length() -> None:
    """Of one that only takes its time, and loads nothing sooner than computing."""
    made = world((0.0, 1.0))
    for _ in range(2000):
        made.comparison.decided((), 0, 1.0)
    made.meters[0]._fitted.line = LinearFit(1.0, 0.0)
    made.comparison.decided((), None, 1e9)
    assert made.choose().probed == 0


def test_where_nothing_is_held_no_tier_is_probed() -> None:
    asked: list[tuple[Collection[int], int | None]] = []

    def propose(but: Collection[int], most: int | None) -> None:
        asked.append((but, most))

    for world in (World((0.01, 1e6), (0.01, 1e6)), World((0.01, 1e6), always=True)):
        asked.clear()
        assert world.comparison.choose(propose, Wish(PROMPT, 1e9, 0)).plan is None
        assert asked == [({}, None)], "once"


@pytest.mark.parametrize(("always", "shares"), [(True, False), (True, True), (False, False)])
def test_a_tier_is_probed_only_where_that_can_change_a_plan(always: bool, shares: bool) -> None:
    """Both take about half as long as computing; the policy loads from the first."""
    made = World((0.0, 2000.0), (0.0, 1900.0), always=always)
    made.comparison.shares = shares
    made.run(has=[0, 0])
    probes = []
    for _ in range(100):
        probes.append(made.choose().probed)
        made.run()
    assert bool(probes.count(1)) == (shares or not always)
    assert probes.count(0) == 0


def test_requests_keep_away_from_a_tier_that_hangs() -> None:
    made = world(FAST)
    made.run_many(20)
    made.meters[0].began(-1, 1024)
    for _ in range(3):
        made.meters[0].stepped()
        assert made.child() == 0, "it may be about to end"
        made.clock.now += 0.4
    made.clock.now += 1.0
    made.meters[0].stepped()
    assert made.child() is None
    made.meters[0].ended(-1, 0.001, whole=False)
    assert made.child() == 0, "what failed at once says nothing of speed"


def test_a_load_is_worth_waiting_for_as_long_as_computing_takes() -> None:
    made = world(FAST, prefill=100.0)
    made.run_many(5)
    assert made.choose().within == pytest.approx(10.24, rel=0.01)
    assert made.choose(blocks=4).within == LEAST_PATIENCE


def test_the_engine_is_measured_also_where_everything_could_be_loaded() -> None:
    """A load takes longer than computing would, and is never late."""
    made = World((0.0, 600.0), prefill=1000.0)
    times = made.run_many(BLIND + 10)
    assert times[:BLIND] == pytest.approx([1024 / 600] * BLIND)
    assert times[BLIND] < 1024 / 600
    assert made.child() is None
    assert times[-1] == pytest.approx(1.024)


HIT = 130, [2048]
"""A prompt of which all but 32 tokens are held: too few to measure the engine by."""


@pytest.mark.parametrize(
    ("before", "slow", "within"), [(0, 8.0, 30), (0, 60.0, 120), (50, 30.0, 5)]
)
def test_one_slow_step_does_not_condemn_the_engine(before: int, slow: float, within: int) -> None:
    """A kernel that is compiled, or a frozen container. It is measured again though a tier, which
    is sooner by that measure, leaves it too little to compute."""
    made = World((0.0, 500.0), prefill=5000.0)
    for _ in range(before):
        made.run(*HIT)
    made.comparison.prefill.measured(2080, slow)
    for _ in range(within):
        made.run(*HIT)
    assert sum(made.run(*HIT) for _ in range(20)) < 20 * 1.1 * 2080 / 5000


@pytest.mark.parametrize("factor", [0.05, 0.4, 2.5, 20.0])
def test_an_engine_that_has_become_another_is_known_within_few_requests(factor: float) -> None:
    made = World((0.0, 1.0), prefill=1000.0)
    made.run_many(20)
    made.prefill *= factor
    made.run_many(4)
    each = made.comparison.prefill.seconds_per_token
    assert each == pytest.approx(1 / made.prefill, rel=0.75)


def test_an_engine_that_is_measured_anyway_is_not_probed() -> None:
    made = world((0.0, 20_000.0), prefill=5000.0)
    made.run(*HIT)
    times = [made.run(HIT[0] + 4, HIT[1]) for _ in range(300)]
    assert times == pytest.approx([2048 / 20_000 + 96 / 5000] * 300)
    for _ in range(100):
        made.run(2048, [0])
        assert made.run(*HIT) == pytest.approx(2048 / 20_000 + 32 / 5000)


def test_the_engine_is_not_measured_by_much_more_than_is_due() -> None:
    """Of this prefix a tier has its end alone, or nothing but the first blocks."""
    made = world((0.0, 20_000.0), prefill=5000.0)
    made.run(*HIT)

    def propose(but: Collection[int], most: int | None) -> SimPlan | None:
        blocks = 128 if most is None or most >= 128 else 4
        return None if 0 in but else SimPlan([(0, blocks)], BLOCK)

    for _ in range(300):
        found = made.comparison.choose(propose, Wish(HIT[0]))
        assert found.plan is not None and found.plan.tokens == 2048
        made.comparison.decided((0,), found.probed, found.seconds)


def test_a_tier_that_is_still_looking_is_waited_for_while_that_can_pay() -> None:
    made = world(FAST)
    made.run_many(5)
    nothing: Verdict[SimPlan] = Verdict(None)
    assert made.comparison.hopes({0: 0.4}, nothing, Wish(PROMPT))
    assert not made.comparison.hopes({0: 1.1}, nothing, Wish(PROMPT))
    as_much = nothing._replace(saved=1.02)
    assert not made.comparison.hopes({0: 0.0}, as_much, Wish(PROMPT)), "another saves as much"


def test_a_tier_that_would_share_a_long_load_is_waited_for() -> None:
    """Each takes 256 ms alone, both together 128."""
    made = world((0.0, 4000.0), (0.0, 4000.0))
    made.run_many(5)
    for has in ([1024, 0], [0, 1024]):  # by now both are measured
        made.run(has=has)
    found = made.choose(has=[1024, 0])
    assert found.plan is not None and set(found.plan.parts) == {0}
    assert not made.comparison.hopes({1: 0.0}, found, Wish(PROMPT)), "the policy loads from one"
    made.comparison.shares = True
    assert made.comparison.hopes({1: 0.1}, found, Wish(PROMPT))
    assert not made.comparison.hopes({1: 0.15}, found, Wish(PROMPT))
    short = found._replace(load=0.0)
    assert not made.comparison.hopes({1: 0.1}, short, Wish(PROMPT)), "nothing to share"
    half = made.choose(has=[512, 0])
    assert made.comparison.hopes({1: 0.5}, half, Wish(PROMPT)), "none else has it"


def test_computing_counts_for_those_too_who_wait_to_begin() -> None:
    """A load that takes half as long again as computing delays nobody else."""
    made = world((0.0, 1000 / 1.5))
    made.run_many(5)
    assert made.choose(others=0).plan is None
    assert made.choose(others=1).plan is not None


def test_a_crowd_counts_four_times_at_most() -> None:
    made = world((0.0, 1000 / 5))
    made.run_many(5)
    found = made.choose(others=100)
    assert found.plan is None
    assert found.seconds == pytest.approx(1.024)


@pytest.mark.parametrize("always", [True, False])
def test_what_cannot_come_in_time_is_not_begun(always: bool) -> None:
    """Whether or not loads are compared with computing."""
    made = World((0.0, 10_000.0), prefill=10.0, always=always)
    made.run(has=[0])
    made.run_many(5)
    assert made.choose(left=10.0).plan is not None
    made.meters[0].began(-1, 250_000)
    found = made.choose(left=10.0)
    assert found.plan is None and found.passed == {0: comparison.LATE}
    assert made.choose(left=14.0).plan is not None
    made.prefill = 100.0  # seconds less than the load takes
    made.comparison.prefill = PrefillRate(made.clock)
    made.comparison.prefill.measured(1024, 10.24)
    assert made.choose(left=10.0).passed == {0: comparison.LATE if always else comparison.SLOWER}


def test_always_loads_what_is_computed_sooner_and_all_of_it_from_the_first() -> None:
    made = World(SLOW, always=True)
    for _ in range(5):
        found = made.choose()
        assert found.plan is not None and found.plan.tokens == 1024
        made.run()


def test_a_load_for_always_that_can_never_come_in_time_is_tried_with_a_few_blocks() -> None:
    made = World((0.0, 50.0), always=True)
    made.comparison.prefill.measured(1000, 1.0)
    made.run_many(3)
    assert made.choose(left=10.0).plan is None
    for _ in range(3000):
        found = made.choose(left=10.0)
        made.comparison.decided((), found.probed, found.seconds)
        if found.probed is not None:
            break
    assert found.plan is not None and found.plan.tokens == LEAST_TOKENS


FAR = (0.2, 1e6)
"""A tier that answers late, whatever it loads."""
LENGTHS = (20, 40, 128)


def far_away(at_once: int = LOADS_AT_ONCE) -> World:
    made = World(FAR, at_once=at_once)
    made.run(has=[0])
    for blocks in LENGTHS * 2:
        made.run(blocks)
    return made


def test_each_load_that_is_queued_costs_its_latency() -> None:
    made = far_away()
    meter = made.meters[0]
    for job in range(-1, -4, -1):
        assert made.child() == 0
        meter.began(job, 256)
    for job in range(-4, -7, -1):
        meter.began(job, 256)
    assert made.child() is None, "six times the latency is longer than computing takes"
    pace = meter.pace(BLOCK)
    assert pace is not None and pace.ready > 0.8, "nor is it given a share"
    meter.stepped()
    meter.stepped()
    made.clock.now += 0.9
    meter.stepped()
    pace = meter.pace(BLOCK)
    assert pace is not None and pace.ready > 0.95, "it does not hang: six loads take as long"


@pytest.mark.parametrize(("load", "at_once"), [(0.5, 2), (4.0, 2), (0.9, 16)])
def test_many_short_loads_of_a_far_tier_wait_no_longer_than_computing_takes(
    load: float, at_once: int
) -> None:
    """They come at so many times what its loaders carry."""
    made = far_away(at_once)
    meter, clock = made.meters[0], made.clock
    running: list[tuple[float, int]] = []
    free = [clock.now] * at_once
    hits, late, began = 0, [], clock.now
    for job in range(1, 1001):
        blocks = LENGTHS[job % len(LENGTHS)]
        clock.now = began + job * FAR[0] / at_once / load
        while running and running[0][0] <= clock.now:
            meter.ended(-running.pop(0)[1], FAR[0], whole=True)
        meter.stepped()
        verdict = made.choose(blocks)
        made.comparison.decided(() if verdict.plan is None else (0,), verdict.probed, 1.0)
        if verdict.plan is not None:
            loader = free.index(min(free))
            free[loader] = max(clock.now, free[loader]) + FAR[0]
            meter.began(-job, blocks * BLOCK)
            running.append((free[loader], job))
            late.append((free[loader] - clock.now) / (blocks * BLOCK / made.prefill))
            hits += 1
    assert max(late) < 1.1
    assert hits > 0.8 * min(1000, 1000 / load)


def test_the_ninth_load_of_a_tier_that_loads_eight_at_once_waits_for_half_of_each() -> None:
    """Where two run at once, the other six are still to come."""
    tiers = [
        {"type": "cpu", "capacity": "1MiB"},
        {"type": "disk", "capacity": "1MiB", "path": "/nowhere", "loads_at_once": 8},
    ]
    chain = load_chain({"version": 1, "tiers": tiers})
    made, *_ = scheduler_parts(chain, EngineInfo({}, BLOCK, BLOCK, num_blocks=8), Clock())
    for tier, waits in zip(made, (7.0, 4.0), strict=True):
        cost = tier.load_cost
        cost.began(-1, 1000)
        cost.ended(-1, 1.0, whole=True)
        for job in range(8):
            cost.began(job, 1000)
        assert cost.seconds(1000) == pytest.approx(waits + 1)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_loads_that_run_beside_each_other_have_a_part_of_the_tier_each(at_once: int) -> None:
    """A tier that carries a thousand tokens a second has twenty loads of as many, one of which
    begins as another ends."""
    made = World((0.0, 1000.0), at_once=at_once)
    meter = made.meters[0]
    for job in range(60):
        meter.began(job, 1000)
        if job >= 20:
            meter.ended(job - 20, at_once, whole=True)
    assert meter.line is not None
    assert meter.line.seconds(1000) == pytest.approx(1.0, rel=0.01)


def test_a_load_that_takes_no_longer_than_it_should_delays_no_other_for_longer() -> None:
    made = world((0.0, 10_000.0), prefill=1000.0)
    made.run_many(5)
    meter = made.meters[0]
    before = meter.seconds(BLOCK)
    meter.began(-1, 4096)
    waits = meter.seconds(BLOCK)
    meter.stepped()
    meter.stepped()
    made.clock.now += 0.4
    meter.stepped()
    assert before < meter.seconds(BLOCK) == waits < 0.3
    made.clock.now += 0.1
    meter.stepped()
    assert meter.seconds(BLOCK) == pytest.approx(0.5), "but one that hangs does"


Load = tuple[int, float, dict[str, Any]]
"""Its tokens, its seconds, and how it ends if it does not bring all it should."""
LATE: dict[str, Any] = {"whole": False, "late": True}
WHOLE: dict[str, Any] = {"whole": True}


def loaded(*loads: Load) -> LoadCost:
    cost = LoadCost(Clock())
    for job, (tokens, seconds, how) in enumerate(loads):
        cost.began(job, tokens)
        cost.ended(job, seconds, **how)
    return cost


@pytest.mark.parametrize(
    ("load", "alone", "after"),
    [
        ((1000, 0.5, LATE), 0.5, 1.0),
        ((1000, 4.0, LATE), 4.0, 2.76),
        ((1000, 4.0, {"whole": False}), None, 1.0),
        ((1000, 0.5, {"whole": False, "arrived": 100}), 5.0, 1.0),
        ((1000, 0.0, WHOLE), None, 1.0),
    ],
    ids=["early", "longer than it should", "it failed", "a part came", "there was nothing to move"],
)
def test_what_a_load_that_brought_less_tells_of_a_tier(
    load: Load, alone: float | None, after: float
) -> None:
    """Of one that was never measured, and of one that loads as many tokens in a second."""
    first = loaded(load).line
    assert (first and first.seconds(1000)) == (alone and pytest.approx(alone))
    line = loaded((1000, 1.0, WHOLE), load).line
    assert line is not None and line.seconds(1000) == pytest.approx(after, rel=0.01)


def test_one_load_may_be_an_outlier_and_two_are_how_the_tier_is_now() -> None:
    usual: list[Load] = [(1000, 1.0, WHOLE)] * 5
    odd: Load = (1000, 100.0, WHOLE)
    for loads, expected in ((1, 3.4), (2, 100.0)):
        line = loaded(*usual, *[odd] * loads).line
        assert line is not None and line.seconds(1000) == pytest.approx(expected, rel=0.01)
    line = loaded(*usual, odd, (1000, 0.001, WHOLE)).line
    assert line is not None and line.seconds(1000) > 1.0, "out on the other side"


def test_loads_of_nearly_one_size_do_not_tell_what_each_costs_beside_its_tokens() -> None:
    line = loaded((1000, 1.0, WHOLE), (1001, 0.9, WHOLE)).line
    assert line is not None and line.fixed == 0


def test_a_tier_shows_its_pace_though_it_takes_as_long_for_any_number_of_tokens() -> None:
    cost = loaded((1024, 1.0, WHOLE))
    assert cost.gauges()["load_tokens_per_second"] == pytest.approx(1024)
    cost = loaded((1024, 1.0, WHOLE), (256, 1.0, WHOLE))
    assert cost.gauges() == {"load_latency_seconds": 1.0, "load_engine_seconds": 0.0}
    cost = loaded(*((tokens, 0.001, WHOLE) for tokens in (32, 96, 32)))
    assert "load_tokens_per_second" not in cost.gauges(), "rounding leaves 10^19 of them"


def test_what_loads_wait_for_each_other_is_not_what_the_engine_takes_for_them() -> None:
    clock = Clock()
    cost = LoadCost(clock)
    for job in range(2):
        cost.began(job, 1000)
    clock.now += 5
    for job in range(2):
        cost.ended(job, 1.0, whole=True)
    cost.began(2, 1000)
    clock.now += 5
    cost.ended(2, 0.0, **LATE)
    assert cost.engine_seconds == 0.0


def test_a_tier_that_fails_once_counts_as_half_as_quick() -> None:
    cost = loaded((1000, 1.2, WHOLE), (250, 0.45, WHOLE))
    before = cost.pace(BLOCK)
    cost.began(2, 1000)
    cost.ended(2, 0.1, whole=False)
    after = cost.pace(BLOCK)
    assert before is not None and before.ready > 0.1
    assert after == pytest.approx(tuple(2 * one for one in before))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> PrefillRate:
    return PrefillRate(clock)


class Steps:
    """Steps of requests of a thousand tokens each."""

    def __init__(self, meter: PrefillRate) -> None:
        self._meter = meter
        self._requests = RequestTable(EngineInfo({}, 16, 16, num_blocks=0))
        for name in "abc":
            self._requests.of(FakeRequest(name, 1000)).prompt_tokens = 1000

    def begin(self, name: str, computed: int, tokens: int) -> int | None:
        step = self._requests.begin_step(first_step(name, computed, tokens))
        return self._meter.step_begins(step.prompt_tokens)


@pytest.fixture
def steps(meter: PrefillRate) -> Steps:
    return Steps(meter)


def test_idle_time_counts_for_nothing(meter: PrefillRate, steps: Steps, clock: Clock) -> None:
    for name in "abc":
        clock.now += 3600
        number = steps.begin(name, 0, 1000)
        clock.now += 2
        meter.step_ended(number)
    assert meter.seconds_per_token == pytest.approx(0.002)


def test_an_engine_that_schedules_ahead_is_measured_by_its_results(
    meter: PrefillRate, steps: Steps, clock: Clock
) -> None:
    numbers = [steps.begin("a", start, 250) for start in (0, 250)]
    for start in (500, 750, 1000, 1001):
        clock.now += 0.5
        meter.step_ended(numbers.pop(0))
        numbers.append(steps.begin("a", start, 250 if start < 1000 else 1))
    assert meter.seconds_per_token == pytest.approx(0.002)


def test_decoding_is_no_prefill(meter: PrefillRate, steps: Steps, clock: Clock) -> None:
    assert steps.begin("a", 1000, 1) is None, "it answers"
    assert steps.begin("a", 1000, 100) is None, "drafts are no prompt"
    assert steps.begin("unknown", 0, 1000) is None
    meter.step_ended(None)
    assert meter.short_step is None
    number = steps.begin("a", 990, 100)
    clock.now += 0.25
    assert not meter.step_ended(number) and meter.short_step == 0.25
    assert meter.seconds_per_token is None
    number = steps.begin("b", 0, 1000)
    clock.now += 1
    meter.step_ended(number)
    assert meter.seconds_per_token == pytest.approx(0.001)


def test_steps_whose_results_never_come_are_forgotten(
    meter: PrefillRate, steps: Steps, clock: Clock
) -> None:
    first = steps.begin("a", 0, 500)
    for _ in range(IN_FLIGHT):
        steps.begin("b", 0, 500)
    clock.now += 100
    assert not meter.step_ended(first)
    assert meter.seconds_per_token is None
