"""A plugin's host tier that goes wrong drops out; the engine and the other tiers go on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from spec.offloading import HostSpec
from tests.support.lookups import look_up
from tiers.connector.scheduler.host_manager import HostManager
from tiers.connector.scheduler.lookups import Lookup
from tiers.errors import TierUnusable
from tiers.host.slots import SlotPool, Slots
from tiers.wrappers.guard import FAILED
from tiers.wrappers.guarded_residency import GuardedResidency


class Fifo:
    """All that a host tier's bookkeeping needs."""

    def __init__(self, pool: Slots, max_slots: int) -> None:
        self.on_evict: Callable[[bytes], None] | None = None
        self.pool, self.most = pool, max_slots
        self.slots: dict[bytes, int] = {}
        self.was_idle: list[int] = []
        pool.add_evictor(self.evict_one, self.idle)

    def idle(self, slot: int) -> None:
        self.was_idle.append(slot)

    def find(self, key: bytes) -> Any:
        return self.slots.get(key)

    def find_all(self, keys: Sequence[bytes]) -> Any:
        return [self.find(key) for key in keys]

    touch = find_all

    def admit(self, key: bytes, slot: int, head: int | None = None) -> None:
        if key not in self.slots and (len(self.slots) < self.most or self.evict_one()):
            self.pool.retain(slot)
            self.slots[key] = slot

    def evict_one(self) -> bool:
        for key, slot in self.slots.items():
            if self.pool.references(slot) == 1:
                self.discard(key)
                if self.on_evict is not None:
                    self.on_evict(key)
                return True
        return False

    def discard(self, key: bytes) -> None:
        slot = self.slots.pop(key, None)
        if slot is not None:
            self.pool.release(slot)

    def clear(self) -> list[bytes]:
        keys = list(self.slots)
        for key in keys:
            self.discard(key)
        return keys

    def __len__(self) -> int:
        return len(self.slots)


class FifoSpec(HostSpec):
    def residency(self, pool: Slots, max_slots: int) -> Any:
        return MADE[0](pool, max_slots)


MADE: list[Callable[[Slots, int], Any]] = [Fifo]
CAPACITY, SLOTS = 4, 8


def manager(
    make: Callable[[Slots, int], Any], on_evict: Callable[[bytes], None] | None = None
) -> tuple[HostManager, SlotPool]:
    MADE[:] = [make]
    pool = SlotPool(SLOTS)
    residency = GuardedResidency(FifoSpec(type="fifo", capacity=1), pool, CAPACITY)
    return HostManager(residency, pool, on_evict), pool


def key(number: int) -> bytes:
    return b"key%d" % number


def store(made: HostManager, pool: SlotPool, number: int) -> bool:
    claim = pool.claim(key(number))
    assert claim is not None, "no room in the pool"
    kept = made.complete_store(key(number), claim.slot, True, None)
    pool.release(claim.slot)
    return kept


def test_a_plugin_s_host_tier_works() -> None:
    evicted: list[bytes] = []
    made, pool = manager(Fifo, evicted.append)
    assert all(store(made, pool, number) for number in range(6))
    assert evicted == [key(0), key(1)] and made.slots_kept() == CAPACITY == pool.in_use
    assert look_up(made, [key(2), key(3), key(9)], Lookup()) == 2
    slots = made.prepare_load([key(2)])
    assert slots[0] is not None and pool.references(slots[0]) == 2
    made.complete_load(slots)
    # What others claim makes room among what is kept.
    assert all(pool.claim(key(100 + number)) is not None for number in range(SLOTS))
    assert made.slots_kept() == 0
    assert made.health().reads_up


class PanicException(BaseException):
    """As PyO3 raises one where Rust code panics."""


def panics(*args: object) -> Any:
    raise PanicException


def raises(*args: object) -> Any:
    raise KeyError("a plugin's own")


WRONG: dict[str, dict[str, Any]] = {
    "find raises": {"find": raises},
    "find panics": {"find": panics},
    "find_all raises": {"find_all": raises},
    "touch raises": {"touch": raises},
    "admit raises": {"admit": raises},
    "discard raises": {"discard": raises},
    "clear raises": {"clear": raises},
    "demote raises": {"demote": raises},
    "demote counts too many": {"demote": lambda self, keys: len(keys) + 1},
    "demote counts nothing": {"demote": lambda self, keys: None},
    "clear clears nothing": {"clear": lambda self: []},
    "idle raises": {"idle": raises},
    "evicting raises": {"evict_one": raises},
    "another's slot": {"find_all": lambda self, keys: [0] * len(keys)},
    "too few slots": {"touch": lambda self, keys: []},
    "no list": {"find_all": lambda self, keys: dict.fromkeys(keys)},
    "no slots": {"find": lambda self, key: "slot"},
    "keeps twice": {"admit": lambda self, key, slot, head: [self.pool.retain(slot) for _ in "ab"]},
    "releases another's": {"admit": lambda self, key, slot, head: self.pool.release(slot)},
    "keeps more than its capacity": {"evict_one": lambda self: True},
}


@pytest.mark.fault
@pytest.mark.parametrize("wrong", WRONG)
def test_what_goes_wrong_ends_that_tier_alone(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    made, pool = manager(type("Odd", (Fifo,), WRONG[wrong]))
    others = pool.claim(b"another tier's")
    assert others is not None
    for number in range(SLOTS):
        store(made, pool, number)
        look_up(made, [key(number), key(0)], Lookup())
        slots = made.prepare_load([key(number)])
        made.complete_load(slots)
        made.touch_and_list_missing([key(number)])
        made.demote([key(number)])
    made.discard(key(SLOTS - 1))
    made.reset()
    assert made.health() is FAILED
    assert made.slots_kept() == 0 and pool.in_use == 1 == pool.references(others.slot)
    assert made.touch_and_list_missing([key(77)]) == [False], "nothing more is gathered for it"
    said = [line for line in caplog.messages if "fifo (package tests) has failed" in line]
    assert len(said) == 1


def test_one_that_can_t_even_be_made_is_unusable() -> None:
    with pytest.raises(TierUnusable, match="residency raised KeyError"):
        manager(raises)


def test_an_evictor_that_lies_makes_no_room() -> None:
    _, pool = manager(type("Odd", (Fifo,), {"evict_one": lambda self: True}))
    for number in range(SLOTS):
        assert pool.claim(key(number)) is not None
    assert pool.claim(key(SLOTS)) is None


def test_a_prefix_outlives_the_failure_of_a_tier_that_is_loading() -> None:
    """A load under way holds references of its own."""
    odd = type("Odd", (Fifo,), {"discard": raises})
    made, pool = manager(odd)
    store(made, pool, 0)
    slots = made.prepare_load([key(0)])
    made.discard(key(1))
    assert made.health() is FAILED and slots[0] is not None
    assert pool.key(slots[0]) == key(0) and pool.references(slots[0]) == 1
    made.complete_load(slots)
    assert pool.in_use == 0


def test_random_use_leaks_no_slot() -> None:
    rng = random.Random(5)
    made, pool = manager(Fifo)
    for _ in range(2000):
        number = rng.randrange(12)
        if rng.random() < 0.5:
            store(made, pool, number)
        else:
            made.discard(key(number))
        assert pool.in_use == made.slots_kept() <= CAPACITY
    assert made.health().reads_up


class Hinted(Fifo):
    """Evicts next what it is told to."""

    def demote(self, keys: Sequence[bytes]) -> int:
        found = [key for key in reversed(keys) if key in self.slots]
        self.slots = {**{key: self.slots[key] for key in found}, **self.slots}
        return len(found)


def test_a_plugin_s_tier_that_takes_hints_has_them() -> None:
    evicted: list[bytes] = []
    made, pool = manager(Hinted, evicted.append)
    assert all(store(made, pool, number) for number in range(CAPACITY))
    assert made.demote([key(2), key(3), key(9)]) == 2
    assert all(store(made, pool, number) for number in (10, 11))
    assert evicted == [key(3), key(2)] and made.health().reads_up


class Hasty(Fifo):
    """Evicts also what is in use."""

    def evict_one(self) -> bool:
        key = next(iter(self.slots), None)
        if key is not None:
            self.discard(key)
            if self.on_evict is not None:
                self.on_evict(key)
        return key is not None


def test_a_plugin_s_tier_passes_by_what_is_retained() -> None:
    made, pool = manager(Fifo)
    assert all(store(made, pool, number) for number in range(CAPACITY))
    made.pin([key(0), key(1), key(9)])
    made.pin([key(0)])
    for number in range(CAPACITY, 20):
        store(made, pool, number)
    assert made.pinnable([key(0), key(1), key(2)]) == [key(0), key(1)]
    assert made.demote([key(0)]) == 0, "it can't be told what goes next"
    made.unpin([key(0), key(1), key(9)])
    for number in range(20, 30):
        store(made, pool, number)
    assert made.pinnable([key(0), key(1)]) == []
    assert pool.in_use == CAPACITY


def test_blocks_beyond_the_end_of_a_pool_that_shrinks_are_dropped() -> None:
    """Where others took host memory along: such a tier can't be told that a block has moved."""
    evicted: list[bytes] = []
    made, pool = manager(Fifo, evicted.append)
    assert all(store(made, pool, number) for number in range(CAPACITY))
    slots = pool.find_all([key(number) for number in range(CAPACITY)])
    stays = [key(number) for number, slot in enumerate(slots) if slot is not None and slot < 2]
    pool.resize(2)
    made.resize(0, CAPACITY)
    while made.is_shrinking:
        assert made.shrink(64) == []
    assert pool.take_vacated() == 2 and len(stays) == made.slots_kept() == 2
    assert {key(number) for number in range(CAPACITY)} == {*evicted, *stays}
    assert all(slot is not None for slot in pool.find_all(stays))


@pytest.mark.parametrize("end", ["evicts it", "fails", "drops it", "is reset"])
def test_no_slot_stays_for_what_was_retained_and_is_gone(end: str) -> None:
    made, pool = manager(type("Odd", (Hasty,), {"touch": raises}) if end == "fails" else Hasty)
    assert all(store(made, pool, number) for number in range(CAPACITY))
    keys = [key(number) for number in range(CAPACITY)]
    made.pin(keys)
    if end == "fails":
        made.touch_and_list_missing(keys)
        assert made.health() is FAILED
    elif end == "drops it":
        made.drop(keys, b"")
    elif end == "is reset":
        made.reset()
    else:
        assert all(store(made, pool, number) for number in range(CAPACITY, 2 * CAPACITY))
        assert sorted(made.reset()) == [key(n) for n in range(CAPACITY, 2 * CAPACITY)]
    assert pool.in_use == 0
