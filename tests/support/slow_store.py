"""A tier whose store is slow, hangs or fails as a test wants, and what is asked of its engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from spec.offloading import StoreContext, StoreSpec
from tests.support.replay_chains import MODEL
from tiers.engine.replay import ReplayEngine, answer
from tiers.engine.replay.scheduler import ReplayRequest
from tiers.errors import TierUnavailable
from tiers.store import Block

LONG = [token % 997 for token in range(100 * MODEL.block_tokens + 1)]


class SlowStore:
    """Keeps blocks. `gets`, `puts`: gates; while one is shut that verb hangs, but for the next
    `free_gets`. `broken`: loads raise; the next `lost` of them find nothing. `pace`: of puts,
    seconds a block. `asked`: lookups so far."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.gets, self.puts = threading.Event(), threading.Event()
        self.gets.set()
        self.puts.set()
        self.free_gets = 0
        self.broken = False
        self.lost = 0
        self.pace = 0.0
        self.asked = 0

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked += 1
        return [key in self.blocks for key in keys]

    has = peek

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.puts.wait()
        time.sleep(self.pace * len(blocks))
        self.blocks.update((block.key, bytes(block.payload)) for block in blocks)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        if self.free_gets:
            self.free_gets -= 1
        else:
            self.gets.wait()
        if self.broken:
            raise TierUnavailable("gone")
        if self.lost:
            self.lost -= 1
            return [False] * len(blocks)
        for block in blocks:
            block.payload[:] = self.blocks[block.key]
        return [True] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def close(self) -> None:
        self.gets.set()
        self.puts.set()


class SlowSpec(StoreSpec):
    """Both halves of an engine share its store."""

    def open(self, site: StoreContext) -> SlowStore:
        return STORES[0]


STORES: list[SlowStore] = []
"""What the fixture `store` has made for the test."""


def ask(engine: ReplayEngine, prompt: Sequence[int] = LONG, salt: str = "") -> ReplayRequest:
    """Run a request, whose answer must be what it is without tiers."""
    request = engine.generate(list(prompt), 4, salt)
    assert request.output == answer(MODEL, list(prompt), 4, 1)
    return request
