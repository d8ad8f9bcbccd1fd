"""What the tests of the kit are built from."""

from __future__ import annotations

import gc
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, Protocol
from unittest import SkipTest

from spec.offloading import StoreSpec
from tiers.store import Block, Capability, TierStore, capability, each
from tiers.testing.limits import limited

DEADLINE: float = StoreSpec.model_fields["deadline"].default
_CANARY = 0xA5


def make_key(length: int = 48, start: bytes = b"") -> bytes:
    """A key nobody has used, of `length` bytes of any value, beginning with `start`."""
    return start + secrets.token_bytes(length - len(start))


def payload_of(key: bytes, payload_bytes: int, version: int = 0) -> bytes:
    """The bytes that belong to a key: half of them random, half compressible."""
    noise = random.Random(key + bytes([version])).randbytes(payload_bytes // 2)
    return (noise + key * (payload_bytes // len(key) + 1))[:payload_bytes]


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make these calls at the same time, each on a thread of its own. Raises what the first of them
    that fails raises."""
    barrier = threading.Barrier(len(calls))

    def work(call: Callable[[], object]) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as threads:  # none is free before all have begun
        ended = [threads.submit(work, call) for call in calls]
    for one in ended:
        one.result()


class Memory:
    """The caller's memory for a batch: payloads with a canary on both sides of each.

    `shift` moves the first payload that many bytes from where the memory starts.
    """

    def __init__(self, keys: Sequence[bytes], payload_bytes: int, shift: int = 64) -> None:
        gap = 64
        stride = payload_bytes + gap
        self._bytes = bytearray([_CANARY]) * (shift + stride * len(keys))
        self._view = view = memoryview(self._bytes)
        starts = [shift + index * stride for index in range(len(keys))]
        self.blocks = [
            Block(key, view[start : start + payload_bytes])
            for key, start in zip(keys, starts, strict=True)
        ]
        self._outside = [view[:shift]]
        self._outside += [view[start + payload_bytes : start + stride] for start in starts]

    def fill(self, version: int = 0) -> Memory:
        for key, payload in self.blocks:
            payload[:] = payload_of(key, len(payload), version)
        return self

    def readonly(self) -> list[Block]:
        return [block.readonly() for block in self.blocks]

    def copy(self) -> bytes:
        """All bytes, those between the payloads too."""
        return bytes(self._bytes)

    def holds(self, index: int, version: int = 0) -> bool:
        """Whether a payload holds what belongs to its key."""
        key, payload = self.blocks[index]
        return payload == payload_of(key, len(payload), version)

    def is_free(self, seconds: float = 1.0) -> bool:
        """Whether nobody has a view of it any more; waits for that so long. It is spent then."""
        for block in self.blocks:
            block.payload.release()
        for view in self._outside:
            view.release()
        self.blocks, self._outside = [], []
        self._view.release()
        until = time.monotonic() + seconds
        while True:
            try:
                self._bytes.append(0)  # fails while there are views
                return True
            except BufferError:
                if time.monotonic() > until:
                    return False
                gc.collect()
                time.sleep(0.01)

    def check_canaries(self) -> None:
        """Fail if a byte outside the payloads was written."""
        for gap in self._outside:
            assert set(gap) <= {_CANARY}, "memory outside the payload was written"


def listed(answers: object) -> list[bool]:
    """The answers of `has` or `peek`, which must be a list of booleans."""
    return each("has", answers, len(answers) if isinstance(answers, list) else 0)


class Medium(Protocol):
    """The stored bytes of one store's blocks, where they lie."""

    def read(self, key: bytes) -> bytes:
        """The bytes kept for this block, with all that the store adds, and without padding."""

    def write(self, key: bytes, data: bytes) -> None:
        """Put these bytes, as many or fewer, in their place, as damage would: the store does not
        learn of it."""


class StoreUnderTest:
    """How a store is opened, what its author claims of it, and what the tests do with it."""

    payload_bytes = 65536
    shared: bool | None = None
    """Whether two stores that are open at once see each other's blocks, as an engine needs: each
    of its processes opens one."""
    persistent: bool | None = None
    """Whether a store that is opened again has the blocks that it had when it was closed."""
    verifies: bool | None = None
    """Whether a block that was damaged in the store is a miss; equal to the spec's `verifies`."""
    limit_seconds = 60.0
    """What one test of the kit may take: a verb that never ends fails it."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and test.__module__.startswith("tiers.testing."):
                setattr(cls, name, limited(test))

    def open_store(self, payload_bytes: int) -> TierStore:
        """Open the store; within a test always at the same place. The kit closes it.

        Raise TierUnusable for a length that this place can not have."""
        raise NotImplementedError(f"{type(self).__name__} must say how to open its store")

    def make_spec(self) -> StoreSpec:
        """The settings of the same place; they are pickled and sent to another process."""
        raise SkipTest(f"{type(self).__name__} has no make_spec, so no second process was tried")

    def medium(self, store: TierStore) -> Medium:
        """How the bytes of blocks in the open store are reached, of one that verifies."""
        raise NotImplementedError(f"{type(self).__name__} must say where its stored bytes are")

    def damage(self, store: TierStore, key: bytes) -> None:
        """Flip a bit in the middle of a stored block."""
        medium = self.medium(store)
        data = bytearray(medium.read(key))
        data[len(data) // 2] ^= 1
        medium.write(key, bytes(data))

    def opened(self, payload_bytes: int | None = None) -> closing[TierStore]:
        """Open the store, and close it however the test ends."""
        return closing(self.open_store(payload_bytes or self.payload_bytes))

    def claimed(self, claim: str) -> None:
        """Skip the test, by the claim's name, unless the class makes that claim."""
        claimed = getattr(self, claim)
        if not claimed:
            more = "; a test class of yours says which" if claimed is None else ""
            raise SkipTest(f"{type(self).__name__}.{claim} is {claimed}{more}")

    def having(self, store: TierStore, kind: type[Capability]) -> Capability:
        """The store as one that has a capability; without it the test is skipped, by name."""
        found = capability(store, kind)
        if found is None:
            raise SkipTest(f"{type(store).__name__} has no {kind.__name__}")
        return found

    @contextmanager
    def opened_having(
        self, kind: type[Capability], payload_bytes: int | None = None
    ) -> Iterator[tuple[TierStore, Capability]]:
        """The store open, and as one that has a capability: see `opened` and `having`."""
        with self.opened(payload_bytes) as store:
            yield store, self.having(store, kind)

    def put(self, store: TierStore, keys: Sequence[bytes], version: int = 0) -> None:
        """Store the payloads of these keys; the store must take them all."""
        stored = self.put_some(store, keys, version)
        assert stored == [True] * len(keys), f"put of {len(keys)} blocks answered {stored}"

    def put_some(self, store: TierStore, keys: Sequence[bytes], version: int = 0) -> list[bool]:
        """Store the payloads of these keys and say which the store took."""
        return self.stored(store, Memory(keys, self.payload_bytes).fill(version))

    def stored(self, store: TierStore, memory: Memory) -> list[bool]:
        """Put the blocks of this memory, read-only as an engine's are; which the store took."""
        before = memory.copy()
        with self.in_time("put"):
            stored = each("put", store.put(memory.readonly()), len(memory.blocks))
        assert memory.copy() == before, "put changed the caller's memory, which other tiers serve"
        return stored

    @contextmanager
    def in_time(self, verb: str) -> Iterator[None]:
        """Fail if this takes longer than the spec's deadline, and than the deadline of most."""
        began = time.monotonic()
        yield
        seconds, limit = time.monotonic() - began, DEADLINE
        if seconds > limit:
            with suppress(SkipTest):  # it has no spec
                limit = max(limit, self.make_spec().deadline)
            assert seconds <= limit, (
                f"{verb} took {seconds:.3g} s, and counts as failed after {limit:g} s: its deadline"
            )

    def hits(self, store: TierStore, keys: Sequence[bytes], version: int = 0) -> list[bool]:
        """Load these keys and say which were hits; each hit must be the payload of its key."""
        return self.got(store, Memory(keys, self.payload_bytes), version)

    def got(self, store: TierStore, memory: Memory, version: int = 0) -> list[bool]:
        """As `hits`, of the blocks of this memory."""
        with self.in_time("get"):
            hits = each("get", store.get(memory.blocks), len(memory.blocks))
        for index, hit in enumerate(hits):
            assert not hit or memory.holds(index, version), "a hit with other bytes than were put"
        memory.check_canaries()
        return hits
