"""Tests of what a store does that asks how long its caller waits."""

from __future__ import annotations

import time
from unittest import SkipTest

from tiers.errors import TierError
from tiers.store import TierStore, Waiting, each
from tiers.testing.harness import Memory, StoreUnderTest, make_key
from tiers.testing.memory_tests import LATE

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
