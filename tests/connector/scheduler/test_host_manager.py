"""A host tier and its pool are made smaller and larger while blocks are stored and loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.host.test_slots import PoolAndTier
from tiers.connector.scheduler.host_manager import TRIMMED, HostManager
from tiers.connector.scheduler.lookups import Lookup
from tiers.contract.messages import SlotMove
from tiers.cpu.eviction import LruEviction
from tiers.cpu.residency import SlotResidency
from tiers.host.slots import SlotPool


class ResizedPool(PoolAndTier):
    """No block is lost sight of, and no slot that was given back has one."""

    @initialize(eviction=st.sampled_from(["lru", "arc"]))
    def open(self, eviction: str) -> None:
        super().open(eviction)
        self.manager = HostManager(self.tier, self.pool, self.evicted)
        self.moving: Sequence[SlotMove] = []
        self.resize(9, 9)
        self.fill()

    @rule()
    def fill(self) -> None:
        """The tier has blocks in all slots that nobody uses, as far as it may."""
        for letter in b"abcdefg":
            claims = len(self.held)
            self.claim(bytes([letter]))
            if len(self.held) > claims:
                self.end(*self.held.pop(), keep=True)

    def in_hands(self) -> list[int]:
        moving = [slot for move in self.moving for slot in (move.source, move.target)]
        return super().in_hands() + moving

    @rule(slots=st.integers(1, 9), capacity=st.integers(0, 9))
    def resize(self, slots: int, capacity: int) -> None:
        self.pool.resize(slots)
        self.manager.resize(0, capacity)
        self.capacity, self.bound = capacity, max(capacity, self.bound)

    @rule(most=st.integers(1, 3))
    def step(self, most: int) -> None:
        """A step of the engine; a worker gives back what is vacated, at once."""
        hands = self.in_hands()
        moves = self.manager.shrink(0 if self.moving else most)
        for move in moves:
            assert move.target < self.pool.end <= move.source
            assert move.target not in hands
            self.written[move.target] = b"half of it"
        self.moving = [*self.moving, *moves]
        if len(self.tier) <= self.capacity:
            self.bound = self.capacity
        slots = self.pool.take_vacated()
        if slots is not None:
            assert self.pool.num_slots == slots
            self.written = {slot: key for slot, key in self.written.items() if slot < slots}

    @rule(slots=st.integers(2, 6), used=st.permutations(b"abcdefg"))
    def halve(self, slots: int, used: list[int]) -> None:
        """As most changes: a full tier, some of whose blocks lie beyond the new end."""
        self.resize(9, 9)
        self.fill()
        self.touch([bytes([letter]) for letter in used])
        self.resize(slots, slots)
        self.step(3)
        self.step(3)

    @precondition(lambda self: self.moving)
    @rule(failed=st.sets(st.integers(0, 2)))
    def moved(self, failed: set[int]) -> None:
        """Copies have ended, on all ranks; some failed."""
        moves, self.moving = self.moving, []
        for number, (key, source, target) in enumerate(moves):
            if number not in failed:
                self.written[target] = self.written[source]
                if self.kept.get(key) == source:
                    self.kept[key] = target
        self.manager.moved(moves, failed)

    def evicted(self, key: bytes) -> None:
        del self.kept[key]

    def teardown(self) -> None:
        if self.moving:
            self.moved(set())
        for _, slot in self.held:
            self.pool.release(slot)
        self.held = []
        for _ in range(40):
            self.step(3)
            if self.moving:
                self.moved(set())
            self.references_add_up()
        assert not self.pool.is_vacating and not self.manager.is_shrinking
        assert len(self.tier) <= self.capacity
        super().teardown()


TestResizedPool = ResizedPool.TestCase
TestResizedPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def key(number: int) -> bytes:
    return b"key%d" % number


def filled(pool: SlotPool, blocks: int) -> HostManager:
    """A tier of the whole pool, with a block in each slot."""
    manager = HostManager(SlotResidency(pool, blocks, LruEviction(blocks)), pool)
    for number in range(blocks):
        claim = pool.claim(key(number))
        assert claim is not None and claim.slot == number
        manager.complete_store(key(number), claim.slot, stored=True, before=None)
        pool.release(claim.slot)
    return manager


def shrunk(manager: HostManager, most: int = 64) -> tuple[int, int]:
    """Have a tier shrink; the steps that it took, and the blocks that moved."""
    steps = moved = 0
    while manager.is_shrinking or not steps:
        moves = manager.shrink(most)
        manager.moved(moves, ())
        steps, moved = steps + 1, moved + len(moves)
    return steps, moved


def test_the_blocks_used_last_stay_wherever_they_lie() -> None:
    pool = SlotPool(1000)
    manager = filled(pool, 1000)
    hot = [key(number) for number in range(400, 1000, 2)] + [key(n) for n in range(200)]
    random.Random(1).shuffle(hot)
    manager.touch_and_list_missing(hot)
    pool.resize(500)
    manager.resize(0, 500)
    before = manager.slots_kept()
    manager.shrink(64)
    assert before - manager.slots_kept() == TRIMMED, "no step evicts more"
    _, moved = shrunk(manager)
    assert moved == 250
    for count in range(500, 0, -1):
        assert manager.touch_and_list_missing([]) == [] and manager.slots_kept() == count
        slots = [*map(pool.find, hot[:count])]
        assert all(slot is not None and slot < 500 for slot in slots)
        assert manager._residency.evict_one(), "in their order still"


def test_a_block_that_is_loaded_stays_until_the_load_has_ended() -> None:
    pool = SlotPool(8)
    manager = filled(pool, 8)
    (slot,) = manager.prepare_load([key(7)])
    manager.pin([key(6)])
    pool.resize(4)
    manager.resize(0, 4)
    shrunk(manager)
    assert pool.take_vacated() is None and pool.key(7) == key(7)
    assert pool.find(key(6)) == 6
    manager.complete_load([slot])
    assert shrunk(manager)[1] == 1 and pool.take_vacated() is None
    manager.unpin([key(6)])
    assert shrunk(manager)[1] == 1
    assert pool.take_vacated() == 4
    assert pool.take_vacated() is None, "once"


def test_a_step_is_told_of_few_slots_and_of_none_of_a_change_before() -> None:
    pool = SlotPool(8)
    manager = filled(pool, 8)
    pool.resize(2)
    assert [len(pool.beyond(most)) for most in (3, 0)] == [3, 0]
    pool.resize(6)
    assert sorted(pool.beyond(8)) == [6, 7]
    manager.resize(0, 6)
    shrunk(manager)
    assert (pool.take_vacated(), pool.num_slots) == (6, 6)


def test_a_tier_that_holds_less_in_the_same_pool_comes_to_an_end() -> None:
    """An engine without requests makes steps until then."""
    pool = SlotPool(8)
    manager = filled(pool, 8)
    manager.resize(0, 4)
    for _ in range(3):
        assert manager.shrink(64) == []
    assert manager.slots_kept() == 4 and not manager.is_shrinking


def moving() -> tuple[SlotPool, HostManager, list[SlotMove]]:
    """A pool of one slot of two, into which the block behind its end is to move."""
    pool = SlotPool(2)
    manager = filled(pool, 2)
    manager.discard(key(0))
    pool.resize(1)
    manager.resize(0, 1)
    return pool, manager, manager.shrink(64)


def test_a_hint_keeps_a_block_that_moves_meanwhile() -> None:
    pool, manager, (move,) = moving()
    assert (move.source, move.target) == (1, 0)
    manager.pin([key(1)])
    manager.moved([move], ())
    assert [pool.references(slot) for slot in (0, 1)] == [2, 0]
    assert pool.claim(b"another") is None, "it may not be evicted"
    manager.unpin([key(1)])
    assert pool.claim(b"another") is not None


@pytest.mark.parametrize("end", ["does not arrive", "is dropped", "is reset"])
def test_no_slot_stays_for_what_a_hint_kept_and_is_gone(end: str) -> None:
    pool, manager, moves = moving()
    manager.pin([key(1), key(9)])
    manager.pin([key(1)])
    if end == "is dropped":
        manager.drop([key(1)], b"")
    elif end == "is reset":
        manager.reset()
    manager.moved(moves, {0})
    shrunk(manager)
    assert pool.in_use == manager.slots_kept() == 0


def test_a_block_that_was_damaged_is_stored_anew_while_its_slot_is_still_read() -> None:
    """By a put of another tier, which has begun; else the damage would be admitted again."""
    pool = SlotPool(2)
    manager = HostManager(SlotResidency(pool, 2, LruEviction(2)), pool)
    first = pool.claim(b"key")
    assert first is not None and manager.complete_store(b"key", first.slot, True, None)
    manager.discard(b"key")
    again = pool.claim(b"key")
    assert again is not None and again.fresh and again.slot != first.slot
    assert manager.complete_store(b"key", again.slot, True, None)
    pool.release(first.slot)
    assert pool.find(b"key") == again.slot == manager.prepare_load([b"key"])[0]


def test_a_reset_while_a_block_moves_leaves_nothing() -> None:
    pool, manager, moves = moving()
    manager.reset()
    manager.moved(moves, ())
    manager.shrink(64)
    assert pool.in_use == 0 and pool.find(key(1)) is None


def test_a_reset_gives_slots_back_a_few_in_a_step_or_where_one_is_needed() -> None:
    """Of a million at once it would hold up the engine for a second."""
    pool, evicted, blocks = SlotPool(1000), list[bytes](), 1000
    manager = filled(pool, blocks)
    manager._on_evict = evicted.append
    (loading,) = manager.prepare_load([key(5)])
    manager.reset()
    assert pool.in_use == blocks, "none is given back in this call"
    assert manager.slots_kept() == 0
    assert manager.coverage(Lookup(), [key(7)], range(1)) == [False]
    manager.discard(key(7))
    assert pool.claim(b"new") == (0, True), "the first gives its slot"
    manager.complete_store(b"new", 0, stored=True, before=None)
    pool.release(0)
    in_use = []
    for _ in range(4):
        manager.shrink(64)
        assert not manager.is_shrinking, "no engine that idles makes steps for it"
        in_use.append(pool.in_use)
    assert in_use == [745, 489, 233, 2], f"{TRIMMED} in a step; the load has one of them yet"
    assert manager.coverage(Lookup(), [b"new"], range(1)) == [True]
    manager.complete_load([loading])
    assert pool.in_use == 1 and not evicted


@pytest.mark.parametrize("size", [3, 6, 12])
def test_slots_come_back_once(size: int) -> None:
    pool = SlotPool(6)
    manager = filled(pool, 6)
    for end in (2, 6, 1, size):
        pool.resize(end)
        manager.resize(0, end)
        if end != 6:  # the next change comes before this one is done
            shrunk(manager)
            pool.take_vacated()
    claims = [pool.claim(b"new%d" % number) for number in range(size + 1)]
    assert sorted(claim.slot for claim in claims if claim) == [*range(size)]
