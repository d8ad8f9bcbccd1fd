"""The load policy `soonest`, over tiers whose speed and queues are what a test says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.clock import Clock
from tiers.connector.contract.coverage import COMPLETE, MISSING, NO_WINDOW
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.choice import Choice, Coverage, stitched
from tiers.connector.policy.soonest import Plan, Soonest

SIZE = 16
PROMPT = range(10, 110)


class World:
    """Tiers that hold all; those with a rate, in blocks per second, were measured."""

    def __init__(self, *rates: float | None) -> None:
        self.clock = Clock(100.0)
        self.meters = {child: LoadCost(self.clock) for child in range(len(rates))}
        self.policy = Soonest(SIZE, self.meters, self.clock)
        self.jobs = 0
        for child, rate in enumerate(rates):
            if rate is not None:
                self.loads(child, 100, 100 / rate)

    def loads(self, child: int, blocks: int, seconds: float | None, whole: bool = True) -> None:
        """A load of a child; None: it does not end."""
        self.jobs += 1
        self.meters[child].began(self.jobs, blocks * SIZE)
        if seconds is not None:
            self.meters[child].ended(self.jobs, seconds, whole)

    def plan(self, *but: int) -> Plan:
        children = {c: held("x" * 200) for c in self.meters if c not in but}
        return self.policy.plan(children, PROMPT)

    def shares(self, *but: int) -> dict[int, int]:
        """Blocks that each child loads of the usual prompt; those in `but` hold nothing."""
        plan = self.plan(*but)
        assert plan.found.stop == PROMPT.stop
        return {c: sum(map(len, ranges)) for c, ranges in plan.found.shares.items()}

    def decide(self) -> Plan:
        plan = self.plan()
        tokens = len(PROMPT) * SIZE
        found = plan.found.shares
        self.policy.decided(Choice(None, tokens, True, found, plan.probed, seconds=plan.seconds))
        return plan


LEVELS = {".": MISSING, "x": NO_WINDOW, "X": COMPLETE}


def held(marks: str | None) -> Coverage:
    """A tier that holds the blocks marked x, and those marked X whole; None: it is looking."""

    def coverage(blocks: range) -> Sequence[int] | None:
        if marks is None:
            return None
        return [LEVELS[(marks + "." * blocks.stop)[block]] for block in blocks]

    return coverage


def test_equal_tiers_have_equal_parts() -> None:
    assert World(10.0, 10.0).shares() == {0: 50, 1: 50}
    assert World(10.0, 10.0).plan().found.shares == {0: [range(10, 60)], 1: [range(60, 110)]}


def test_each_has_as_much_as_it_is_fast() -> None:
    assert World(30.0, 10.0).shares() == {0: 75, 1: 25}
    assert World(10.0, 10.0, 30.0).shares() == {0: 20, 1: 20, 2: 60}


def test_what_is_queued_counts() -> None:
    world = World(10.0, 10.0)
    world.loads(0, 40, None)
    assert world.shares() == {0: 40, 1: 60}, "what is under way is half done, on average"
    world.loads(0, 400, None)
    assert world.shares() == {1: 100}


def test_a_tier_that_was_never_measured_is_taken_for_the_fastest() -> None:
    assert World(None, None).shares() == {0: 50, 1: 50}
    assert World(None, 10.0, 30.0).shares() == {0: 43, 1: 14, 2: 43}


def test_a_tier_that_is_down_holds_nothing() -> None:
    world = World(10.0, 30.0, None)
    assert world.shares(1) == {0: 25, 2: 75}
    assert world.shares(0, 1) == {2: 100}
    assert world.policy.plan({}, PROMPT) == Plan(stitched({}, PROMPT), 0.0, None)


def test_a_load_that_hangs_keeps_others_away() -> None:
    world = World(10.0, 10.0)
    world.loads(0, 1, None)
    world.meters[0].stepped()
    world.meters[0].stepped()
    world.clock.now += 60.0
    assert world.shares()[0] > 40, "nobody knows yet"
    world.meters[0].stepped()
    assert world.shares() == {1: 100}


def test_a_tier_that_fails_its_loads_is_last_and_has_less_each_time() -> None:
    world = World(10.0, 10.0)
    parts = [world.shares()[0]]
    for _ in range(4):
        world.loads(0, 50, 0.001, whole=False)
        plan = world.plan()
        assert [*plan.found.shares] == [1, 0], "what precedes its part can be used"
        parts.append(world.shares()[0])
    assert parts == sorted(parts, reverse=True) and parts[-1] < 10
    world.loads(0, 50, 5.0)
    assert world.shares() == {0: 50, 1: 50}


def test_a_tier_that_is_fast_for_few_blocks_alone_is_found_out() -> None:
    """It delivers five blocks at a hundred times the speed that it has for more."""
    world = World(10.0)
    world.meters[1] = LoadCost(world.clock)
    world.loads(1, 5, 0.005)
    assert world.shares()[1] > 90
    for _ in range(3):
        blocks = world.shares().get(1, 0)
        world.loads(1, max(1, blocks), max(1, blocks) / 10)
    assert world.shares()[1] == pytest.approx(50, abs=5)


def test_a_tier_that_gets_nothing_is_probed_with_a_few_blocks() -> None:
    world = World(1000.0, 5.0)
    plans = [world.decide() for _ in range(2000)]
    probes = [plan for plan in plans if plan.probed == 1]
    assert 0 < len(probes) < 5
    assert probes[0].found.shares == {0: [range(10, 106)], 1: [range(106, 110)]}
    assert sum(one.seconds for one in plans) == pytest.approx(200.0)
    world.loads(1, 4, 0.004)
    world.loads(1, 4, 0.004)
    assert world.shares()[1] > 40, "it is fast again"


def test_one_that_still_looks_is_waited_for_where_a_gap_ends_the_prefix() -> None:
    policy = World(10.0, 10.0).policy
    assert policy.plan({0: held("x" * 5), 1: held(None)}, range(5)).found.looking is False
    assert policy.plan({0: held("x" * 5), 1: held(None)}, range(6)).found.looking is True


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_the_prefix_is_that_of_stitched_and_each_block_from_one_that_holds_it(
    seed: int, window: int
) -> None:
    rng = random.Random(seed)
    world = World(*[rng.choice([None, 1.0, 10.0, 50.0]) for _ in range(3)])
    marks = ["".join(rng.choices(".xX", [1, 9, 30], k=rng.randrange(400))) for _ in range(3)]
    children = {child: held(one) for child, one in enumerate(marks)}
    blocks = range(rng.randrange(30), 300)
    found = world.policy.plan(children, blocks, window).found
    other = stitched(children, blocks, window)
    assert (found.stop, found.looking) == (other.stop, other.looking)
    owners = {b: c for c, ranges in found.shares.items() for part in ranges for b in part}
    assert sorted(owners) == list(range(blocks.start, found.stop))
    for block, child in owners.items():
        needed = COMPLETE if block >= found.stop - window else NO_WINDOW
        assert LEVELS[marks[child][block]] >= needed
