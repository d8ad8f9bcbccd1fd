"""A tier whose store is slow, hangs or fails as a test wants, and what is asked of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec.offloading import StoreContext, StoreSpec
from tests.support.faulty_stores import FaultyStore, SlowStore
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import MODEL
from tiers.store import TierStore
from tiers.testing import MemoryStore

LONG = [token % 997 for token in range(100 * MODEL.block_tokens + 1)]


class TroubledStore(FaultyStore):
    """A store in memory that has `blocks`, a `pace` and `faults`."""

    def __init__(self, indexed: bool = True) -> None:
        memory = MemoryStore()
        self.slow = SlowStore(memory, indexed=indexed)
        super().__init__(self.slow)
        self.blocks, self.pace = memory.blocks, self.slow.pace

    @property
    def asked(self) -> int:
        """Lookups so far."""
        return self.faults.calls["peek"] + self.faults.calls["has"]


class SlowSpec(StoreSpec):
    """Both halves of an engine share the store of the fixture `store`."""

    def open(self, site: StoreContext) -> TierStore:
        store: TierStore = STORES[0]
        return store


STORES: list[Any] = []
"""The store that the fixture `store` has made for the test."""


def ask(engine: ReplayEngine, prompt: Sequence[int] = LONG, salt: str = "") -> ReplayRequest:
    """Run a request, whose answer must be what it is without tiers."""
    request = engine.generate(list(prompt), 4, salt)
    assert request.output == answer(MODEL, list(prompt), 4, 1)
    return request
