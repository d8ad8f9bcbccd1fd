"""What holds of every eviction policy: what stays, what goes, and what must never go."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable

import pytest

from tiers.cpu.residency import SlotQueues, SlotResidency
from tiers.cpu.spec import CpuSpec
from tiers.host.slots import SlotPool

QUEUES = (1, 2, 3)


def order(queues: SlotQueues, queue: int) -> list[int]:
    """The slots of a queue, the one that is longest in it first."""
    left, slots = queues.lengths[queue], []
    copy = [slot for slot in queues.slots() if queues.where[slot] == queue]
    assert left == len(copy)
    while left:
        slots.append(queues.first(queue))
        queues.remove(slots[-1])
        left -= 1
    for slot in slots:
        queues.append(slot, queue)
    assert sorted(slots) == copy
    return slots


def test_slots_that_move_together_are_in_the_order_of_moving_them_one_by_one() -> None:
    """In runs of neighbours or not, of one queue or several, some of them twice."""
    rng = random.Random(1)
    for _ in range(400):
        num_slots = rng.randint(1, 12)
        together, single = (SlotQueues(num_slots, len(QUEUES)) for _ in range(2))
        for slot in range(num_slots):
            for queues in (together, single):
                queues.append(slot, 1 + slot % 3 * (num_slots % 2))
        for _ in range(20):
            line = order(together, together.where[rng.randrange(num_slots)])
            start = rng.randrange(len(line))
            slots = line[start : start + rng.randint(0, 6)]
            slots += rng.choices(range(num_slots), k=rng.randint(0, 3))
            queue = rng.choice(QUEUES)
            together.move_all(slots, queue)
            for slot in slots:
                single.move(slot, queue)
            assert [order(together, one) for one in QUEUES] == [
                order(single, one) for one in QUEUES
            ]
            assert together.where == single.where


@pytest.mark.parametrize("more", range(6))
def test_queues_that_grow_keep_their_order(more: int) -> None:
    queues = SlotQueues(9, len(QUEUES))
    for slot in range(8, -1, -1):
        queues.append(slot, 1 + slot % 2)
    queues.grow(9 + more)
    queues.grow(5)
    for slot in range(9, 9 + more):
        queues.append(slot, 1 + slot % 2)
    whole = [*range(8, -1, -1), *range(9, 9 + more)]
    assert order(queues, 1) == [slot for slot in whole if slot % 2 == 0]
    assert order(queues, 2) == [slot for slot in whole if slot % 2]
    assert order(queues, 3) == []


Open = Callable[[SlotPool, int], SlotResidency]


def key(number: int) -> bytes:
    return b"%d" % number


def store(pool: SlotPool, tier: SlotResidency, *numbers: int) -> None:
    """Take blocks through a store: claimed, gathered, perhaps kept, let go."""
    for number in numbers:
        claim = pool.claim(key(number))
        assert claim is not None
        tier.admit(key(number), claim.slot)
        pool.release(claim.slot)


def store_before(pool: SlotPool, tier: SlotResidency, number: int, head: int | None) -> None:
    """Take a block through a store that is of no use without the one in slot `head`."""
    claim = pool.claim(key(number))
    assert claim is not None
    tier.admit(key(number), claim.slot, head)
    pool.release(claim.slot)


def load(pool: SlotPool, tier: SlotResidency, number: int) -> int:
    """Begin to load a block: its slot is pinned."""
    slot = tier.find(key(number))
    assert slot is not None
    pool.retain(slot)
    return slot


def kept(tier: SlotResidency, numbers: range) -> list[int]:
    return [number for number in numbers if tier.find(key(number)) is not None]


def test_a_kept_block_is_found_in_its_slot_and_another_is_not(open_tier: Open) -> None:
    pool = SlotPool(4)
    tier = open_tier(pool, 4)
    store(pool, tier, 1)
    slot = pool.find(key(1))
    assert tier.find_all([key(2), key(1)]) == [None, slot]
    assert slot is not None and (len(tier), pool.references(slot)) == (1, 1)


def test_a_block_on_its_way_is_not_kept_yet(open_tier: Open) -> None:
    pool = SlotPool(4)
    tier = open_tier(pool, 4)
    assert pool.claim(key(1)) is not None
    assert tier.find(key(1)) is None and len(tier) == 0


def test_the_capacity_is_kept_by_evicting_which_is_told(open_tier: Open) -> None:
    pool = SlotPool(8)
    tier = open_tier(pool, 3)
    gone: list[bytes] = []
    tier.on_evict = gone.append
    store(pool, tier, *range(20))
    assert (len(tier), pool.in_use) == (3, 3)
    assert sorted(gone, key=int) == [key(n) for n in range(20) if n not in kept(tier, range(20))]


def test_a_block_that_is_used_again_and_again_outlives_others(open_tier: Open) -> None:
    pool = SlotPool(9)
    tier = open_tier(pool, 8)
    store(pool, tier, 0)
    for number in range(1, 100):
        tier.touch([key(0), b"unknown"])
        store(pool, tier, number)
    assert tier.find(key(0)) is not None


def test_a_pool_without_a_free_slot_takes_one_from_the_tier(open_tier: Open) -> None:
    pool = SlotPool(2)
    tier = open_tier(pool, 2)
    store(pool, tier, 0, 1)
    claim = pool.claim(key(2))
    assert claim is not None and claim.fresh
    assert kept(tier, range(3)) == [1]


def test_a_block_that_is_being_copied_is_never_evicted(open_tier: Open) -> None:
    pool = SlotPool(2)
    tier = open_tier(pool, 2)
    store(pool, tier, 0, 1)
    loading = load(pool, tier, 0)
    assert tier.evict_one()
    assert kept(tier, range(2)) == [0]
    assert not tier.evict_one() and pool.references(loading) == 2
    pool.release(loading)
    assert tier.evict_one() and pool.in_use == 0


def test_a_full_tier_whose_blocks_are_all_in_use_takes_no_more(open_tier: Open) -> None:
    pool = SlotPool(4)
    tier = open_tier(pool, 1)
    store(pool, tier, 0)
    load(pool, tier, 0)
    store(pool, tier, 1)
    assert kept(tier, range(2)) == [0] and pool.in_use == 1


def test_blocks_in_use_hide_the_others_only_for_a_while(open_tier: Open) -> None:
    many = 3 * SlotResidency.SCAN
    pool = SlotPool(many)
    tier = open_tier(pool, many)
    store(pool, tier, *range(many))
    for number in range(2 * SlotResidency.SCAN):
        load(pool, tier, number)
    assert any(tier.evict_one() for _ in range(4))
    assert len(kept(tier, range(2 * SlotResidency.SCAN))) == 2 * SlotResidency.SCAN


def test_a_block_in_use_keeps_its_place(open_tier: Open) -> None:
    """What was passed by goes next, as soon as it is in use no more, unless it was used again."""
    pool = SlotPool(8)
    tier = open_tier(pool, 8)
    gone: list[bytes] = []
    tier.on_evict = gone.append
    store(pool, tier, *range(8))
    loading = [load(pool, tier, number) for number in (0, 1, 2)]
    assert tier.evict_one() and gone == [key(3)]
    tier.touch([key(1)])
    for slot in loading:
        pool.release(slot)
    assert tier.evict_one() and tier.evict_one()
    assert gone == [key(3), key(0), key(2)]


def test_an_overdue_block_in_use_again_is_passed_by_again(open_tier: Open) -> None:
    pool = SlotPool(4)
    tier = open_tier(pool, 4)
    store(pool, tier, *range(4))
    slot = load(pool, tier, 0)
    assert tier.evict_one() and kept(tier, range(4)) == [0, 2, 3]
    pool.release(slot)
    load(pool, tier, 0)
    assert tier.evict_one() and tier.evict_one() and not tier.evict_one()
    assert kept(tier, range(4)) == [0]
    pool.release(slot)
    assert tier.evict_one() and pool.in_use == 0


def test_a_discarded_block_gives_its_slot_back_once_its_readers_have(open_tier: Open) -> None:
    pool = SlotPool(2)
    tier = open_tier(pool, 2)
    store(pool, tier, 0)
    slot = load(pool, tier, 0)
    tier.discard(key(0))
    tier.discard(key(0))
    tier.discard(b"unknown")
    assert tier.find(key(0)) is None and pool.references(slot) == 1
    pool.release(slot)
    assert (pool.in_use, len(tier)) == (0, 0)


def test_clearing_gives_all_up(open_tier: Open) -> None:
    pool = SlotPool(4)
    tier = open_tier(pool, 4)
    store(pool, tier, 0, 1, 2)
    tier.touch([key(1)])
    slot = load(pool, tier, 2)
    tier.outdate()
    assert kept(tier, range(3)) == [] and tier.trim(9) == 3
    assert (len(tier), pool.in_use) == (0, 1)
    pool.release(slot)
    store(pool, tier, 2)
    assert kept(tier, range(3)) == [2]


def test_resets_of_a_tier_that_keeps_nothing_leave_nothing_to_do(open_tier: Open) -> None:
    """No step comes between those of an engine that idles, which would give slots back."""
    tier = open_tier(SlotPool(4), 4)
    before = tier._outdated
    for _ in range(3):
        tier.outdate()
    assert tier._outdated is before


def test_admitting_a_kept_block_again_holds_no_second_reference(open_tier: Open) -> None:
    pool = SlotPool(2)
    tier = open_tier(pool, 2)
    store(pool, tier, 0, 0)
    tier.discard(key(0))
    assert pool.in_use == 0


def test_a_slot_that_was_parted_from_its_key_is_not_kept(open_tier: Open) -> None:
    pool = SlotPool(2)
    tier = open_tier(pool, 2)
    claim = pool.claim(key(0))
    assert claim is not None
    pool.forget(claim.slot)
    tier.admit(key(0), claim.slot)
    assert tier.find(key(0)) is None
    pool.release(claim.slot)
    assert pool.in_use == 0


def test_two_tiers_of_one_pool_keep_apart_what_they_keep(open_tier: Open) -> None:
    pool = SlotPool(4)
    one, other = open_tier(pool, 2), open_tier(pool, 2)
    store(pool, one, 0)
    store(pool, other, 0, 1)
    one.discard(key(0))
    assert (kept(one, range(2)), kept(other, range(2))) == ([], [0, 1])
    assert pool.in_use == 2


def test_blocks_are_nothing_to_the_garbage_collector(open_tier: Open) -> None:
    """Or with a million of them each of its full collections would stop the engine."""
    pool = SlotPool(3000)
    tier = open_tier(pool, 1000)
    gc.collect()  # else what was garbage before hides what is kept
    before = len(gc.get_objects())
    store(pool, tier, *range(5000))
    gc.collect()
    assert len(gc.get_objects()) < before + 100
    inside = [*vars(pool).values(), *vars(tier).values(), *vars(tier._queues).values()]
    large = [one for one in inside if hasattr(one, "__len__") and one is not tier._queues]
    large = [one for one in large if len(one) >= 1000]
    assert large
    if sys.version_info >= (3, 14):  # which looks through each dict
        large = [one for one in large if not isinstance(one, dict)]
    assert all(not gc.is_tracked(one) or len(gc.get_referents(one)) < 10 for one in large)


@pytest.mark.parametrize("unknown", ["fifo", "LRU", ""])
def test_other_policies_are_refused(unknown: str) -> None:
    with pytest.raises(ValueError, match="eviction"):
        CpuSpec.model_validate({"capacity": 1, "eviction": unknown})


def test_a_block_goes_before_the_one_that_it_depends_on(open_tier: Open) -> None:
    pool = SlotPool(16)
    tier = open_tier(pool, 16)
    store(pool, tier, 0, 1)
    head = tier.find(key(0))
    for number in (2, 3):
        store_before(pool, tier, number, head)
    for left in ([0, 1, 3], [0, 1], [1]):
        assert tier.evict_one()
        assert kept(tier, range(4)) == left


def test_a_block_whose_head_would_go_for_it_is_not_kept(open_tier: Open) -> None:
    """Also where the head is next behind one that is being copied."""
    pool = SlotPool(8)
    tier = open_tier(pool, 3)
    store(pool, tier, 0, 1, 2)
    load(pool, tier, 0)
    store_before(pool, tier, 3, tier.find(key(1)))
    assert kept(tier, range(4)) == [0, 1, 2] and pool.in_use == 3
    store_before(pool, tier, 4, tier.find(key(2)))
    assert kept(tier, range(5)) == [0, 2, 4]
