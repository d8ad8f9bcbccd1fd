"""What was met of late: for a while, up to a bound, and never after it was forgotten."""

from __future__ import annotations

from tests.support.clock import Clock
from tiers.recent import RecentDict


def test_keys_are_known_for_half_the_time_at_least_and_all_of_it_at_most() -> None:
    clock = Clock()
    recent = RecentDict[bytes, int | None](limit=1000, seconds=60.0, clock=clock)
    for began in (0.0, 17.0, 200.0, 229.9):
        clock.now = began
        recent.update({b"k": None})
        clock.now = began + 29.9
        assert recent.known([b"k", b"other"]) == [True, False]
    clock.now = 229.9 + 29.9 + 60.0
    assert recent.known([b"k"]) == [False]


def test_a_key_that_is_not_added_again_is_forgotten_in_time() -> None:
    clock = Clock()
    recent = RecentDict[bytes, int | None](limit=1000, seconds=60.0, clock=clock)
    recent.update({b"k": None})
    for clock.now in (25.0, 50.0, 61.0):
        recent.update({b"other": None})
    assert recent.known([b"k", b"other"]) == [False, True]


def test_no_more_keys_are_known_than_the_limit() -> None:
    recent = RecentDict[bytes, int | None](limit=10, seconds=60.0, clock=Clock())
    keys = [b"%d" % number for number in range(100)]
    for key in keys:
        recent.update({key: None})
    known = recent.known(keys)
    assert 5 <= sum(known) <= 10 and known[-1]


def test_forgetting() -> None:
    recent = RecentDict[bytes, int | None](limit=10, seconds=60.0, clock=Clock())
    recent.update({b"a": 1, b"b": 2})
    recent.discard([b"a"])
    assert recent.known([b"a", b"b"]) == [False, True]
    assert (recent.get(b"a"), recent.get(b"b"), recent.items()) == (None, 2, [(b"b", 2)])
    recent.clear()
    assert recent.known([b"b"]) == [False]
