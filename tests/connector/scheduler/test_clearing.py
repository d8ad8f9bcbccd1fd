"""What is given up of a store is dropped in the background, in steps, and holds nobody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.support.lookups import look_up
from tiers.concurrency import executors
from tiers.connector.scheduler.clearing import Clearing
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.generation import Generation
from tiers.store import Block
from tiers.wrappers.guard import Guarded

WAIT = 30


class Store:
    """Holds nothing, and drops once it may."""

    def __init__(self) -> None:
        self.may_drop = threading.Event()
        self.dropping = threading.Event()
        self.drops: list[list[bytes]] = []

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        self.dropping.set()
        assert self.may_drop.wait(WAIT)
        self.drops.append(list(keys))

    def close(self) -> None:
        self.may_drop.set()


class Local(Store):
    """One that can be cleared, without end."""

    steps = 0

    def clear(self, namespace: bytes) -> bool:
        self.dropping.set()
        assert self.may_drop.wait(WAIT)
        self.steps += 1
        return True


@pytest.fixture
def slow(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[StoreManager, Store, Generation]]:
    monkeypatch.setattr(Clearing, "DEADLINE", 0.5)  # of a close, for what never ends
    store, generation = request.param(), Generation()
    manager = StoreManager(Guarded(store, "tier"), [b"space"], generation)
    yield manager, store, generation
    store.may_drop.set()
    manager.close()


@pytest.mark.parametrize("slow", [Store, Local], indirect=True)
def test_lookups_go_on_while_a_store_drops(slow: tuple[StoreManager, Store, Generation]) -> None:
    manager, store, generation = slow
    generation.renew()
    manager.stored([generation.key(b"a")])
    over = generation.tag
    manager.reset()
    generation.renew()
    manager.clear(over)
    assert store.dropping.wait(WAIT)
    answered = threading.Event()

    def ask() -> None:
        lookup = Lookup()
        while look_up(manager, [generation.key(b"a")], lookup) is None:
            pass
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    assert answered.wait(WAIT) and not store.may_drop.is_set()


def test_a_store_that_is_never_empty_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Clearing, "DEADLINE", 0.2)
    store = Local()
    store.may_drop.set()
    clearing = Clearing(store, [b"space"])
    clearing.close(b"generation")
    clearing._thread.shutdown(wait=True)
    assert store.steps > 0


def test_keys_of_a_generation_are_dropped_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clearing, "STEP", 10)
    monkeypatch.setattr(Clearing, "REMEMBERED", 95)
    store = Store()
    store.may_drop.set()
    clearing = Clearing(store, [b"space", b"other"])
    for tag in (b"", b"generation"):
        clearing.stored([number.to_bytes(2, "big") + tag for number in range(100)], tag)
    clearing.clear(b"")
    clearing.close(b"generation")
    dropped = {key for step in store.drops for key in step}
    assert max(map(len, store.drops)) == 2 * 10
    assert len(dropped) == 2 * 95 and all(key.endswith(b"generation") for key in dropped)


def test_however_often_some_are_dropped_they_go_together_and_no_work_piles_up() -> None:
    """As of a tenant at its quota, with hundreds of jobs a second that each store a block."""
    store = Store()
    clearing = Clearing(store, [b"space"])
    keys = [number.to_bytes(2, "big") for number in range(300)]
    for key in keys:
        clearing.drop([key], b"")
    pieces = len(clearing._in_flight)
    assert store.dropping.wait(WAIT)
    store.may_drop.set()
    clearing.close(b"")
    assert pieces <= 2
    assert [name for step in store.drops for name in step] == [b"space" + key for key in keys]
    assert len(store.drops) <= 3 + len(keys) // Clearing.STEP


def test_a_process_that_ends_clears_nothing_and_says_so_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a script that never closes its engine: no thread is there any more."""
    ending = threading.Event()
    ending.set()
    store = Store()
    clearing = Clearing(store, [b"space"])
    clearing.stored([b"key"], b"generation")
    monkeypatch.setattr(executors, "_ending", ending)
    clearing.close(b"generation")
    assert not store.drops
