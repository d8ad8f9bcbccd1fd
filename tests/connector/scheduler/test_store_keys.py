"""What a store is known to hold: for a while, up to a bound, and never after it was forgotten."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from tests.support.lookups import IndexedNames, look_up
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_keys import RecentKeys
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.generation import Generation


def test_keys_are_known_for_half_the_time_at_least_and_all_of_it_at_most() -> None:
    clock = Clock()
    recent = RecentKeys(limit=1000, seconds=60.0, clock=clock)
    for began in (0.0, 17.0, 200.0, 229.9):
        clock.now = began
        recent.add([b"k"])
        clock.now = began + 29.9
        assert recent.known([b"k", b"other"]) == [True, False]
    clock.now = 229.9 + 29.9 + 60.0
    assert recent.known([b"k"]) == [False]


def test_a_key_that_is_not_added_again_is_forgotten_in_time() -> None:
    clock = Clock()
    recent = RecentKeys(limit=1000, seconds=60.0, clock=clock)
    recent.add([b"k"])
    for clock.now in (25.0, 50.0, 61.0):
        recent.add([b"other"])
    assert recent.known([b"k", b"other"]) == [False, True]


def test_no_more_keys_are_known_than_the_limit() -> None:
    recent = RecentKeys(limit=10, seconds=60.0, clock=Clock())
    keys = [b"%d" % number for number in range(100)]
    for key in keys:
        recent.add([key])
    known = recent.known(keys)
    assert 5 <= sum(known) <= 10 and known[-1]


def test_forgetting() -> None:
    recent = RecentKeys(limit=10, seconds=60.0, clock=Clock())
    recent.add([b"a", b"b"])
    recent.discard(b"a")
    assert recent.known([b"a", b"b"]) == [False, True]
    recent.clear()
    assert recent.known([b"b"]) == [False]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_request_that_waits_is_looked_up_once_in_a_while(clock: Clock) -> None:
    store = IndexedNames()
    manager = StoreManager(store, [b""], Generation(), clock)
    keys = [b"%d" % number for number in range(100)]
    store.names.update(keys[:70])
    lookup = Lookup()
    assert [look_up(manager, keys, lookup) for _ in range(3)] == [70] * 3
    assert store.asked < 200
    assert look_up(manager, keys, lookup, 10) == 60, "another question is asked"
    store.names.clear()
    clock.now += 1.0
    assert look_up(manager, keys, lookup, 10) == 0
    manager.close()


def test_a_store_is_offered_again_what_it_lost(clock: Clock) -> None:
    store = IndexedNames()
    manager = StoreManager(store, [b""], Generation(), clock)
    store.names.update([b"a", b"b"])
    assert manager.touch_and_list_missing([b"a", b"b", b"c"]) == [False, False, True]
    store.names.clear()
    manager.discard(b"a")
    assert manager.touch_and_list_missing([b"a", b"b", b"c"]) == [True, False, True]
    clock.now += StoreManager.RECENT_SECONDS
    assert manager.touch_and_list_missing([b"a", b"b", b"c"]) == [True, True, True]
    manager.close()
