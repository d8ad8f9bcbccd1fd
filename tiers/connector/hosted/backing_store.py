"""BackingStore: the store behind hosted host memory, and blocks on their way to and from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from tiers.concurrency.executors import io_executor
from tiers.connector.hosted.hosted_request import HostedRequest, Prefix
from tiers.connector.hosted.shared_slots import SlotRegion
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.connector.scheduler.tier_manager import TierManager
from tiers.contract.generation import Generation, space_of
from tiers.host.slots import SlotPool
from tiers.store import Block, LocalIndex, batch_blocks, capability
from tiers.wrappers.guard import Guarded

logger = logging.getLogger(__name__)

Item = tuple[bytes, int]
"""A block's key and its slot."""
OpenStore = Callable[[], Guarded | None]
"""Opens a store, which the caller owns; None, after logging why, if it can't be used."""
READERS = 2
"""Promotions that are read at once."""
DRAIN_SECONDS = 10.0
"""How long, when the engine shuts down, puts in flight may go on, and then promotions."""


@dataclass(frozen=True)
class Transfer:
    """Blocks on their way between their slots and the store; each slot has a reference for it. A
    promotion has the `request_id` it is for, a put the `prefix` it belongs to and `whole`, as of
    `StoreOrder.ended`. `generation`: of the keys."""

    items: list[Item]
    generation: bytes
    future: Future[list[bool]]
    request_id: str | None = None
    prefix: Prefix | None = None
    whole: int | None = None

    def outcome(self) -> list[bool]:
        """Return which blocks came whole, on every rank. Only for one that has ended."""
        error = self.future.exception()
        if error is None:
            return self.future.result()
        logger.error("blocks between host memory and the store are lost: %s", error)
        return [False] * len(self.items)


class BackingStore:
    """What a store holds and wants, and transfers with it; nothing until it has joined. Used by the
    scheduler's thread; threads of its own open the store and move blocks."""

    def __init__(
        self,
        open_store: OpenStore | None,
        regions: Sequence[SlotRegion],
        pool: SlotPool,
        generation: Generation,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store and wait, if all `regions` have a namespace by now; else `join` opens it.

        `open_store`: None for a chain without a store. `pool`: of the slots of all `regions`.
        `generation`: of all keys.
        """
        self._open_store = open_store
        self._regions = regions
        self._pool = pool
        self._generation = generation
        self._clock = clock
        self._store: Guarded | None = None
        self._manager = TierManager()
        self._opening: Future[Guarded | None] | None = None
        self._in_flight: list[Transfer] = []
        self._opener = io_executor(1, "open")
        self._reader = io_executor(READERS, "fetch")
        self._writer = io_executor(1, "store")
        self.join()
        if self._opening is not None:
            wait([self._opening])
            self.join()

    def join(self) -> None:
        """Open the store in the background once all workers know their namespaces, then use it."""
        if self._open_store is None:
            return
        names = [region.namespace for region in self._regions]
        if self._opening is None and all(names):
            self._opening = self._opener.submit(self._open_store)
        elif self._opening is not None and self._opening.done():
            self._open_store = None
            self._store = self._opening.result()
            if self._store is not None:
                self._manager = StoreManager(self._store, names, self._generation, self._clock)

    def lacks(self, key: bytes) -> bool:
        """Whether it is known at once that the store does not hold this block."""
        if self._store is None:
            return True
        if capability(self._store, LocalIndex) is None:
            return False
        # By itself: the answers about what the request has asked for may be half there.
        return self._manager.coverage(Lookup(), [key], range(1)) == [False]

    def held(self, request: HostedRequest, keys: list[bytes]) -> list[bytes] | None:
        """Return those of `keys` that the store holds; None: not known yet, ask again for the same
        ones."""
        held = self._manager.coverage(request.lookup, keys, range(len(keys)))
        if held is None:
            return None
        request.lookup = Lookup()  # the next question of this request is about other keys
        return [key for key, has in zip(keys, held, strict=True) if has]

    # -- transfers ---------------------------------------------------------------------------

    def promote(self, request_id: str, items: list[Item]) -> None:
        """Begin to load held blocks into their slots; takes over a reference on each."""
        assert self._store is not None, "a promotion from no store"
        tag = self._generation.tag
        future = self._reader.submit(self._move, self._store.get, items, tag)
        self._in_flight.append(Transfer(items, tag, future, request_id=request_id))

    def put(self, items: list[Item], prefix: Prefix, whole: int | None) -> None:
        """Begin to store the blocks, in order, that the store wants and has room for."""
        wanted = self._wanted(items)
        if self._store is None or not wanted:
            self._put_ended(prefix, whole)
            return
        for _, slot in wanted:
            self._pool.retain(slot)
        tag = self._generation.tag
        future = self._writer.submit(self._move, self._store.put, wanted, tag)
        self._in_flight.append(Transfer(wanted, tag, future, prefix=prefix, whole=whole))

    def _wanted(self, items: list[Item]) -> list[Item]:
        lacking = self._manager.touch_and_list_missing([key for key, _ in items])
        putting = sum(len(one.items) for one in self._in_flight if one.prefix is not None)
        # Puts may hold half of all slots; the others are left to promotions and gathers.
        room = max(0, max(1, self._pool.num_slots // 2) - putting)
        return [item for item, lacks in zip(items, lacking, strict=True) if lacks][:room]

    def _move(
        self, verb: Callable[[list[Block]], list[bool]], items: list[Item], generation: bytes
    ) -> list[bool]:
        """Get or put every rank's part of blocks; return which are whole on all ranks."""
        ranks = []
        for region in self._regions:
            space = space_of(region.namespace, generation)
            step = batch_blocks(region.memory.payload_bytes)
            good: list[bool] = []
            for start in range(0, len(items), step):
                some = items[start : start + step]
                good += verb([Block(space + k, region.memory.payload(s)) for k, s in some])
            ranks.append(good)
        return [all(parts) for parts in zip(*ranks, strict=True)]

    def take_ended(self) -> Iterator[tuple[Transfer, list[bool]]]:
        """Yield each ended transfer, with the references on its slots, and which of its blocks
        arrived and are of this generation."""
        for one in [one for one in self._in_flight if one.future.done()]:
            self._in_flight.remove(one)
            outcome = zip(one.items, one.outcome(), strict=True)
            yield one, [self._ended(one, *item, good) for item, good in outcome]
            if one.prefix is not None:
                self._put_ended(one.prefix, one.whole)

    def _ended(self, transfer: Transfer, key: bytes, slot: int, good: bool) -> bool:
        is_ours = self._generation.owns(key)
        if transfer.prefix is None:
            if not (good and is_ours):
                self._manager.discard(key)
        elif is_ours:
            self._manager.complete_store(key, slot, good, None)
        elif transfer.generation:  # blocks without one stay: other engines may use them
            self._manager.drop([key], transfer.generation)
        return good and is_ours

    def _put_ended(self, prefix: Prefix, whole: int | None) -> None:
        prefix.order.ended(whole)
        self._touch_prefix(prefix)

    def _touch_prefix(self, prefix: Prefix) -> None:
        """Let the head of a prefix that was stored in several steps be the last to go."""
        if prefix.order.touch_due(len(prefix.keys)):
            self._manager.touch_prefix(list(prefix.keys))

    # -- ends --------------------------------------------------------------------------------

    def request_finished(self, request: HostedRequest) -> None:
        """Drop what is kept for a request; its transfers in flight end on their own."""
        request.prefix.order.finished = True
        self._touch_prefix(request.prefix)
        request.lookup.cancel()

    def reset(self) -> None:
        """Begin a new generation, and drop in the background what this engine stored in the old."""
        self._manager.reset()
        self._manager.clear(self._generation.renew())

    def close(self) -> None:
        """Wait for transfers in flight, `DRAIN_SECONDS` at most, and close the store, or let it be
        closed as soon as it is open."""
        self._opener.shutdown(wait=False)
        if self._opening is not None and self._open_store is not None:
            self._opening.add_done_callback(_close_opened)
        wait([one.future for one in self._in_flight if one.prefix is not None], DRAIN_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        wait([one.future for one in self._in_flight if one.future.running()], DRAIN_SECONDS)
        self._manager.close()


def _close_opened(opening: Future[Guarded | None]) -> None:
    if opening.exception() is None and (store := opening.result()) is not None:
        store.close()
