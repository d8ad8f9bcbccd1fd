"""In which order each policy of the CPU tier gives blocks up."""

from __future__ import annotations

from tiers.cpu.eviction import ArcEviction, LruEviction
from tiers.cpu.residency import SlotResidency
from tiers.host.arc_queues import History
from tiers.host.slots import SlotPool


def key(number: int) -> bytes:
    return b"%d" % number


def use(pool: SlotPool, tier: SlotResidency, *numbers: int) -> None:
    """Use blocks one after the other: touch what is kept, store what is not."""
    for number in numbers:
        if tier.find(key(number)) is not None:
            tier.touch([key(number)])
            continue
        claim = pool.claim(key(number))
        assert claim is not None
        tier.admit(key(number), claim.slot)
        pool.release(claim.slot)


def kept(tier: SlotResidency, numbers: range) -> list[int]:
    return [number for number in numbers if tier.find(key(number)) is not None]


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    pool = SlotPool(8)
    tier = SlotResidency(pool, 3, LruEviction(3))
    use(pool, tier, 0, 1, 2, 0, 3)
    assert kept(tier, range(4)) == [0, 2, 3]


def test_lru_keeps_the_head_of_a_prefix_longer_than_its_tail() -> None:
    pool = SlotPool(4)
    tier = SlotResidency(pool, 4, LruEviction(4))
    use(pool, tier, *range(4))
    tier.touch([key(number) for number in range(4)])
    for count in (3, 2, 1):
        assert tier.evict_one()
        assert kept(tier, range(4)) == list(range(count))


def test_one_long_prompt_does_not_sweep_arc() -> None:
    for policy, survivors in ((LruEviction, 0), (ArcEviction, 10)):
        pool = SlotPool(41)
        tier = SlotResidency(pool, 40, policy(40))
        use(pool, tier, *range(10), *range(10))
        use(pool, tier, *range(100, 300))
        assert len(kept(tier, range(10))) == survivors, policy


def test_arc_gives_more_room_to_blocks_used_once_when_they_come_back() -> None:
    pool = SlotPool(9)
    tier = SlotResidency(pool, 8, ArcEviction(8))
    use(pool, tier, *range(8), *range(8))
    use(pool, tier, *range(100, 104))
    assert kept(tier, range(100, 104)) == [103], "all room is for blocks that were used again"
    use(pool, tier, 100, 101, 102)
    use(pool, tier, *range(200, 204))
    assert len(kept(tier, range(200, 204))) > 1


def test_evicted_keys_are_remembered_to_a_bound() -> None:
    gone = History[bytes](10)
    for number in range(100):
        gone.add(key(number))
    assert 5 <= len(gone) <= 10
    assert gone.take(key(99)) and not gone.take(key(99)) and not gone.take(key(0))
