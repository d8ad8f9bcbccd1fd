"""The host pool: slots are never in two hands, whatever order claims and releases come in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiers.cpu.spec import CpuSpec
from tiers.host.slot_memory import SlotMemory
from tiers.host.slots import ALIGNMENT, IN_USE, SlotPool, slot_stride

SLOTS = 5
CAPACITY = 3
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g"])


class PoolAndTier(RuleBasedStateMachine):
    """A pool and a tier in it against a model: references held per slot, blocks kept per tier."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLOTS)
        self.capacity = self.bound = CAPACITY
        """How many blocks the tier may keep, and does at most."""
        self.kept: dict[bytes, int] = {}
        """What the tier must keep: all it took, less what it said it evicted."""
        self.held: list[tuple[bytes, int]] = []
        self.written: dict[int, bytes] = {}
        """Which block's bytes each slot has, as a worker would find it."""

    @initialize(eviction=st.sampled_from(["lru", "arc"]))
    def open(self, eviction: str) -> None:
        """Any policy may evict what it likes, but says so."""
        spec = CpuSpec.model_validate({"capacity": 1, "eviction": eviction})
        self.tier = spec.residency(self.pool, CAPACITY)
        self.tier.on_evict = self.evicted

    def evicted(self, key: bytes) -> None:
        del self.kept[key]

    @rule(key=KEYS)
    def claim(self, key: bytes) -> None:
        """A store begins; a fresh slot is written, any other has the block already."""
        in_other_hands = {*self.in_hands()}
        claim = self.pool.claim(key)
        if claim is None:
            usable = range(self.pool.end)
            assert all(map(self.pool.references, usable)), "refused while a slot was free"
            assert in_other_hands.issuperset(usable), "refused while one could be evicted"
            return
        if claim.fresh:
            assert claim.slot not in in_other_hands
            self.written[claim.slot] = key
        assert self.written[claim.slot] == key
        self.held.append((key, claim.slot))

    def in_hands(self) -> list[int]:
        """The slot of each reference that is not the tier's own."""
        return [slot for _, slot in self.held]

    @rule(key=KEYS)
    def load(self, key: bytes) -> None:
        """A load pins what the tier keeps, and finds the right bytes."""
        slot = self.tier.find(key)
        if slot is not None:
            assert self.written[slot] == key
            self.pool.retain(slot)
            self.held.append((key, slot))
            self.tier.touch([key])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans(), broken=st.booleans())
    def finish(self, data: st.DataObject, keep: bool, broken: bool) -> None:
        """A copy ends: the tier may keep the block; one that failed is parted from its key."""
        number = data.draw(st.integers(0, len(self.held) - 1))
        self.end(*self.held.pop(number), keep, broken)

    def end(self, key: bytes, slot: int, keep: bool, broken: bool = False) -> None:
        if broken:
            self.tier.discard(key)
            self.kept.pop(key, None)
            self.pool.forget(slot)
        elif keep:
            had, full = key in self.kept, len(self.kept) >= self.capacity
            self.tier.admit(key, slot)
            found = self.tier.find(key)
            if found is not None and not had:
                self.kept[key] = slot
            assert had or found is not None or full or self.pool.key(slot) is None
        self.pool.release(slot)

    @rule(key=KEYS)
    def discard(self, key: bytes) -> None:
        self.tier.discard(key)
        self.kept.pop(key, None)

    @rule(keys=st.lists(KEYS))
    def touch(self, keys: list[bytes]) -> None:
        self.tier.touch(keys)

    @rule()
    def clear(self) -> None:
        self.tier.outdate()
        assert not len(self.tier) and self.tier.trim(2 * len(self.kept)) == len(self.kept)
        self.kept.clear()

    @rule()
    def evict(self) -> None:
        before = len(self.tier)
        evicted = self.tier.evict_one()
        assert len(self.tier) == before - evicted

    @invariant()
    def references_add_up(self) -> None:
        kept = [
            slot
            for key in (b"abcdefg"[i : i + 1] for i in range(7))
            if (slot := self.tier.find(key)) is not None
        ]
        slots = range(self.pool.num_slots)
        for slot in slots:
            assert self.pool.references(slot) == self.in_hands().count(slot) + kept.count(slot)
        assert sorted(kept) == sorted(self.kept.values())
        assert len(kept) == len(set(kept)) == len(self.tier) <= self.bound
        assert self.pool.in_use == sum(self.pool.references(slot) > 0 for slot in slots)

    def teardown(self) -> None:
        for _, slot in self.held:
            self.pool.release(slot)
        while self.tier.evict_one():
            pass
        assert (self.pool.in_use, len(self.tier)) == (0, 0)


TestPoolAndTier = PoolAndTier.TestCase
TestPoolAndTier.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_key_has_one_slot_while_anyone_holds_it() -> None:
    pool = SlotPool(2)
    first, second = pool.claim(b"k"), pool.claim(b"k")
    assert first is not None and second is not None
    assert (first.fresh, second.fresh) == (True, False) and first.slot == second.slot
    pool.release(first.slot)
    assert pool.in_use == 1
    pool.release(first.slot)
    again = pool.claim(b"k")
    assert again is not None and again.fresh, "a slot that was free may hold other bytes"


def test_a_forgotten_key_gets_another_slot() -> None:
    pool = SlotPool(2)
    first = pool.claim(b"k")
    assert first is not None
    pool.forget(first.slot)
    second = pool.claim(b"k")
    assert second is not None and second.fresh and second.slot != first.slot
    pool.release(first.slot)
    third = pool.claim(b"k")
    assert third is not None and (third.slot, third.fresh) == (second.slot, False)


def test_a_slot_that_is_renamed_has_one_key_and_the_key_one_slot() -> None:
    pool = SlotPool(2)
    first, second = pool.claim(b"k"), pool.claim(b"draft")
    assert first is not None and second is not None
    assert not pool.rename(second.slot, b"k")
    assert [*map(pool.find, [b"k", b"draft"])] == [first.slot, second.slot]
    pool.release(first.slot)
    assert pool.rename(second.slot, b"k")
    assert [*map(pool.find, [b"k", b"draft"])] == [second.slot, None]


def test_all_slots_are_handed_out_however_many_are_in_use() -> None:
    pool = SlotPool(IN_USE + 2)
    claims = [pool.claim(b"%d" % number) for number in range(pool.num_slots + 1)]
    assert [claim and claim.slot for claim in claims] == [*range(pool.num_slots), None]


def test_a_slot_is_idle_once_one_alone_uses_it() -> None:
    pool, idle = SlotPool(1), list[int]()
    pool.add_evictor(bool, idle.append)
    for _ in range(3):
        claim = pool.claim(b"k")
    assert claim is not None
    pool.release(claim.slot)
    assert idle == []
    pool.release(claim.slot)
    assert idle == [claim.slot]


def test_no_slot_is_none_and_not_an_error() -> None:
    assert SlotPool(0).claim(b"k") is None
    pool = SlotPool(1)
    assert pool.claim(b"a") is not None
    assert pool.claim(b"b") is None


@pytest.mark.parametrize("payload_bytes", [1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT])
def test_slots_are_aligned_apart_and_as_long_as_a_payload(payload_bytes: int) -> None:
    memory = SlotMemory(3, payload_bytes, pin=False)
    for slot in range(3):
        view = memory.payload(slot)
        assert len(view) == payload_bytes and not view.readonly and view.format == "B"
        assert memory.rows[slot].data_ptr() % ALIGNMENT == 0
        view[:] = bytes([slot + 1]) * payload_bytes
    for slot in range(3):
        assert set(memory.payload(slot)) == {slot + 1}
        assert memory.rows[slot, :payload_bytes].eq(slot + 1).all()
    assert memory.rows.shape == (3, slot_stride(payload_bytes))
    memory.close()
    memory.close()
