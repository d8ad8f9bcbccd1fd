"""Tests of what one call has to bear: as many keys and blocks as an engine gives it, and a caller
that waits for so long."""

from __future__ import annotations

import time
from contextlib import suppress
from unittest import SkipTest

from tiers.block import NAMESPACE_BYTES
from tiers.errors import TierError, TierUnusable
from tiers.store import Clear, LocalIndex, TierStore, Waiting, capability, each
from tiers.testing.harness import Memory, StoreUnderTest, listed, make_key
from tiers.testing.memory_tests import LATE

LOOKED_UP = 8192
DROPPED = 256
DEADLINE = 10.0
"""A verb that takes longer counts as failed, by a spec's default."""


class ScaleTests(StoreUnderTest):
    """What a call is given at most."""

    def test_a_whole_batch(self) -> None:
        keys = [make_key() for _ in range(64)]
        with self.opened() as store:
            self.put(store, keys)
            assert self.hits(store, keys) == [True] * 64
            assert listed(store.has(keys)) == [True] * 64

    def test_the_keys_of_a_long_prompt(self) -> None:
        keys = [make_key() for _ in range(LOOKED_UP)]
        here = range(255, LOOKED_UP, 512)
        with self.opened() as store:
            self.put(store, [keys[index] for index in here])
            began = time.monotonic()
            held = listed(store.has(keys))
            seconds = time.monotonic() - began
            assert [index for index, one in enumerate(held) if one] == [*here]
            assert seconds < DEADLINE, f"has of {LOOKED_UP} keys took {seconds:.0f} s"
            if (index := capability(store, LocalIndex)) is not None:
                assert listed(index.peek(keys)) == held

    def test_a_drop_of_many_keys(self) -> None:
        keys = [make_key() for _ in range(DROPPED)]
        held = keys[3::4]
        with self.opened() as store:
            self.put(store, held)
            store.drop(keys)
            assert not any(listed(store.has(held))), "blocks are left of a drop of 256 keys"

    def test_a_namespace_of_many_blocks_is_cleared(self) -> None:
        space = make_key(NAMESPACE_BYTES)
        keys = [make_key(48, start=space) for _ in range(320)]
        try:
            with self.opened_having(Clear, 512) as (store, clear):
                for start in range(0, len(keys), 64):
                    store.put(Memory(keys[start : start + 64], 512).fill().readonly())
                calls = next((n for n in range(len(keys)) if not clear.clear(space)), None)
                assert calls is not None, "clear says that there is more, again and again"
                assert not any(listed(store.has(keys))), "blocks are left of a cleared namespace"
        except TierUnusable:
            raise SkipTest(f"{type(self).__name__} refuses payloads of 512 bytes") from None

    def test_two_lengths_in_one_place(self) -> None:
        """Engines of two models may share it; to refuse the second is right, too."""
        keys = [make_key() for _ in range(2)]
        other_bytes = self.payload_bytes // 2 + 1
        with self.opened() as store:
            self.put(store, keys[:1])
            with suppress(TierUnusable), self.opened(other_bytes) as other:
                stored = other.put(Memory(keys[1:], other_bytes).fill().readonly())
                assert self.got(other, Memory(keys[1:], other_bytes)) == stored
            assert self.hits(store, keys[:1]) == [True]


_BLOCKS = 16
_PATTERN = 0x3A
_MOST = 64
"""Answers after which a call is given up, at most."""


class _Caller:
    """Waits for this many answers of `time_left`, and no longer."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return 5.0 if self.asked <= self.answers else 0.0

    def __str__(self) -> str:
        return f"where it is given up after {self.answers} answers of time_left"

    @property
    def has_gone(self) -> bool:
        return self.asked > self.answers

    def check_asked(self, store: TierStore) -> None:
        """Raises SkipTest unless the store has asked."""
        if not self.asked:
            raise SkipTest(f"{type(store).__name__} never asks for its time_left")


class TimeTests(StoreUnderTest):
    """A call that is given up in its midst ends without harm, wherever the store asks."""

    def test_a_get_that_is_given_up_ends_and_does_no_harm(self) -> None:
        keys = [make_key() for _ in range(_BLOCKS)]
        given_up: list[Memory] = []
        with self.opened() as store:
            self.put(store, keys)
            for caller in map(_Caller, range(_MOST)):
                memory = Memory(keys, self.payload_bytes)
                hits = self._given_up(store, memory, caller)
                if not caller.has_gone:
                    break
                assert caller.answers or not all(hits), f"get goes on, {caller}"
                for block in memory.blocks:
                    block.payload[:] = bytes([_PATTERN]) * self.payload_bytes
                given_up.append(memory)
                assert self.hits(store, keys) == [True] * _BLOCKS, f"get loses blocks, {caller}"
            time.sleep(LATE)
            for memory in given_up:
                untouched = all(set(block.payload) == {_PATTERN} for block in memory.blocks)
                assert untouched, "a get that was given up wrote after it had returned"

    def _given_up(self, store: TierStore, memory: Memory, caller: _Caller) -> list[bool]:
        """Get into this memory; which blocks came, all of them right."""
        hits = [False] * _BLOCKS
        with Waiting(caller):
            try:
                hits = each("get", store.get(memory.blocks), _BLOCKS)
            except (TierError, OSError):  # where nothing has come it may raise
                assert caller.has_gone, "get fails although it is waited for"
        caller.check_asked(store)
        for index, hit in enumerate(hits):
            assert not hit or memory.holds(index), f"get says True of other bytes, {caller}"
        memory.check_canaries()
        return hits

    def test_a_put_that_is_given_up_says_what_is_held(self) -> None:
        with self.opened() as store:
            for caller in map(_Caller, range(_MOST)):
                keys = [make_key() for _ in range(_BLOCKS)]
                memory, held = Memory(keys, self.payload_bytes).fill(), [False] * _BLOCKS
                with Waiting(caller):
                    try:
                        held = self.stored(store, memory)
                    except (TierError, OSError):
                        assert caller.has_gone, "put fails although it is waited for"
                caller.check_asked(store)
                got = self.hits(store, keys)
                wrong = any(said and not hit for said, hit in zip(held, got, strict=True))
                assert not wrong, f"put says True of blocks that are not held, {caller}"
                self.put(store, keys)
                if not caller.has_gone:
                    return
