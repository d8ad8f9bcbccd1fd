"""Lookups behind a network: every answer is heard, however long an engine's steps are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from tests.support.clock import Clock, wait_for
from tests.support.lookups import Names, look_up
from tiers.connector.contract.generation import Generation
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager

KEYS = [b"a", b"b", b"c"]


class Held(Names):
    """A store that holds two of the keys."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        super().has(keys)
        return [key.endswith((b"a", b"b")) for key in keys]


@pytest.fixture
def asked() -> Iterator[tuple[StoreManager, Held, Clock]]:
    store, clock = Held(), Clock()
    manager = StoreManager(store, [b"space"], Generation(), clock)
    yield manager, store, clock
    manager.close()


def wait_for_lookups(store: Held, count: int) -> None:
    wait_for(lambda: store.calls >= count)
    time.sleep(0.01)  # the answer is there a moment later


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
