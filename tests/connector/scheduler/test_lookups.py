"""Lookups behind a network: every answer is heard, however long an engine's steps are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.clock import Clock, wait_for
from tests.support.lookups import Names, look_up
from tiers.block import NAMESPACE_BYTES
from tiers.connector.scheduler.lookups import Lookup, LookupTimer
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.generation import Generation
from tiers.contract.messages import LookupTimes
from tiers.store import Capability, Capable, LocalIndex
from tiers.testing import Memory, MemoryStore
from tiers.wrappers.guard import Guarded

KEYS = [b"a", b"b", b"c"]


class Held(Names):
    """A store that holds two of the keys."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        super().has(keys)
        return [key.endswith((b"a", b"b")) for key in keys]


class Making(MemoryStore, Capable):
    """A store whose index is made when it is first asked for, and there when it `is_made`."""

    is_begun = is_made = False

    def capability(self, kind: type[Capability]) -> Capability | None:
        self.is_begun = self.is_begun or kind is LocalIndex
        return None if kind is LocalIndex and not self.is_made else super().capability(kind)

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        assert self.is_made
        return super().peek(keys)


@pytest.fixture
def asked() -> Iterator[tuple[StoreManager, Held, Clock]]:
    store, clock = Held(), Clock()
    manager = StoreManager(Guarded(store, "tier"), [b"space"], Generation(), clock)
    yield manager, store, clock
    manager.close()


def wait_for_lookups(store: Held, count: int) -> None:
    wait_for(lambda: store.calls >= count)
    time.sleep(0.01)  # the answer is there a moment later


@pytest.mark.parametrize(
    "change",
    [
        lambda manager: manager.drop([b"a"], b""),
        lambda manager: manager.discard(b"a"),
        lambda manager: manager.resize(1, 1),
        lambda manager: manager.reset(),
    ],
    ids=["dropped", "gone", "smaller", "reset"],
)
def test_what_a_store_may_hold_no_more_is_offered_to_it(
    asked: tuple[StoreManager, Held, Clock], change: Callable[[StoreManager], object]
) -> None:
    manager, _, _ = asked
    manager.stored([b"a"])
    assert manager.touch_and_list_missing([b"a"]) == [False]
    change(manager)
    assert manager.touch_and_list_missing([b"a"]) == [True]


def test_a_request_waited_for_a_tier_until_that_went_down() -> None:
    timer = LookupTimer()
    timer.asked(1.0, 1.5)
    timer.went_down(4.0)
    assert timer.times == LookupTimes(3.0, 0.0, 3.0)
    timer.went_down(9.0)
    assert timer.times == LookupTimes(3.0, 0.0, 3.0), "nothing is waited for"


def test_steps_longer_than_an_answer_holds(asked: tuple[StoreManager, Held, Clock]) -> None:
    manager, store, clock = asked
    lookup = Lookup()
    manager.prefetch_lookup(lookup, KEYS)
    wait_for_lookups(store, 1)
    clock.now += 0.9
    assert look_up(manager, KEYS, lookup) == 2
    clock.now += 0.4
    assert manager.coverage(lookup, KEYS, range(1, 3)) == [True, False], "it holds for a while"


def test_an_answer_that_was_heard_grows_old(asked: tuple[StoreManager, Held, Clock]) -> None:
    manager, store, clock = asked
    lookup = Lookup()
    manager.prefetch_lookup(lookup, KEYS)
    wait_for_lookups(store, 1)
    assert look_up(manager, KEYS, lookup) == 2
    clock.now += 0.6
    look_up(manager, KEYS, lookup)
    wait_for_lookups(store, 2)
    assert look_up(manager, KEYS, lookup) == 2


def test_an_index_that_takes_time_to_make_is_used_once_it_is_there() -> None:
    store, clock = Making(), Clock()
    space = bytes(NAMESPACE_BYTES)
    store.put(Memory([space + key for key in KEYS[:2]], 64).fill().blocks)
    manager = StoreManager(Guarded(store, "tier"), [space], Generation(), clock)
    assert store.is_begun, "before the first request"
    waiting = Lookup()
    wait_for(lambda: look_up(manager, KEYS, waiting) == 2)
    store.is_made = True
    for lookup in (waiting, Lookup()):
        assert manager.coverage(lookup, KEYS, range(3)) == [True, True, False], "at once"
    manager.close()


def test_what_a_store_said_while_its_index_was_made_is_looked_up_in_it() -> None:
    """The index corrects its own answers; those of before would hold for as long as one waits."""
    store, clock = Making(), Clock()
    space = bytes(NAMESPACE_BYTES)
    store.put(Memory([space + key for key in KEYS[:2]], 64).fill().blocks)
    manager = StoreManager(Guarded(store, "tier"), [space], Generation(), clock)
    heard, unheard = Lookup(), Lookup()
    wait_for(lambda: look_up(manager, KEYS, heard) == 2)
    said = manager.version(heard, KEYS)
    store.is_made = True
    manager.prefetch_lookup(unheard, KEYS)
    store.put(Memory([space + KEYS[2]], 64).fill().blocks)
    for lookup in (heard, unheard):
        assert manager.version(lookup, KEYS) != said
        assert manager.coverage(lookup, KEYS, range(3)) == [True] * 3
        assert not lookup.is_unanswered
    manager.close()
