"""Which blocks hints keep, until when and for whom, whatever clients say how often."""

from __future__ import annotations

import random

from tests.support.clock import Clock
from tests.support.kept import kept
from tiers.connector.scheduler.admission import PinBounds
from tiers.connector.scheduler.tier_hints import PinnedBlocks

PLENTY = PinBounds(1000, 1000)


def keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_blocks_are_kept_until_their_time_is_over() -> None:
    clock = Clock(100.0)
    retained = PinnedBlocks(clock)
    assert retained.add(keys(0, 1), "", 10, PLENTY) == keys(0, 1)
    assert retained.add(keys(2), "", 5, PLENTY) == keys(2)
    clock.now = 104.9
    assert retained.take_ended(10) == []
    clock.now = 105.0
    assert retained.take_ended(10) == keys(2)
    clock.now = 200.0
    assert retained.take_ended(1) == keys(1), "a prefix's tail first"
    assert retained.take_ended(1) == keys(0)
    assert retained.take_ended(1) == [] and not retained


def test_a_block_is_kept_as_long_as_anybody_said() -> None:
    clock = Clock()
    retained = PinnedBlocks(clock)
    retained.add(keys(0, 1), "", 10, PLENTY)
    retained.add(keys(0), "", 20, PLENTY)
    retained.add(keys(0, 1), "", 3, PLENTY)
    clock.now = 10.0
    assert retained.take_ended(10) == keys(1)
    clock.now = 20.0
    assert retained.take_ended(10) == keys(0)


def test_the_head_of_what_is_beyond_the_bounds_is_kept() -> None:
    retained = PinnedBlocks(Clock())
    assert retained.add(keys(0, 1, 2, 3), "a", 10, PinBounds(5, 3)) == keys(0, 1, 2)
    assert retained.add(keys(4, 5, 6), "b", 10, PinBounds(5, 3)) == keys(4, 5)
    assert retained.add(keys(7), "c", 10, PinBounds(5, 3)) == []
    assert retained.add(keys(2, 7), "a", 10, PinBounds(5, 3)) == keys(2), "which it has already"
    assert retained.remove(keys(0, 9, 0)) == keys(0)
    assert retained.add(keys(7, 8), "a", 10, PinBounds(5, 3)) == keys(7)
    assert len(retained) == 5


def test_whatever_is_said_how_often_takes_no_more_memory() -> None:
    """A client that retains and demotes for a day."""
    clock, rng, bounds = Clock(), random.Random(0), PinBounds(30, 20)
    retained = PinnedBlocks(clock)
    for _ in range(20_000):
        clock.now += rng.random()
        some = keys(*rng.sample(range(100), 5))
        if rng.random() < 0.3:
            retained.remove(some)
        else:
            retained.add(some, rng.choice("ab"), rng.choice([1, 60, 600]), bounds)
        retained.take_ended(4)
        assert len(retained) <= 30
    assert kept(retained) <= 2 * 602 + 5 * 30, "a bucket a second, and what is in them"
    retained.remove_all()
    assert not retained and kept(retained) <= 2 * 602, "buckets alone"


def test_tenants_of_whom_nothing_is_kept_are_not_remembered() -> None:
    """A cache salt is any text: whoever asks may have another each time."""
    retained = PinnedBlocks(Clock(100.0))
    for number in range(100):
        retained.add(keys(0) if number % 2 else [], f"tenant {number}", 10, PinBounds(0, 0))
    assert not kept(retained)
