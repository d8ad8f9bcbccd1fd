"""LruResidency: what stays in the pool, what goes first, and what must never go."""

from __future__ import annotations

from tiers.cpu.lru import LruResidency
from tiers.cpu.spec import CpuSpec
from tiers.pool import SlotPool


def key(number: int) -> bytes:
    return b"%d" % number


def store(pool: SlotPool, lru: LruResidency, number: int) -> None:
    """Take a block through a store: claimed, gathered, perhaps kept, let go."""
    claim = pool.claim(key(number))
    assert claim is not None
    lru.admit(key(number), claim.slot)
    pool.release(claim.slot)


def kept(lru: LruResidency, numbers: range) -> list[int]:
    return [number for number in numbers if lru.find(key(number)) is not None]


def test_a_kept_block_is_found_in_its_slot_and_another_is_not() -> None:
    pool = SlotPool(4)
    lru = LruResidency(pool, 4)
    claim = pool.claim(key(1))
    assert claim is not None
    lru.admit(key(1), claim.slot)
    pool.release(claim.slot)
    assert lru.find(key(1)) == claim.slot and lru.find(key(2)) is None
    assert (len(lru), pool.in_use, pool.references(claim.slot)) == (1, 1, 1)


def test_the_capacity_is_kept_by_evicting_what_was_used_longest_ago() -> None:
    pool = SlotPool(8)
    lru = LruResidency(pool, 3)
    for number in range(3):
        store(pool, lru, number)
    lru.touch([key(0)])
    store(pool, lru, 3)
    assert kept(lru, range(4)) == [0, 2, 3]
    assert (len(lru), pool.in_use) == (3, 3)


def test_the_head_of_a_prefix_outlives_its_tail() -> None:
    pool = SlotPool(4)
    lru = LruResidency(pool, 4)
    for number in range(4):
        store(pool, lru, number)
    lru.touch([key(number) for number in range(4)])
    for count in (3, 2, 1):
        assert lru.evict_one()
        assert kept(lru, range(4)) == list(range(count))


def test_a_pool_without_a_free_slot_takes_one_from_the_tier() -> None:
    pool = SlotPool(2)
    lru = LruResidency(pool, 2)
    store(pool, lru, 0)
    store(pool, lru, 1)
    claim = pool.claim(key(2))
    assert claim is not None and claim.fresh
    assert kept(lru, range(3)) == [1]


def test_a_block_that_is_being_copied_is_never_evicted() -> None:
    pool = SlotPool(2)
    lru = LruResidency(pool, 2)
    store(pool, lru, 0)
    store(pool, lru, 1)
    loading = lru.find(key(0))
    assert loading is not None
    pool.retain(loading)
    assert lru.evict_one()
    assert kept(lru, range(2)) == [0]
    assert not lru.evict_one() and pool.references(loading) == 2
    pool.release(loading)
    assert lru.evict_one() and pool.in_use == 0


def test_a_full_tier_whose_blocks_are_all_in_use_takes_no_more() -> None:
    pool = SlotPool(4)
    lru = LruResidency(pool, 1)
    store(pool, lru, 0)
    loading = lru.find(key(0))
    assert loading is not None
    pool.retain(loading)
    store(pool, lru, 1)
    assert kept(lru, range(2)) == [0] and pool.in_use == 1


def test_blocks_in_use_hide_the_others_only_for_a_while() -> None:
    pool = SlotPool(3 * LruResidency.SCAN)
    lru = LruResidency(pool, 3 * LruResidency.SCAN)
    for number in range(3 * LruResidency.SCAN):
        store(pool, lru, number)
    for number in range(2 * LruResidency.SCAN):
        slot = lru.find(key(number))
        assert slot is not None
        pool.retain(slot)
    assert [lru.evict_one() for _ in range(3)] == [False, False, True]
    assert lru.find(key(2 * LruResidency.SCAN)) is None


def test_a_discarded_block_gives_its_slot_back_once_its_readers_have() -> None:
    pool = SlotPool(2)
    lru = LruResidency(pool, 2)
    store(pool, lru, 0)
    slot = lru.find(key(0))
    assert slot is not None
    pool.retain(slot)
    lru.discard(key(0))
    lru.discard(key(0))
    lru.discard(b"unknown")
    assert lru.find(key(0)) is None and pool.references(slot) == 1
    pool.release(slot)
    assert (pool.in_use, len(lru)) == (0, 0)


def test_admitting_a_kept_block_again_holds_no_second_reference() -> None:
    pool = SlotPool(2)
    lru = LruResidency(pool, 2)
    store(pool, lru, 0)
    store(pool, lru, 0)
    lru.discard(key(0))
    assert pool.in_use == 0


def test_the_spec_opens_it() -> None:
    pool = SlotPool(2)
    lru = CpuSpec(capacity=1).residency(pool, 1)
    store(pool, lru, 0)
    store(pool, lru, 1)
    assert kept(lru, range(2)) == [1]
