"""Tests with as many keys and blocks as an engine gives one call, and of other lengths."""

from __future__ import annotations

import time
from contextlib import suppress
from unittest import SkipTest

from tiers.block import NAMESPACE_BYTES
from tiers.errors import TierUnusable
from tiers.store import Clear, LocalIndex, capability
from tiers.testing.harness import DEADLINE, Memory, StoreUnderTest, listed, make_key

LOOKED_UP = 8192
DROPPED = 256


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
