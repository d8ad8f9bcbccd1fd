"""Tests of what a store leaves alone and gives back: memory, threads, files; also after a fork."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import SkipTest

from spec.offloading import StoreContext
from tiers.errors import KVTiersError, TierUnavailable
from tiers.store import Block, TierStore
from tiers.testing.devices import open_files, own_bytes
from tiers.testing.harness import Memory, StoreUnderTest, listed, make_key

LATE = 0.05
"""Seconds after a call in which it must not touch the caller's memory any more."""
REST = 0.1
"""Seconds in which nothing ends, where nothing is about to."""
ROUNDS, _PHASES = 4, 4
_BLOCKS, _ASKED = 32, 4096
_PATTERN = 0x5C
FORK_SECONDS = 20


class MemoryTests(StoreUnderTest):
    """A call that has returned has nothing of the caller's, and a closed store nothing at all."""

    def test_memory_is_the_callers_again_after_each_call(self) -> None:
        keys = [make_key() for _ in range(8)]
        given, taken = Memory(keys, self.payload_bytes).fill(), Memory(keys, self.payload_bytes)
        with self.opened() as store:
            assert self.stored(store, given) == [True] * 8
            # Views of its own: a store that keeps them is seen, whatever is done with ours.
            views = [Block(block.key, block.payload[:]) for block in taken.blocks]
            assert list(store.get(views)) == [True] * 8
            del views
            for memory in (given, taken):
                for block in memory.blocks:
                    block.payload[:] = bytes([_PATTERN]) * self.payload_bytes
            time.sleep(LATE)
            for verb, memory in (("put", given), ("get", taken)):
                untouched = all(set(block.payload) == {_PATTERN} for block in memory.blocks)
                assert untouched, f"{verb} wrote into the caller's memory after it had returned"
            for verb, memory in (("put", given), ("get", taken)):
                assert memory.is_free(), f"{verb} keeps the caller's memory after it has returned"
            assert self.hits(store, keys) == [True] * 8

    def test_nothing_is_left_behind(self) -> None:
        self._round()
        before = counted()
        self._check_memory(self._round, "closed stores")
        check_left(before, "closed stores")

    def test_a_place_that_was_closed_is_let_go(self) -> None:
        """Also what all stores of one place share in this process."""
        with TemporaryDirectory() as folder:
            for number in range(ROUNDS + 1):
                place = Path(folder, str(number))
                place.mkdir(0o700)
                self._open_at(place)
                if not number:
                    before = counted()
        check_left(before, "places that were closed")

    def _open_at(self, place: Path) -> None:
        """Use the store that the spec's `scratch` leads to, and close it."""
        moved = self.make_spec().scratch(place)
        if moved is None:
            raise SkipTest(f"{type(self.make_spec()).__name__} has no scratch")
        with closing(moved.open(StoreContext(self.payload_bytes))) as store:
            try:
                self._store_and_drop(store)
            except TierUnavailable:
                raise SkipTest("a server would have to be started there") from None

    def test_what_is_dropped_gives_its_memory_back(self) -> None:
        with self.opened() as store:
            self._check_memory(lambda: self._store_and_drop(store), "dropped blocks")

    def _round(self) -> None:
        with self.opened() as store:
            self._store_and_drop(store)

    def _store_and_drop(self, store: TierStore) -> None:
        keys = [make_key() for _ in range(_BLOCKS)]
        self.put(store, keys)
        self.hits(store, keys)
        listed(store.has(keys))
        store.drop(keys)

    def test_keys_that_are_asked_for_are_not_kept(self) -> None:
        """Nor is a lock for each. What is kept of the last ones has a bound."""
        tracemalloc.start()
        try:
            with self.opened() as store:
                for _ in range(4 * _PHASES):
                    before = tracemalloc.get_traced_memory()[0]
                    listed(store.has([make_key() for _ in range(_ASKED)]))
                    more = tracemalloc.get_traced_memory()[0] - before
                    if more < 32 * _ASKED:  # a key alone takes 80 bytes
                        return
        finally:
            tracemalloc.stop()
        raise AssertionError(f"{more >> 10} KiB are left of {_ASKED} keys that has did not find")

    def _check_memory(self, work: Callable[[], None], of: str) -> None:
        """Do the work some times. What leaks grows again and again, what is kept for reuse once."""
        most = ROUNDS * _BLOCKS * self.payload_bytes // 2
        for _ in range(_PHASES):
            before = own_bytes()
            for _ in range(ROUNDS):
                work()
            more = own_bytes() - before
            if more <= most:
                return
            gc.collect()
        raise AssertionError(f"{more >> 10} KiB of memory are left of {ROUNDS} times {of}")

    def test_it_serves_on_after_a_fork(self) -> None:
        """The child uses no store of its parent's. One that it opens is right, or refuses."""
        keys = [make_key() for _ in range(4)]
        with self.opened() as store:
            self.put(store, keys)
            child = os.fork()
            if not child:
                _end_child(lambda: self._is_right_in_child(keys))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status != -signal.SIGALRM, (
                f"a forked child has not ended after {FORK_SECONDS} s: it waits for a lock or "
                "for threads of its parent; there open may raise TierUnusable: compare os.getpid()"
            )
            assert status == 0, "a store that a forked child opens serves wrong bytes"
            assert self.hits(store, keys) == [True] * 4, "blocks are lost after a fork"
            if self.shared:
                with self.opened() as other:
                    assert self.hits(other, keys) == [True] * 4, "blocks are lost after a fork"
            self.put(store, [make_key()])

    def _is_right_in_child(self, keys: list[bytes]) -> bool:
        with suppress(KVTiersError, OSError):
            store = self.open_store(self.payload_bytes)
            memory = Memory(keys, self.payload_bytes)
            hits = store.get(memory.blocks)
            return all(memory.holds(index) for index, hit in enumerate(hits) if hit)
        return True


def _end_child(is_right: Callable[[], bool]) -> None:
    """End a forked child at once: it must run nothing of what its parent would. The system ends one
    that hangs."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(FORK_SECONDS)
        os._exit(0 if is_right() else 1)
    finally:
        os._exit(0)


_COUNTS = {"files, connections or children": open_files, "threads": threading.active_count}


def counted() -> dict[str, int]:
    """What is counted once it falls no more: what a store closed may take a moment to end."""
    until, least = time.monotonic() + REST, {what: count() for what, count in _COUNTS.items()}
    while time.monotonic() < until:
        time.sleep(0.01)
        for what, count in _COUNTS.items():
            if (now := count()) < least[what]:
                until, least[what] = time.monotonic() + REST, now
    return least


def check_left(before: Mapping[str, int], of: str) -> None:
    """Fewer are left than the rounds since. A thread or a file may take a moment to end."""
    for what, count in _COUNTS.items():
        until = time.monotonic() + 2.0
        while (more := count() - before[what]) >= ROUNDS and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert more < ROUNDS, f"{more} {what} are left of {of}"
