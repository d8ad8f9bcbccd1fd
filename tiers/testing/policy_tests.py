"""Tests of policies: whatever they decide, no block in use goes, and what they keep has a bound."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import accumulate
from unittest import SkipTest

from spec.policies import AdmissionPolicy, EvictionPolicy
from tiers.cpu.eviction import LruEviction
from tiers.cpu.residency import SlotResidency
from tiers.guarded_policies import queue_of, with_queues, within
from tiers.host.slots import SlotPool

ROOM = 48
"""Blocks of the tier that most tests fill."""
_PREFIX = 8
_BYTES_A_BLOCK = 4096
"""What a policy may keep for each block that fits its tier."""


class _Tier:
    """A cpu tier of `room` blocks under a policy whose every answer is checked."""

    def __init__(self, policy: EvictionPolicy, room: int) -> None:
        # Twice the room: the tier is what is full, not the pool.
        self.pool = SlotPool(2 * room)
        self.tier = SlotResidency(self.pool, room, _Checked(policy))
        self.hits = self.asked = 0

    def use(self, *numbers: int) -> None:
        """Use a prompt's blocks, and store those that are missing as an engine does: the last one
        first, before the one that precedes them."""
        keys = [_key(number) for number in numbers]
        found = self.tier.touch(keys)
        self.asked += len(keys)
        self.hits += sum(slot is not None for slot in found)
        for place in reversed(range(len(keys))):
            if found[place] is not None:
                continue
            claim = self.pool.claim(keys[place])
            assert claim is not None
            before = [self.tier.find(key) for key in keys[:place]]
            held = next((slot for slot in reversed(before) if slot is not None), None)
            self.tier.admit(keys[place], claim.slot, held)
            self.pool.release(claim.slot)

    def holds(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.tier.find(_key(number)) is not None]


class _Checked(EvictionPolicy):
    """A policy whose wrong answers are errors, as those that end a policy beside an engine."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = with_queues(policy)
        self.queues = policy.queues  # type: ignore[misc]

    def resize(self, capacity: int) -> None:
        self.policy.resize(capacity)

    def enter(self, key: bytes) -> int:
        return within(self.queues, self.policy.enter(key))

    def used(self, queue: int) -> int:
        return within(self.queues, self.policy.used(queue))

    def next(self, lengths: Sequence[int]) -> int:
        return queue_of(lengths, self.policy.next(lengths))

    def evicted(self, key: bytes, queue: int) -> None:
        self.policy.evicted(key, queue)


class EvictionContract:
    """Subclass it, and let `make_policy` return yours for a tier of so many blocks."""

    make_policy: Callable[[int], EvictionPolicy]
    hits_beside_lru = 0.5
    """How many hits it has at least for each of `lru`, where a few of many prompts come often."""
    hits_in_phases = 0.5
    """The same where what comes often, what comes at once again, and what comes again later take
    turns. Of a policy that is made for more, write what it has: then the kit notices if it loses
    that."""

    def _tier(self, room: int = ROOM) -> _Tier:
        return _Tier(self.make_policy(room), room)

    def test_a_full_tier_stays_full_and_no_fuller(self) -> None:
        tier = self._tier()
        for prompt in _prompts(400, seed=1):
            tier.use(*prompt)
            assert len(tier.tier) <= ROOM
        assert len(tier.tier) > ROOM - _PREFIX

    def test_every_queue_empties(self) -> None:
        tier = self._tier()
        for prompt in _prompts(60, seed=2):
            tier.use(*prompt)
        held = len(tier.tier)
        assert [tier.tier.evict_one() for _ in range(held)] == [True] * held
        assert not tier.tier.evict_one()

    def test_a_prefix_goes_from_its_tail(self) -> None:
        tier = self._tier()
        tier.use(*range(_PREFIX))
        for count in range(_PREFIX, 0, -1):
            assert tier.holds(*range(_PREFIX)) == list(range(count))
            tier.tier.evict_one()

    def test_blocks_in_use_stay(self) -> None:
        tier = self._tier()
        tier.use(*range(_PREFIX))
        loading = [tier.pool.claim(_key(number)) for number in range(_PREFIX)]
        for start in range(100, 100 + 4 * ROOM, _PREFIX):
            tier.use(*range(start, start + _PREFIX))
        assert tier.holds(*range(_PREFIX)) == list(range(_PREFIX))
        for claim in loading:
            assert claim is not None
            tier.pool.release(claim.slot)

    def test_what_is_used_again_and_again_outlives_what_came_once(self) -> None:
        tier = self._tier()
        for start in range(1000, 1000 + 20 * ROOM, _PREFIX):
            tier.use(*range(_PREFIX))
            tier.use(*range(start, start + _PREFIX))
        assert tier.holds(*range(_PREFIX)) == list(range(_PREFIX))

    def test_it_serves_as_much_as_it_should_of_what_lru_does(self) -> None:
        self._compare(_prompts(3000, seed=3), self.hits_beside_lru)

    def test_it_serves_as_much_as_it_should_where_traffic_changes(self) -> None:
        self._compare(_phases(3000, seed=5), self.hits_in_phases)

    def _compare(self, prompts: Sequence[Sequence[int]], least: float) -> None:
        mine, lru = self._tier(), _Tier(LruEviction(ROOM), ROOM)
        for prompt in prompts:
            mine.use(*prompt)
            lru.use(*prompt)
        share = mine.hits / lru.hits
        assert share >= least, f"{mine.hits} hits of {mine.asked}; lru has {lru.hits}: {share:.3f}"

    def test_another_size_is_followed(self) -> None:
        tier = self._tier()
        for seed, room in enumerate((ROOM // 3, 2 * ROOM, 1, ROOM)):
            tier.pool.resize(2 * room)
            tier.tier.resize(room)
            while tier.tier.trim(ROOM):
                pass
            for prompt in _prompts(60, seed):
                tier.use(*prompt)
                assert len(tier.tier) <= room

    def test_what_it_keeps_of_evicted_blocks_has_a_bound(self) -> None:
        self._check_memory(_Checked(self.make_policy(ROOM)))

    def test_made_smaller_it_keeps_less(self) -> None:
        policy = _Checked(self.make_policy(1000 * ROOM))
        policy.resize(ROOM)
        self._check_memory(policy)

    def _check_memory(self, policy: EvictionPolicy) -> None:
        def pass_through(numbers: range) -> None:
            for number in numbers:
                queue = policy.enter(_key(number))
                policy.evicted(_key(number), queue)

        pass_through(range(4 * ROOM))
        tracemalloc.start()
        try:
            pass_through(range(4 * ROOM, 500 * ROOM))
            assert tracemalloc.get_traced_memory()[0] < ROOM * _BYTES_A_BLOCK
        finally:
            tracemalloc.stop()


class AdmissionContract:
    """Subclass it, and let `make_policy` return yours for a `store_threshold`."""

    make_policy: Callable[[int], AdmissionPolicy]
    most_keys = 1 << 16
    """Keys of which it remembers something, at most."""
    counts_requests = False
    """Whether it admits a block from as many requests on as the threshold is, and counts anew once
    it was stored. `most_keys` is then how many it counts, of which it forgets the oldest."""

    def test_it_answers_true_or_false(self) -> None:
        for threshold in (1, 2, 1000):
            policy = self.make_policy(threshold)
            assert policy.threshold == threshold
            for number in range(50):
                assert isinstance(policy.admits(_key(number % 20)), bool)
                policy.stored(_key(number % 30))

    def test_what_is_asked_for_again_and_again_is_stored_in_the_end(self) -> None:
        policy = self.make_policy(2)
        assert any(policy.admits(_key(1)) for _ in range(1000))

    def test_a_threshold_may_change(self) -> None:
        policy = self.make_policy(1000)
        policy.admits(_key(1))
        policy.threshold = 1
        assert any(policy.admits(_key(1)) for _ in range(1000))

    def test_it_counts_requests(self) -> None:
        self._counting()
        for threshold in (1, 2, 5):
            policy = self.make_policy(threshold)
            for _ in range(2):
                for count in range(1, threshold + 2):
                    answers = [policy.admits(_key(number)) for number in range(3)]
                    assert answers == [count >= threshold] * 3, f"request {count} of {threshold}"
                for number in range(3):
                    policy.stored(_key(number))
        policy.threshold = 2
        assert [policy.admits(_key(9)) for _ in range(3)] == [False, True, True]

    def test_it_forgets_the_oldest_count(self) -> None:
        self._counting()
        policy = self.make_policy(3)

        def others(first: int) -> None:
            for number in range(first, first + self.most_keys - 1):
                policy.admits(_key(number))

        policy.admits(_key(0))
        others(1)
        assert not policy.admits(_key(0)), "two requests are three"
        others(self.most_keys)
        assert policy.admits(_key(0)), "a count is forgotten that was asked for later than others"
        others(2 * self.most_keys)
        policy.admits(_key(10 * self.most_keys))
        assert not policy.admits(_key(0)), "the oldest count is not forgotten"

    def _counting(self) -> None:
        if not self.counts_requests:
            raise SkipTest(f"{type(self).__name__}.counts_requests is False")

    def test_what_it_keeps_of_keys_has_a_bound(self) -> None:
        policy, many = self.make_policy(2), self.most_keys

        def ask(numbers: range) -> int:
            for number in numbers:
                policy.admits(_key(number))
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before, after = ask(range(many)), ask(range(many, 3 * many))
        finally:
            tracemalloc.stop()
        assert after < 2 * before + 4096, f"{before} bytes for {many} keys, {after} for three times"


def _key(number: int) -> bytes:
    return number.to_bytes(24, "big")


def _phases(count: int, seed: int) -> list[list[int]]:
    """Prompts of six blocks in six phases of three kinds."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, 13)))
    prompts = []
    for number in range(count):
        phase, place = divmod(number, count // 6)
        if phase % 3 == 0:  # a few come often, beside many that come once
            often = rng.random() < 0.6
            one = rng.choices(range(12), cum_weights=weights)[0] if often else 100 + number
        elif phase % 3 == 1:  # each comes three times, one after the other
            one = (1000 + phase) * 1000 + place // 3
        else:  # each comes twice, the second time when it was evicted
            one = (1000 + phase) * 1000 + place // 20 * 10 + place % 10
        prompts.append([1000 * one + block for block in range(6)])
    return prompts


def _prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of up to `_PREFIX` blocks, a few of which come very often (Zipf's law)."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, 201)))
    chosen = rng.choices(range(200), cum_weights=weights, k=count)
    return [[1000 * one + place for place in range(rng.randint(1, _PREFIX))] for one in chosen]
