"""The tests that every store must pass."""

from __future__ import annotations

import multiprocessing
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import SkipTest
from unittest.mock import patch

from spec.offloading import StoreContext, StoreSpec
from tiers.block import MAX_KEY_BYTES, NAMESPACE_BYTES
from tiers.errors import TierUnavailable, TierUnusable
from tiers.store import Clear, Damages, LocalIndex, Measured, Resizable, TierStore, Touch, each
from tiers.testing.eviction_tests import EvictionTests
from tiers.testing.harness import Memory, at_once, listed, make_key
from tiers.testing.memory_tests import ROUNDS, MemoryTests, check_left, counted
from tiers.testing.prefix_tests import PrefixTests
from tiers.testing.scale_tests import ScaleTests
from tiers.testing.time_tests import TimeTests
from tiers.testing.truth_tests import TruthTests


def _two(data: bytes) -> list[int]:
    """Two drawn places: with a bit flipped in both a sum is as it was, and a parity."""
    one, *others = secrets.SystemRandom().sample(range(len(data)), min(len(data), 32))
    return [one, next((at for at in others if (data[at] ^ data[one]) & 1), others[0])]


def _flipped(data: bytes, *places: int) -> bytes:
    flipped = bytearray(data)
    for place in places:
        flipped[place] ^= 1
    return bytes(flipped)


DAMAGES: Sequence[tuple[str, Callable[[bytes], bytes]]] = (
    ("a bit flipped at its start", lambda data: _flipped(data, 0)),
    ("a bit flipped at its end", lambda data: _flipped(data, len(data) - 1)),
    ("a bit flipped somewhere", lambda data: _flipped(data, secrets.randbelow(len(data)))),
    ("two bits flipped", lambda data: _flipped(data, *_two(data))),
    ("half of it cut off", lambda data: data[: len(data) // 2]),
)
"""What becomes of a stored block's bytes. Each round draws other places, so that in the end a
checksum of some of the bytes is found."""


def _found(spec: StoreSpec, payload_bytes: int, keys: Sequence[bytes]) -> list[bool]:
    """Return which of these keys a store that is opened in this process has and loads."""
    store = spec.open(StoreContext(payload_bytes))
    memory = Memory(keys, payload_bytes)
    has, got = store.has(keys), store.get(memory.blocks)
    store.close()
    right = [memory.holds(index) for index in range(len(keys))]
    return [all(answers) for answers in zip(has, got, right, strict=True)]


class StoreContract(EvictionTests, ScaleTests, MemoryTests, TruthTests, PrefixTests, TimeTests):
    """The tests that every TierStore must pass; set `shared`, `persistent` and `verifies`.

    Of the capabilities it tests LocalIndex, Touch, Clear, Counts, Measured, Resizable, Damages,
    Packs and PacksWindows.
    A test of a property that is not claimed is skipped, and names that property. One that has not
    ended after `limit_seconds` fails, and its thread is left behind.

    Each test opens the store one to some twenty times, and closes it also when the test fails. It
    opens no port, and writes nowhere but through the store, which needs room for 64 blocks of
    `payload_bytes` (4 MiB in all). Of a store with more room than 256 blocks the spec's `capacity`
    is lowered to see what it evicts. One test starts a second Python process: only where `shared`
    is True and `make_spec` is overridden. One forks this one. For a moment, one lets all files and
    sockets that Python code of this process uses fail.
    """

    def test_what_was_put_is_got(self) -> None:
        keys = [make_key() for _ in range(16)]
        with self.opened() as store:
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 16
            assert self.hits(store, keys[::-1]) == [True] * 16

    def test_an_unknown_key_is_a_miss(self) -> None:
        with self.opened() as store:
            assert listed(store.has([make_key()])) == [False]
            assert self.hits(store, [make_key()]) == [False]

    def test_nothing_asked_nothing_answered(self) -> None:
        with self.opened() as store:
            assert listed(store.has([])) == []
            assert list(store.put([])) == []
            assert list(store.get([])) == []
            store.drop([])

    def test_has_and_get_agree_on_a_mixed_batch(self) -> None:
        keys = [make_key() for _ in range(12)]
        held = [index % 3 != 1 for index in range(12)]
        with self.opened() as store:
            self.put(store, [key for key, here in zip(keys, held, strict=True) if here])
            assert listed(store.has(keys)) == held
            assert self.hits(store, keys) == held
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 12

    def test_a_key_twice_in_one_batch(self) -> None:
        key = make_key()
        with self.opened() as store:
            self.put(store, [key, key])
            assert self.hits(store, [key, make_key(), key]) == [True, False, True]
            assert listed(store.has([key, key])) == [True, True]

    def test_putting_a_key_again_is_harmless(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened() as store:
            self.put(store, keys)
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 4

    def test_other_bytes_under_a_key_never_mix(self) -> None:
        key = make_key()
        with self.opened() as store:
            self.put(store, [key], version=1)
            self.put(store, [key], version=2)
            memory = Memory([key], self.payload_bytes)
            assert list(store.get(memory.blocks)) == [True]
            assert memory.holds(0, version=1) or memory.holds(0, version=2)

    def test_what_is_dropped_is_gone_and_can_be_put_again(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened() as store:
            self.put(store, keys)
            store.drop([keys[1], make_key(), keys[1]])
            assert listed(store.has(keys)) == [True, False, True, True]
            assert self.hits(store, keys) == [True, False, True, True]
            self.put(store, [keys[1]], version=3)
            assert self.hits(store, [keys[1]], version=3) == [True]

    def test_keys_of_every_length_and_byte(self) -> None:
        lengths = range(NAMESPACE_BYTES + 1, MAX_KEY_BYTES + 1, 3)
        keys = [make_key(length) for length in lengths]
        space = make_key(NAMESPACE_BYTES)
        odd = [b"\0", b"\0\0", b"\xff" * 16, b"\r\n$5\r\n", b"../..", b"{a}:*?", b" \t"]
        keys += [space + tail for tail in odd]
        with self.opened() as store:
            for start in range(0, len(keys), 16):
                some = keys[start : start + 16]
                self.put(store, some)
                assert self.hits(store, some) == [True] * len(some)
                store.drop(some)
                assert listed(store.has(some)) == [False] * len(some)

    def test_a_key_is_not_its_own_beginning(self) -> None:
        whole = make_key(64)
        with self.opened() as store:
            self.put(store, [whole])
            other = make_key(NAMESPACE_BYTES) + whole[NAMESPACE_BYTES:]
            asked = [whole[:32], whole + b"\0", other, whole]
            assert self.hits(store, asked) == [False, False, False, True]

    def test_memory_of_any_alignment(self) -> None:
        with self.opened() as store:
            for shift in (0, 1, 3, 4095):
                key = make_key()
                memory = Memory([key], self.payload_bytes, shift).fill()
                assert self.stored(store, memory) == [True]
                assert self.got(store, Memory([key], self.payload_bytes, shift)) == [True]

    def test_odd_payload_lengths(self) -> None:
        refused = []
        for payload_bytes in (1, 511, 4097, (1 << 20) + 3):
            keys = [make_key() for _ in range(3)]
            try:
                with self.opened(payload_bytes) as store:
                    memory = Memory(keys, payload_bytes).fill()
                    assert self.stored(store, memory) == [True] * 3
                    assert self.got(store, Memory(keys, payload_bytes)) == [True] * 3
            except TierUnusable:  # a place may be bound to one length for good
                refused.append(payload_bytes)
        if refused:
            raise SkipTest(f"{type(self).__name__} refuses payloads of {refused} bytes")

    def test_memory_is_left_alone_after_a_call_that_found_no_thread(self) -> None:
        """What such a call has begun must not go on later, when the memory is another block's."""
        keys = [make_key() for _ in range(16)]
        with self.opened() as store:
            for key in keys:
                self.put(store, [key])
            memory = Memory(keys, self.payload_bytes)
            error = RuntimeError("can't start new thread")
            with patch.object(threading.Thread, "start", side_effect=error), suppress(Exception):
                store.get(memory.blocks)
            for block in memory.blocks:
                block.payload[:] = bytes(self.payload_bytes)
            for _ in range(4):
                assert self.hits(store, keys) == [True] * 16
            assert not any(any(block.payload) for block in memory.blocks), "written to later"

    def test_a_payload_of_another_length_is_never_served(self) -> None:
        key = make_key()
        with self.opened() as store:
            self.put(store, [key])
        for payload_bytes in (self.payload_bytes // 2, self.payload_bytes * 2):
            # To refuse the length is as good as a miss.
            with suppress(TierUnusable), self.opened(payload_bytes) as other:
                memory = Memory([key], payload_bytes)
                assert self.got(other, memory) == [False]
                before = counted()
                for _ in range(ROUNDS):
                    other.get(memory.blocks)
                check_left(before, "misses of another length")

    def test_many_threads_at_once(self) -> None:
        kept, dropped = ([make_key() for _ in range(12)] for _ in range(2))
        with self.opened() as store:
            chances = [random.Random(seed) for seed in range(6)]
            at_once([partial(self._use, store, kept, dropped, chance) for chance in chances])
            self.put(store, kept + dropped)
            assert self.hits(store, kept + dropped) == [True] * 24

    def _use(
        self, store: TierStore, kept: list[bytes], dropped: list[bytes], chance: random.Random
    ) -> None:
        """The work of one of many threads; only `dropped` keys are ever dropped."""
        for _ in range(10):
            some, others = chance.sample(kept, 4), chance.sample(dropped, 4)
            memory = Memory(some + others, self.payload_bytes).fill()
            # Of the others, False is honest: someone may have dropped them meanwhile.
            assert self.stored(store, memory)[:4] == [True] * 4, "a block was not stored"
            self.hits(store, others + some)
            store.drop(others[:2])
            assert listed(store.has(some + others))[:4] == [True] * 4, "a block was lost"
            assert self.hits(store, some) == [True] * 4, "a block was lost"

    def test_what_put_says_is_held_is_held(self) -> None:
        """However many blocks are put at once, and however little room there is."""
        with self.opened() as store:
            for _ in range(4):
                self.put_what_has_room(store)

    def test_closing_twice_is_harmless(self) -> None:
        store = self.open_store(self.payload_bytes)
        store.close()
        store.close()

    # -- of a claim or a capability: skipped by its name where the store has none -----------

    def test_two_open_stores_see_each_other(self) -> None:
        self.claimed("shared")
        keys = [make_key() for _ in range(4)]
        with self.opened() as one, self.opened() as other:
            assert listed(other.has(keys)) == [False] * 4
            self.put(one, keys)
            assert listed(other.has(keys)) == [True] * 4, "has remembers what was not there"
            assert listed(one.has(keys)) == [True] * 4
            assert self.hits(other, keys) == [True] * 4
            other.drop(keys[:1])
            held = listed(one.has(keys))
            assert held == [False, True, True, True], (
                "has is wrong of what another open store dropped: it remembers, or drop is not "
                "finished (committed) when it returns"
            )
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
            for _ in range(8):  # some of the bits are drawn
                self._damage_all(store)

    def _damage_all(self, store: TierStore) -> None:
        medium, swapped = self.medium(store), "another block's bytes in place of its own"
        keys = one, other, gone, new, *others = [make_key() for _ in range(4 + len(DAMAGES))]
        data = {}
        for key in keys:
            if key == new:
                store.drop([gone])
            self.put(store, [key])
            assert self.hits(store, [key]) == [True]
            data[key] = medium.read(key)
            assert len(data[key]) > 1, f"the medium shows {len(data[key])} bytes of a block"
        damaged = [("the bytes of a block that was dropped before", new, data[gone])]
        damaged += [(swapped, one, data[other]), (swapped, other, data[one])]
        for (what, damage), key in zip(DAMAGES, others, strict=True):
            damaged.append((what, key, damage(data[key])))
        for what, key, stored in damaged:
            medium.write(key, stored)
            found = each("get", store.get(Memory([key], self.payload_bytes).blocks), 1)
            assert found == [False], f"a block is served with {what}"
        store.drop(keys)

    def test_the_spec_says_whether_it_verifies(self) -> None:
        declared = self.make_spec().verifies
        assert declared == bool(self.verifies), (
            f"the spec's verifies is {declared}, {type(self).__name__}.verifies is {self.verifies}"
        )

    def test_damage_is_counted(self) -> None:
        self.claimed("verifies")
        keys = [make_key() for _ in range(3)]
        with self.opened_having(Damages) as (store, damages):
            self.put(store, keys)
            before = damages.damaged()
            assert self.hits(store, [make_key(), make_key()]) == [False] * 2
            assert damages.damaged() == before, "a block that is not there counts as damaged"
            self.damage(store, keys[0])
            self.hits(store, keys)
            assert damages.damaged() > before

    def test_peek_agrees_with_has(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened_having(LocalIndex) as (store, index):
            self.put(store, keys[:2])
            assert listed(index.peek(keys)) == [True, True, False, False]
            store.drop(keys[:1])
            assert listed(index.peek(keys)) == [False, True, False, False]

    def test_touch_changes_no_block(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened_having(Touch) as (store, touch):
            self.put(store, keys[:2])
            touch.touch(keys)
            assert listed(store.has(keys)) == [True, True, False, False]
            assert self.hits(store, keys[:2]) == [True, True]

    def test_clear_empties_one_namespace_and_no_other(self) -> None:
        keys = [make_key() for _ in range(2)]
        with self.opened_having(Clear) as (store, clear):
            self.put(store, keys)
            calls = next((n for n in range(64) if not clear.clear(keys[0][:NAMESPACE_BYTES])), None)
            assert calls is not None, "clear says that there is more, again and again"
            assert listed(store.has(keys)) == [False, True]
            self.put(store, keys[:1])
            assert self.hits(store, keys) == [True, True]

    def test_no_more_is_held_than_the_capacity(self) -> None:
        with self.opened() as store, self.opened() as other:
            measured = self.having(store, Measured)
            for place in (store, other) * 2 if self.shared else (store,) * 4:
                self.put_some(place, [make_key() for _ in range(64)])
                usage = measured.usage()
                assert usage.blocks > 0 and usage.used > 0
                assert usage.capacity is None or usage.used <= usage.capacity

    def test_what_is_dropped_gives_its_room_back(self) -> None:
        keys = [make_key() for _ in range(8)]
        with self.opened_having(Measured) as (store, measured):
            before = measured.usage()
            self.put(store, keys)
            during = measured.usage()
            assert during.blocks == before.blocks + 8
            assert during.used - before.used >= 8 * self.payload_bytes // 2
            store.drop(keys)
            assert measured.usage() == before

    def test_a_smaller_capacity_keeps_what_was_used_last(self) -> None:
        keys = [make_key() for _ in range(48)]
        with self.opened() as store:
            resizable, measured = self.having(store, Resizable), self.having(store, Measured)
            assert self.make_spec().resizes, "the spec's resizes is False"
            empty = measured.usage().used
            for start in range(0, 48, 8):
                self.put(store, keys[start : start + 8])
            whole = measured.usage()
            resizable.resize(empty + (whole.used - empty) // 2)
            until = time.monotonic() + 30.0
            while (usage := measured.usage()).used > (usage.capacity or 0):
                assert time.monotonic() < until, f"{usage} after 30 s"
                time.sleep(0.001)
            assert usage.capacity == empty + (whole.used - empty) // 2
            assert listed(store.has(keys[-16:])) == [True] * 16, "what was put last"
            assert self.hits(store, keys[-16:]) == [True] * 16
            assert listed(store.has(keys[:16])) == [False] * 16, "what was put first"
            resizable.resize(2 * whole.used)
            self.put(store, keys[:24])
            assert measured.usage().capacity == 2 * whole.used
            assert self.hits(store, keys[:24]) == [True] * 24
