"""Tests of what a store's author claims, and of the capabilities that the store has."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import SkipTest

from spec.offloading import StoreContext, StoreSpec
from tiers.block import NAMESPACE_BYTES
from tiers.errors import TierUnavailable
from tiers.store import Clear, Damages, LocalIndex, Measured, Touch
from tiers.testing.caller_memory import Memory, make_key
from tiers.testing.harness import StoreUnderTest, listed
from tiers.trial import find_lie


def _found(spec: StoreSpec, payload_bytes: int, keys: Sequence[bytes]) -> list[bool]:
    """Say which of these keys a store that is opened in this process has and loads."""
    store = spec.open(StoreContext(payload_bytes))
    memory = Memory(keys, payload_bytes)
    has, got = store.has(keys), store.get(memory.blocks)
    store.close()
    right = [memory.holds(index) for index in range(len(keys))]
    return [all(one) for one in zip(has, got, right, strict=True)]


class ClaimTests(StoreUnderTest):
    """A test of a claim or capability that the store has not is skipped, by its name."""

    def test_two_open_stores_see_each_other(self) -> None:
        self.claimed("shared")
        keys = [make_key() for _ in range(4)]
        with self.opened() as one, self.opened() as other:
            self.put(one, keys)
            assert listed(other.has(keys)) == [True] * 4
            assert self.hits(other, keys) == [True] * 4
            other.drop(keys[:1])
            assert self.hits(one, keys) == [False, True, True, True]

    def test_another_process_sees_what_was_put(self) -> None:
        """An engine's scheduler and its workers are such processes."""
        self.claimed("shared")
        spec, keys = self.make_spec(), [make_key() for _ in range(4)]
        context = multiprocessing.get_context("spawn")
        with self.opened() as store, context.Pool(1) as other:
            self.put(store, keys)
            held = other.apply(_found, (spec, self.payload_bytes, keys))
        assert held == [True] * 4, "each process that opens the store must see the same blocks"

    def test_what_is_moved_is_apart_from_its_place(self) -> None:
        """Tools that try a tier move it by `scratch` first, or refuse it."""
        spec, keys = self.make_spec(), [make_key() for _ in range(4)]
        with self.opened() as store, TemporaryDirectory() as folder:
            moved = spec.scratch(Path(folder))
            if moved is None:
                raise SkipTest(f"{type(spec).__name__} has no scratch")
            self.put(store, keys)
            other = moved.open(StoreContext(self.payload_bytes))
            with suppress(TierUnavailable):  # the tool starts its server
                assert listed(other.has(keys)) == [False] * 4, "it sees the engines' blocks"
                other.drop(keys)
            other.close()
            assert listed(store.has(keys)) == [True] * 4

    def test_blocks_are_there_after_reopening(self) -> None:
        self.claimed("persistent")
        keys = [make_key() for _ in range(8)]
        with self.opened() as store:
            self.put(store, keys)
        with self.opened() as store:
            assert listed(store.has(keys)) == [True] * 8
            assert self.hits(store, keys) == [True] * 8

    def test_a_damaged_block_is_a_miss_and_spoils_no_other(self) -> None:
        self.claimed("verifies")
        keys = [make_key() for _ in range(3)]
        with self.opened() as store:
            self.put(store, keys)
            self.damage(store, keys[0])
            assert self.hits(store, keys) == [False, True, True]
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 3, "a damaged block can be put again"

    def test_no_damage_is_served(self) -> None:
        """Bits flipped, blocks swapped, cut off, and come back from before."""
        self.claimed("verifies")
        with self.opened() as store:
            lie = find_lie(store, self.medium(store), self.payload_bytes)
            assert lie is None, f"a block is served with {lie}"

    def test_the_spec_says_whether_it_verifies(self) -> None:
        said = self.make_spec().verifies
        assert said == bool(self.verifies), (
            f"the spec's verifies is {said}, {type(self).__name__}.verifies is {self.verifies}"
        )

    def test_damage_is_counted(self) -> None:
        self.claimed("verifies")
        keys = [make_key() for _ in range(3)]
        with self.opened() as store:
            damages = self.having(store, Damages)
            self.put(store, keys)
            before = damages.damaged()
            self.damage(store, keys[0])
            self.hits(store, keys)
            assert damages.damaged() > before

    def test_peek_agrees_with_has(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened() as store:
            index = self.having(store, LocalIndex)
            self.put(store, keys[:2])
            assert listed(index.peek(keys)) == [True, True, False, False]
            store.drop(keys[:1])
            assert listed(index.peek(keys)) == [False, True, False, False]

    def test_touch_changes_no_block(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened() as store:
            touch = self.having(store, Touch)
            self.put(store, keys[:2])
            touch.touch(keys)
            assert listed(store.has(keys)) == [True, True, False, False]
            assert self.hits(store, keys[:2]) == [True, True]

    def test_clear_empties_one_namespace_and_no_other(self) -> None:
        keys = [make_key() for _ in range(2)]
        with self.opened() as store:
            clear = self.having(store, Clear)
            self.put(store, keys)
            while clear.clear(keys[0][:NAMESPACE_BYTES]):
                pass
            assert listed(store.has(keys)) == [False, True]
            self.put(store, keys[:1])
            assert self.hits(store, keys) == [True, True]

    def test_no_more_is_held_than_the_capacity(self) -> None:
        with self.opened() as store:
            measured = self.having(store, Measured)
            for _ in range(4):
                self.put_some(store, [make_key() for _ in range(64)])
                usage = measured.usage()
                assert usage.blocks > 0 and usage.used > 0
                assert usage.capacity is None or usage.used <= usage.capacity

    def test_what_is_dropped_gives_its_room_back(self) -> None:
        keys = [make_key() for _ in range(8)]
        with self.opened() as store:
            measured = self.having(store, Measured)
            before = measured.usage()
            self.put(store, keys)
            during = measured.usage()
            assert during.blocks == before.blocks + 8
            assert during.used - before.used >= 8 * self.payload_bytes // 2
            store.drop(keys)
            assert measured.usage() == before
