"""What a store is known to hold is asked for again after a while, and after it was forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.clock import Clock, wait_for
from tests.support.lookups import IndexedNames, Names, look_up
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_keys import VisibilityCheck
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.generation import Generation
from tiers.wrappers.guard import Guarded


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_store_is_offered_again_what_it_lost(clock: Clock) -> None:
    store = IndexedNames()
    manager = StoreManager(Guarded(store, "tier"), [b""], Generation(), clock)
    store.names.update([b"a", b"b"])
    assert manager.touch_and_list_missing([b"a", b"b", b"c"]) == [False, False, True]
    store.names.clear()
    manager.discard(b"a")
    assert manager.touch_and_list_missing([b"a", b"b", b"c"]) == [True, False, True]
    clock.now += StoreManager.RECENT_SECONDS
    assert manager.touch_and_list_missing([b"a", b"b", b"c"]) == [True, True, True]
    manager.close()


@pytest.mark.parametrize("kind", [Names, IndexedNames])
def test_what_a_lookup_misses_is_offered_again(kind: type[Names], clock: Clock) -> None:
    """As of a server that was emptied, or whose `ttl` is over within the minute."""
    store, keys = kind(b"a", b"b"), [b"a", b"b"]
    manager = StoreManager(Guarded(store, "tier"), [b""], Generation(), clock)
    manager.stored(keys)
    store.names.remove(b"b")
    lookup = Lookup()
    wait_for(lambda: look_up(manager, keys, lookup) == 1)
    assert manager.touch_and_list_missing(keys) == [False, True]
    manager.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda manager, keys: None,
        lambda manager, keys: [manager.discard(key) for key in keys],
        lambda manager, keys: manager.reset(),
    ],
    ids=["held", "gone", "reset"],
)
def test_what_is_known_to_be_gone_does_not_count_as_never_found(
    change: Callable[[StoreManager, list[bytes]], object],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    clock: Clock,
) -> None:
    manager = StoreManager(Guarded(IndexedNames(), "tier"), [b""], Generation(), clock)
    keys = [b"%02d" % number for number in range(VisibilityCheck.MISSED)]
    manager.stored(keys)
    change(manager, keys)
    assert look_up(manager, keys, Lookup()) == 0
    assert len(caplog.messages) == (request.node.callspec.id == "held")
    manager.close()


@pytest.mark.parametrize("case", ["in vain", "one load", "foreign", "reset", "came", "unfound"])
def test_loads_that_are_all_in_vain_are_noticed(
    case: str, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    store = IndexedNames(b"held")
    manager = StoreManager(Guarded(store, "tier"), [b""], Generation(), clock)
    keys = [b"%02d" % number for number in range(VisibilityCheck.MISSED)]
    manager.stored([b"held", *([] if case == "foreign" else keys)])
    if case != "unfound":
        look_up(manager, [b"held"], Lookup())
        look_up(manager, keys[:16], Lookup())
        look_up(manager, keys[16:], Lookup())  # once one is found others may be evicted
    if case == "reset":
        manager.reset()
    if case == "came":
        manager.loaded(True, [])
    step = len(keys) if case == "one load" else 4
    for start in range(0, len(keys), step):
        manager.loaded(False, keys[start : start + step])
    assert len(caplog.messages) == (case == "in vain"), caplog.messages
    assert all("the 32 loaded since" in line for line in caplog.messages)
    manager.close()


def test_what_a_lookup_misses_is_not_looked_up_again_when_the_step_stores_it(clock: Clock) -> None:
    store = IndexedNames()
    manager = StoreManager(Guarded(store, "tier"), [b""], Generation(), clock)
    store.names.add(b"a")
    assert look_up(manager, [b"a", b"b"], Lookup()) == 1
    assert manager.touch_and_list_missing([b"a", b"b", b"c"]) == [False, True, True]
    assert store.asked == 4
    store.names.add(b"b")
    assert manager.touch_and_list_missing([b"b", b"c"]) == [False, True], "in a later step it is"
    manager.close()
