"""The conformance kit: tests that every store must pass, for authors of tiers.

Subclass `StoreContract` in a test file, say how to open your store, and let pytest collect it:

    class TestMyStore(StoreContract):
        shared = True
        persistent = True
        verifies = False

        @pytest.fixture(autouse=True)
        def place(self, tmp_path):
            self.path = tmp_path

        def open_store(self, payload_bytes):
            return MyStore(self.path, payload_bytes)

        def make_spec(self):
            return MySpec(type="mine", path=self.path)

What the class leaves unset is skipped, by name. The kit itself needs no pytest: its tests are
methods with plain asserts. With pytest, call `pytest.register_assert_rewrite("tiers.testing")` in
your conftest.py to see what they compared.
"""

from __future__ import annotations

import multiprocessing
import random
import secrets
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import SkipTest

from spec.offloading import StoreContext, StoreSpec
from tiers.block import MAX_KEY_BYTES, NAMESPACE_BYTES
from tiers.errors import TierUnusable
from tiers.store import Block, Clear, LocalIndex, Measured, TierStore, Touch, capability, each

_CANARY = 0xA5


def make_key(length: int = 48, start: bytes = b"") -> bytes:
    """A key nobody has used, of `length` bytes of any value, beginning with `start`."""
    return start + secrets.token_bytes(length - len(start))


def payload_of(key: bytes, payload_bytes: int, version: int = 0) -> bytes:
    """The bytes that belong to a key: half of them random, half compressible."""
    noise = random.Random(key + bytes([version])).randbytes(payload_bytes // 2)
    return (noise + key * (payload_bytes // len(key) + 1))[:payload_bytes]


class Memory:
    """The caller's memory for a batch: payloads with a canary on both sides of each.

    `shift` moves the first payload that many bytes from where the memory starts.
    """

    def __init__(self, keys: Sequence[bytes], payload_bytes: int, shift: int = 64) -> None:
        gap = 64
        stride = payload_bytes + gap
        self._bytes = bytearray([_CANARY]) * (shift + stride * len(keys))
        view = memoryview(self._bytes)
        starts = [shift + index * stride for index in range(len(keys))]
        self.blocks = [
            Block(key, view[start : start + payload_bytes])
            for key, start in zip(keys, starts, strict=True)
        ]
        self._outside = [view[:shift]]
        self._outside += [view[start + payload_bytes : start + stride] for start in starts]

    def fill(self, version: int = 0) -> Memory:
        """Write what belongs to each key into its payload."""
        for key, payload in self.blocks:
            payload[:] = payload_of(key, len(payload), version)
        return self

    def holds(self, index: int, version: int = 0) -> bool:
        """Whether a payload holds what belongs to its key."""
        key, payload = self.blocks[index]
        return payload == payload_of(key, len(payload), version)

    def check_canaries(self) -> None:
        """Fail if a byte outside the payloads was written."""
        for gap in self._outside:
            assert set(gap) <= {_CANARY}, "memory outside the payload was written"


def _listed(answers: object) -> list[bool]:
    """What `has` answered, which must be a list of booleans."""
    return each("has", answers, len(answers) if isinstance(answers, list) else 0)


def _found(spec: StoreSpec, payload_bytes: int, keys: Sequence[bytes]) -> list[bool]:
    """In another process: which of these keys a store opened there has, and loads."""
    store = spec.open(StoreContext(payload_bytes))
    memory = Memory(keys, payload_bytes)
    has, got = store.has(keys), store.get(memory.blocks)
    store.close()
    right = [memory.holds(index) for index in range(len(keys))]
    return [all(one) for one in zip(has, got, right, strict=True)]


class StoreContract:
    """What every TierStore owes. Needs room for 64 blocks of `payload_bytes`."""

    payload_bytes = 65536
    shared: bool | None = None
    """Whether two open stores see each other's blocks: an engine's processes open one each."""
    persistent: bool | None = None
    """Whether blocks are there again after close and open."""
    verifies: bool | None = None
    """Whether a block that was damaged where it is kept is a miss; as the spec class says."""

    def open_store(self, payload_bytes: int) -> TierStore:
        """Open the store; in one test, the same place each time. The kit closes it."""
        raise NotImplementedError(f"{type(self).__name__} must say how to open its store")

    def make_spec(self) -> StoreSpec:
        """The settings of the same place, which are sent to another process."""
        raise SkipTest(f"{type(self).__name__} has no make_spec, so no second process was tried")

    def damage(self, keys: Sequence[bytes]) -> None:
        """Change some bytes of what is kept of each of these blocks; others may suffer, too."""
        raise NotImplementedError(f"{type(self).__name__} verifies: say how to damage a block")

    @contextmanager
    def opened(self, payload_bytes: int | None = None) -> Iterator[TierStore]:
        """The store, open for a while."""
        store = self.open_store(payload_bytes or self.payload_bytes)
        try:
            yield store
        finally:
            store.close()

    def put(self, store: TierStore, keys: Sequence[bytes], version: int = 0) -> None:
        """Store what belongs to these keys; all must be taken."""
        memory = Memory(keys, self.payload_bytes).fill(version)
        stored = each("put", store.put(memory.blocks), len(keys))
        assert stored == [True] * len(keys), f"put of {len(keys)} blocks answered {stored}"
        memory.check_canaries()

    def hits(self, store: TierStore, keys: Sequence[bytes], version: int = 0) -> list[bool]:
        """Load these keys; which were hits. Every hit must hold what belongs to its key."""
        memory = Memory(keys, self.payload_bytes)
        hits = each("get", store.get(memory.blocks), len(keys))
        for index, hit in enumerate(hits):
            assert not hit or memory.holds(index, version), "a hit with other bytes than were put"
        memory.check_canaries()
        return hits

    def test_what_was_put_is_got(self) -> None:
        keys = [make_key() for _ in range(16)]
        with self.opened() as store:
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 16
            assert self.hits(store, keys[::-1]) == [True] * 16

    def test_an_unknown_key_is_a_miss(self) -> None:
        with self.opened() as store:
            assert _listed(store.has([make_key()])) == [False]
            assert self.hits(store, [make_key()]) == [False]

    def test_nothing_asked_nothing_answered(self) -> None:
        with self.opened() as store:
            assert _listed(store.has([])) == []
            assert list(store.put([])) == []
            assert list(store.get([])) == []
            store.drop([])

    def test_has_and_get_agree_on_a_mixed_batch(self) -> None:
        keys = [make_key() for _ in range(12)]
        held = [index % 3 != 1 for index in range(12)]
        with self.opened() as store:
            self.put(store, [key for key, here in zip(keys, held, strict=True) if here])
            assert _listed(store.has(keys)) == held
            assert self.hits(store, keys) == held
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 12

    def test_a_key_twice_in_one_batch(self) -> None:
        key = make_key()
        with self.opened() as store:
            self.put(store, [key, key])
            assert self.hits(store, [key, make_key(), key]) == [True, False, True]
            assert _listed(store.has([key, key])) == [True, True]

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
            assert _listed(store.has(keys)) == [True, False, True, True]
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
                assert _listed(store.has(some)) == [False] * len(some)

    def test_a_key_is_not_its_own_beginning(self) -> None:
        whole = make_key(64)
        with self.opened() as store:
            self.put(store, [whole])
            assert self.hits(store, [whole[:32], whole + b"\0", whole]) == [False, False, True]

    def test_memory_of_any_alignment(self) -> None:
        with self.opened() as store:
            for shift in (0, 1, 3, 4095):
                key = make_key()
                memory = Memory([key], self.payload_bytes, shift).fill()
                assert list(store.put(memory.blocks)) == [True]
                memory = Memory([key], self.payload_bytes, shift)
                assert list(store.get(memory.blocks)) == [True]
                assert memory.holds(0)
                memory.check_canaries()

    def test_odd_payload_lengths(self) -> None:
        for payload_bytes in (1, 511, 4097):
            keys = [make_key() for _ in range(3)]
            # A place may be bound to one length for good; a fresh one is another test's business.
            try:
                store = self.open_store(payload_bytes)
            except TierUnusable:
                continue
            memory = Memory(keys, payload_bytes).fill()
            assert list(store.put(memory.blocks)) == [True] * 3
            memory = Memory(keys, payload_bytes)
            assert list(store.get(memory.blocks)) == [True] * 3
            assert all(memory.holds(index) for index in range(3))
            store.close()

    def test_the_callers_memory_is_not_kept(self) -> None:
        key = make_key()
        memory = Memory([key], self.payload_bytes).fill()
        with self.opened() as store:
            assert list(store.put(memory.blocks)) == [True]
            memory.blocks[0].payload[:] = bytes(self.payload_bytes)
            assert list(store.get(memory.blocks)) == [True]
            assert memory.holds(0)
            memory.blocks[0].payload[:] = bytes(self.payload_bytes)
            assert self.hits(store, [key]) == [True]

    def test_a_payload_of_another_length_is_never_served(self) -> None:
        key = make_key()
        with self.opened() as store:
            self.put(store, [key])
        for payload_bytes in (self.payload_bytes // 2, self.payload_bytes * 2):
            try:
                other = self.open_store(payload_bytes)
            except TierUnusable:  # saying so is as good
                continue
            memory = Memory([key], payload_bytes)
            assert list(other.get(memory.blocks)) == [False]
            memory.check_canaries()
            other.close()

    def test_many_threads_at_once(self) -> None:
        kept, dropped = ([make_key() for _ in range(12)] for _ in range(2))
        wrong: list[str] = []
        with self.opened() as store:
            barrier = threading.Barrier(6)

            def work(seed: int) -> None:
                barrier.wait()
                try:
                    self._use(store, kept, dropped, random.Random(seed))
                except Exception:  # noqa: BLE001 - the main thread reports it
                    wrong.append(traceback.format_exc())

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong, wrong[0]
            self.put(store, kept + dropped)
            assert self.hits(store, kept + dropped) == [True] * 24

    def _use(
        self,
        store: TierStore,
        kept: Sequence[bytes],
        dropped: Sequence[bytes],
        chance: random.Random,
    ) -> None:
        """What one of many threads does; only `dropped` keys are ever dropped."""
        for _ in range(10):
            some, others = chance.sample(kept, 4), chance.sample(dropped, 4)
            memory = Memory(some + others, self.payload_bytes).fill()
            # Of the others, False is honest: someone may have dropped them meanwhile.
            assert list(store.put(memory.blocks))[:4] == [True] * 4, "a block was not stored"
            self.hits(store, others + some)
            store.drop(others[:2])
            assert _listed(store.has(some + others))[:4] == [True] * 4, "a block was lost"
            assert self.hits(store, some) == [True] * 4, "a block was lost"

    def test_two_open_stores_see_each_other(self) -> None:
        self._only_if("shared")
        keys = [make_key() for _ in range(4)]
        with self.opened() as one, self.opened() as other:
            self.put(one, keys)
            assert _listed(other.has(keys)) == [True] * 4
            assert self.hits(other, keys) == [True] * 4
            other.drop(keys[:1])
            assert self.hits(one, keys) == [False, True, True, True]

    def test_another_process_sees_what_was_put(self) -> None:
        """An engine's scheduler and its workers are such processes."""
        self._only_if("shared")
        spec, keys = self.make_spec(), [make_key() for _ in range(4)]
        context = multiprocessing.get_context("spawn")
        with self.opened() as store, context.Pool(1) as other:
            self.put(store, keys)
            held = other.apply(_found, (spec, self.payload_bytes, keys))
        assert held == [True] * 4, "each process that opens the store must see the same blocks"

    def test_blocks_are_there_after_reopening(self) -> None:
        self._only_if("persistent")
        keys = [make_key() for _ in range(8)]
        with self.opened() as store:
            self.put(store, keys)
        with self.opened() as store:
            assert _listed(store.has(keys)) == [True] * 8
            assert self.hits(store, keys) == [True] * 8

    def test_a_damaged_block_is_a_miss_and_spoils_no_other(self) -> None:
        self._only_if("verifies")
        keys = [make_key() for _ in range(3)]
        with self.opened() as store:
            self.put(store, keys)
            self.damage(keys[:1])
            assert self.hits(store, keys)[0] is False
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 3, "a damaged block can be put again"

    def _only_if(self, flag: str) -> None:
        if not getattr(self, flag):
            name, said = type(self).__name__, getattr(self, flag)
            raise SkipTest(f"{name}.{flag} is {said}" + ("; say which" if said is None else ""))

    def test_what_put_says_is_held_is_held(self) -> None:
        """However much is put at once, and however little room there is."""
        with self.opened() as store:
            measured = capability(store, Measured)
            for _ in range(4):
                keys = [make_key() for _ in range(64)]
                memory = Memory(keys, self.payload_bytes).fill()
                stored = each("put", store.put(memory.blocks), len(keys))
                assert _listed(store.has(keys)) == stored, "put says True for what it evicted"
                assert any(stored), "room is made for what is new"
                assert self.hits(store, keys) == stored
                usage = None if measured is None else measured.usage()
                if usage is not None and usage.capacity is not None:
                    assert usage.used <= usage.capacity, "more is held than the capacity"

    def test_what_is_dropped_gives_its_room_back(self) -> None:
        keys = [make_key() for _ in range(8)]
        with self.opened() as store:
            measured = capability(store, Measured)
            if measured is None:
                raise SkipTest(f"{type(store).__name__} does not say what it holds")
            before = measured.usage()
            self.put(store, keys)
            during = measured.usage()
            assert during.blocks == before.blocks + 8
            assert during.used - before.used >= 8 * self.payload_bytes // 2
            store.drop(keys)
            assert measured.usage() == before

    def test_closing_twice_is_harmless(self) -> None:
        store = self.open_store(self.payload_bytes)
        store.close()
        store.close()

    def test_capabilities_keep_their_word(self) -> None:
        keys = [make_key() for _ in range(4)]
        with self.opened() as store:
            self.put(store, keys[:2])
            index, touch = capability(store, LocalIndex), capability(store, Touch)
            clear, measured = capability(store, Clear), capability(store, Measured)
            if index is not None:
                assert index.peek(keys) == [True, True, False, False]
            if touch is not None:
                touch.touch(keys)
                assert self.hits(store, keys[:2]) == [True, True]
            if clear is not None:
                while clear.clear(keys[0][:NAMESPACE_BYTES]):
                    pass
                assert _listed(store.has(keys[:2])) == [False, True], "one namespace, and all of it"
                self.put(store, keys[:1])
            if measured is not None:
                usage = measured.usage()
                assert usage.blocks >= 2
                assert usage.used > 0
                assert usage.capacity is None or usage.used <= usage.capacity
