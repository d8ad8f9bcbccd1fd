"""StoreTransfers: blocks on their way between the slots of all ranks and a store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from tiers.concurrency.executors import io_executor
from tiers.connector.contract.generation import space_of
from tiers.connector.hosted.shared_slots import SlotRegion
from tiers.store import Block, Touch, capability
from tiers.wrappers.guard import Guarded

logger = logging.getLogger(__name__)

FETCHERS = 2
"""Fetches under way at once."""
DRAIN_SECONDS = 10.0
"""How long puts under way may go on when the engine shuts down, and then fetches."""


@dataclass(frozen=True)
class Transfer:
    """Blocks and their slots. `request_id`: for whom they are fetched; None: they are put.
    `generation`: that of their keys."""

    request_id: str | None
    keys: list[bytes]
    slots: list[int]
    generation: bytes
    future: Future[list[bool]]

    def outcome(self) -> list[bool]:
        """Which blocks came whole, on every rank. Only once it has ended."""
        error = self.future.exception()
        if error is None:
            return self.future.result()
        logger.error("blocks between host memory and the store are lost: %s", error)
        return [False] * len(self.keys)


class StoreTransfers:
    """Begun and collected by the scheduler's thread, made by its own. The caller owns the slots."""

    def __init__(self, store: Guarded, regions: Sequence[SlotRegion]) -> None:
        self._store = store
        self._regions = regions
        self._under_way: list[Transfer] = []
        self._fetcher = io_executor(FETCHERS, "fetch")
        self._writer = io_executor(1, "store")

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def blocks_being_put(self) -> int:
        """Blocks whose slots the writer still reads."""
        return sum(len(one.keys) for one in self._under_way if one.request_id is None)

    def fetch(
        self, request_id: str, keys: list[bytes], slots: list[int], generation: bytes
    ) -> None:
        """Begin to fill these slots."""
        future = self._fetcher.submit(self._get, keys, slots, generation)
        self._under_way.append(Transfer(request_id, keys, slots, generation, future))

    def put(self, keys: list[bytes], slots: list[int], generation: bytes) -> None:
        """Begin to store these slots."""
        future = self._writer.submit(self._put, keys, slots, generation)
        self._under_way.append(Transfer(None, keys, slots, generation, future))

    def _get(self, keys: list[bytes], slots: list[int], generation: bytes) -> list[bool]:
        return _on_all([self._store.get(b) for b in self._blocks(keys, slots, generation)])

    def _put(self, keys: list[bytes], slots: list[int], generation: bytes) -> list[bool]:
        return _on_all([self._store.put(b) for b in self._blocks(keys, slots, generation)])

    def _blocks(
        self, keys: list[bytes], slots: list[int], generation: bytes
    ) -> Iterator[list[Block]]:
        """Each rank's part of these blocks."""
        for region in self._regions:
            space = space_of(region.namespace, generation)
            pairs = zip(keys, slots, strict=True)
            yield [Block(space + key, region.memory.payload(slot)) for key, slot in pairs]

    def touch(self, keys: list[bytes], generation: bytes) -> None:
        """Count blocks as used, the first of them most, once those are stored that are put now."""
        touch = capability(self._store, Touch)
        if touch is not None:
            spaces = [space_of(one.namespace, generation) for one in self._regions]
            self._writer.submit(touch.touch, [space + key for key in keys for space in spaces])

    def take_ended(self) -> Iterator[Transfer]:
        """Those that have ended since the last call."""
        for one in [one for one in self._under_way if one.future.done()]:
            self._under_way.remove(one)
            yield one

    def close(self) -> None:
        """Let puts under way end, for `DRAIN_SECONDS` at most, and wait as long for fetches."""
        wait([one.future for one in self._under_way if one.request_id is None], DRAIN_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        wait([one.future for one in self._under_way if one.future.running()], DRAIN_SECONDS)


def _on_all(ranks: list[list[bool]]) -> list[bool]:
    return [all(good) for good in zip(*ranks, strict=True)]
