"""A store under vLLM's OffloadingConnector is given no larger batches than under our own."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tiers.connector.hosted.backing_store import BackingStore
from tiers.contract.generation import Generation
from tiers.host.slots import SlotPool
from tiers.store import Block
from tiers.wrappers.guard import Guarded


class Batches:
    """A store that notes how many blocks it is given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.sizes.append(len(blocks))
        return [True] * len(blocks)

    get = put


@pytest.mark.parametrize(("block_bytes", "sizes"), [(4096, [64, 64, 22]), (16 << 20, [2] * 75)])
def test_batches_are_bounded(block_bytes: int, sizes: list[int]) -> None:
    store, payload = Batches(), memoryview(bytearray(block_bytes))
    memory = SimpleNamespace(payload=lambda slot: payload, payload_bytes=block_bytes)
    region: Any = SimpleNamespace(namespace=bytes(16), memory=memory)
    backing = BackingStore(None, [region], SlotPool(0), Generation())
    guarded = Guarded(cast(Any, store), "store")
    items = [(b"%d" % number, number) for number in range(150)]
    assert backing._move(guarded.put, items, b"") == [True] * 150
    assert backing._move(guarded.get, items, b"") == [True] * 150
    assert store.sizes == sizes * 2
    backing.close()
