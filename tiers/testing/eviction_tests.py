"""Tests of a store that is full: what it evicts, and what it says of its room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from unittest import SkipTest

from spec.offloading import StoreContext
from tiers.store import Counts, Measured, TierStore, Touch, capability
from tiers.testing.harness import StoreUnderTest, listed, make_key

ROOM = 96
"""Blocks of the store that a test fills, where the test gives more room than `MOST_ROOM`."""
MOST_ROOM = 256
LITTLE_ROOM = 24
_PREFIX = 8


class EvictionTests(StoreUnderTest):
    """A store that has a capacity, by `usage` or by the spec's field, is driven to full."""

    evicts_in_order = True
    """Whether the least recently used block is evicted first, and a prefix from its tail. False:
    which block goes is approximate, and only the bound is tested."""
    touch_seconds = 0.0
    """How long a touch may take until it counts."""

    def test_full_it_keeps_what_came_last(self) -> None:
        with self._small() as (store, room):
            prefixes = self._fill(store, room + room // 2)
            held = [listed(store.has(keys)) for keys in prefixes]
            count = sum(map(sum, held))
            assert count <= room, f"{count} blocks are held in the room of {room}"
            assert count > room // 2, f"{count} blocks are left in the room of {room}"
            self._check_counts(store, count, sum(map(len, prefixes)))
            if self.evicts_in_order:
                last = room // 4 // _PREFIX
                assert all(map(all, held[-last:])), "blocks put last were evicted"

    def _check_counts(self, store: TierStore, held: int, put: int) -> None:
        if (measured := capability(store, Measured)) is not None:
            usage = measured.usage()
            assert usage.blocks == held, f"{held} blocks are held, and usage says {usage.blocks}"
            least = held * self.payload_bytes // 2
            assert usage.used >= least, f"{held} blocks are held, and usage says {usage.used} bytes"
        if (counts := capability(store, Counts)) is not None:
            evicted = counts.counts().evicted
            assert evicted == put - held, f"{put - held} were evicted, and counts says {evicted}"

    def test_a_prefix_is_evicted_from_its_tail(self) -> None:
        self.claimed("evicts_in_order")
        with self._small() as (store, room):
            prefixes = self._fill(store, room + _PREFIX)
            for _ in range(_PREFIX + 1):
                self.put(store, [make_key()])
                self._check_tails(store, prefixes)

    def test_what_is_loaded_outlives_others_and_goes_from_its_tail(self) -> None:
        self.claimed("evicts_in_order")

        def load(store: TierStore, keys: Sequence[bytes]) -> None:
            assert self.hits(store, keys) == [True] * len(keys)

        self._outlives(load)

    def test_what_is_touched_outlives_others_and_goes_from_its_tail(self) -> None:
        self.claimed("evicts_in_order")
        with self.opened() as store:
            self.having(store, Touch)

        def touch(store: TierStore, keys: Sequence[bytes]) -> None:
            self.having(store, Touch).touch(keys)
            time.sleep(self.touch_seconds)

        self._outlives(touch)

    def _outlives(self, use: Callable[[TierStore, Sequence[bytes]], None]) -> None:
        with self._small() as (store, room):
            # As many as are held when it is full: its capacity may count more than payloads.
            filled = self._fill(store, room + _PREFIX)
            held = sum(sum(listed(store.has(keys))) for keys in filled)
            used = next(keys for keys in filled if all(listed(store.has(keys))))
            for others in (held // 2 // _PREFIX, (held - _PREFIX) // _PREFIX - 1):
                use(store, used)
                for _ in range(others):
                    self.put(store, [make_key() for _ in range(_PREFIX)])
                assert listed(store.has(used)) == [True] * _PREFIX, "blocks in use were evicted"
            for _ in range(2 * _PREFIX):  # they are the oldest now
                self.put(store, [make_key() for _ in range(3)])
                self._check_tails(store, [used])

    def _check_tails(self, store: TierStore, prefixes: Sequence[Sequence[bytes]]) -> None:
        for keys in prefixes:
            held = listed(store.has(keys))
            assert held == sorted(held, reverse=True), (
                f"of a prefix were evicted others than its tail (held: {held})"
            )

    def test_a_batch_with_less_room_than_it_needs(self) -> None:
        with self._of_room(LITTLE_ROOM) as store:
            for _ in range(2):
                stored = self.put_what_has_room(store)
                if self.evicts_in_order:
                    assert stored == sorted(stored, reverse=True), "a prefix is kept from its head"

    def test_puts_are_counted(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened_having(Counts) as (store, counts):
            before = counts.counts()
            self.put(store, keys)
            assert counts.counts().renewed == before.renewed, "new blocks count as renewed"
            self.put(store, keys)
            assert counts.counts().renewed == before.renewed + 4, "renewed blocks are not counted"

    def _fill(self, store: TierStore, blocks: int) -> list[list[bytes]]:
        """Put this many blocks, a prefix in each call; what `usage` says stays within its bound."""
        prefixes = []
        measured = capability(store, Measured)
        for _ in range(0, blocks, _PREFIX):
            prefixes.append([make_key() for _ in range(_PREFIX)])
            self.put(store, prefixes[-1])
            usage = None if measured is None else measured.usage()
            if usage is not None and usage.capacity is not None:
                assert usage.used <= usage.capacity, f"beyond the capacity: {usage}"
        return prefixes

    @contextmanager
    def _small(self) -> Iterator[tuple[TierStore, int]]:
        """A store with room for few blocks, and for how many; skips where it has no bound."""
        with self.opened() as store:
            room = self._room_of(store)
            if room <= MOST_ROOM:
                yield store, room
                return
        try:
            with self._of_room(ROOM) as store:
                yield store, min(ROOM, self._room_of(store))
        except SkipTest:
            raise AssertionError(
                f"the test gives the store room for {room} blocks, too many to try what it "
                f"evicts: let `open_store` give it room for 64 to {MOST_ROOM}"
            ) from None

    def put_what_has_room(self, store: TierStore) -> list[bool]:
        """Put 64 blocks at once; which of them are held now, as `put` says."""
        keys = [make_key() for _ in range(64)]
        stored = self.put_some(store, keys)
        assert listed(store.has(keys)) == stored, "put says True for what it evicted"
        assert any(stored), "room is made for what is new"
        assert self.hits(store, keys) == stored
        return stored

    def _of_room(self, blocks: int) -> closing[TierStore]:
        """The store with another capacity; skips where the spec has none."""
        spec = self.make_spec()
        if "capacity" not in type(spec).model_fields:
            raise SkipTest(f"{type(spec).__name__} has no field capacity")
        changed = spec.model_copy(update={"capacity": blocks * self.payload_bytes})
        return closing(changed.open(StoreContext(self.payload_bytes)))

    def _room_of(self, store: TierStore) -> int:
        """How many blocks the store has room for at most, by what it says."""
        measured = capability(store, Measured)
        known = None if measured is None else measured.usage().capacity
        if known is None:
            known = self.make_spec().capacity_bytes
        if not known:
            raise SkipTest(f"{type(store).__name__} has no capacity that is known")
        return known // self.payload_bytes
