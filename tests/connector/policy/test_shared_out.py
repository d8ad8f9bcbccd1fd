"""Tiers that share a prefix, over tiers whose speed and queues are what a test says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.clock import Clock
from tiers.connector.policy.choice import Coverage, Stitch, behind, stitched
from tiers.contract.block_groups import COMPLETE, MISSING, NO_WINDOW
from tiers.loading.load_cost import LoadCost
from tiers.loading.shares import HeldRun, Piece, share

SIZE = 16
PROMPT = range(10, 110)


class World:
    """Tiers that hold all, measured at these rates, in blocks per second."""

    def __init__(self, *rates: float) -> None:
        self.clock = Clock(100.0)
        self.meters = {child: LoadCost(self.clock) for child in range(len(rates))}
        self.jobs = 0
        for child, rate in enumerate(rates):
            self.loads(child, 100, 100 / rate)

    def loads(self, child: int, blocks: int, seconds: float | None, whole: bool = True) -> None:
        """A load of a child; None: it does not end."""
        self.jobs += 1
        self.meters[child].began(self.jobs, blocks * SIZE)
        if seconds is not None:
            self.meters[child].ended(self.jobs, seconds, whole)

    def plan(self, children: dict[int, Coverage], blocks: range, window: int = 0) -> Stitch:
        paces = {c: pace for c in children if (pace := self.meters[c].pace(SIZE))}

        def give(runs: Sequence[HeldRun]) -> Sequence[Piece]:
            return share(runs, paces, lambda c: self.meters[c].failures)[0]

        return stitched(children, blocks, window, give)

    def all(self) -> Stitch:
        return self.plan({c: held("x" * 200) for c in self.meters}, PROMPT)

    def shares(self) -> dict[int, int]:
        """Blocks that each child loads of the usual prompt."""
        found = self.all()
        assert found.stop == PROMPT.stop
        return {c: sum(map(len, ranges)) for c, ranges in found.shares.items()}


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
    assert World(10.0, 10.0).all().shares == {0: [range(10, 60)], 1: [range(60, 110)]}


def test_each_has_as_much_as_it_is_fast() -> None:
    assert World(30.0, 10.0).shares() == {0: 75, 1: 25}
    assert World(10.0, 10.0, 30.0).shares() == {0: 20, 1: 20, 2: 60}


def test_what_is_queued_counts() -> None:
    world = World(10.0, 10.0)
    world.loads(0, 40, None)
    assert world.shares() == {0: 40, 1: 60}, "what is under way is half done, on average"
    world.loads(0, 400, None)
    assert world.shares() == {1: 100}


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
        assert [*world.all().shares] == [1, 0], "what precedes its part can be used"
        parts.append(world.shares()[0])
    assert parts == sorted(parts, reverse=True) and parts[-1] < 10
    world.loads(0, 50, 5.0)
    assert world.shares() == {0: 50, 1: 50}


def test_one_that_still_looks_is_waited_for_where_a_gap_ends_the_prefix() -> None:
    world = World(10.0, 10.0)
    assert world.plan({0: held("x" * 5), 1: held(None)}, range(5)).looking is False
    assert world.plan({0: held("x" * 5), 1: held(None)}, range(6)).looking is True


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_the_prefix_is_that_of_stitched_and_each_block_from_one_that_holds_it(
    seed: int, window: int
) -> None:
    rng = random.Random(seed)
    world = World(*[rng.choice([1.0, 10.0, 50.0]) for _ in range(3)])
    marks = ["".join(rng.choices(".xX", [1, 9, 30], k=rng.randrange(400))) for _ in range(3)]
    children = {child: held(one) for child, one in enumerate(marks)}
    blocks = range(rng.randrange(30), 300)
    found = world.plan(children, blocks, window)
    other = stitched(children, blocks, window)
    assert (found.stop, found.looking) == (other.stop, other.looking)
    owners = {b: c for c, ranges in found.shares.items() for part in ranges for b in part}
    assert sorted(owners) == list(range(blocks.start, found.stop))
    for block, child in owners.items():
        needed = COMPLETE if block >= found.stop - window else NO_WINDOW
        assert LEVELS[marks[child][block]] >= needed


def test_a_probe_has_the_first_blocks_of_a_prefix_and_others_the_rest() -> None:
    shares = {0: [range(10, 20), range(30, 40)], 1: [range(20, 30)]}
    assert behind(shares, {2: [range(10, 14)]}) == {
        2: [range(10, 14)],
        0: [range(14, 20), range(30, 40)],
        1: [range(20, 30)],
    }
    assert behind(shares, {1: [range(10, 24)]}) == {
        1: [range(10, 24), range(24, 30)],
        0: [range(30, 40)],
    }
    assert behind(shares, {2: [range(10, 50)]}) == {2: [range(10, 50)]}
