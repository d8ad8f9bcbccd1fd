"""HostedTier: tiers behind a connector of the engine's own, which accepts no failed load.

Such a connector asks block by block, and relies on the answer. So a block is a hit only while its
verified bytes are in host memory, pinned for the request that asked. A block that only the store
holds is promoted first: loaded into host memory, while the request is asked to come again.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from tiers.connector.hosted.backing_store import BackingStore, Item, OpenStore
from tiers.connector.hosted.hosted_request import Gather, Happened, HostedRequest
from tiers.connector.hosted.shared_slots import SlotRegion
from tiers.connector.scheduler.host_manager import HostManager
from tiers.contract.generation import Generation
from tiers.host.slots import Residency, SlotPool


class SlotOrders:
    """Counts ordered transfers by slot; each holds a reference on its slot until it has ended.

    The engine tells when that is, except after a reset: then the marks in all `regions` tell it.
    """

    def __init__(self, pool: SlotPool, regions: Sequence[SlotRegion]) -> None:
        self._pool = pool
        self._regions = regions
        self._ordered = [0] * pool.num_slots
        self._in_flight: Counter[int] = Counter()
        self._forgotten: list[int] = []

    def begin(self, slot: int) -> None:
        """Order a transfer of `slot`; takes over a reference of the caller's."""
        self._ordered[slot] += 1
        self._in_flight[slot] += 1

    def end(self, slot: int) -> None:
        """Note that a transfer of `slot` has ended on all ranks, and release the slot."""
        self._in_flight[slot] -= 1
        self._pool.release(slot)

    def forget(self) -> None:
        """Expect no `end` for the transfers in flight: the engine has forgotten them."""
        self._forgotten += self._in_flight.elements()
        self._in_flight.clear()

    def release_ended(self) -> None:
        """Release the slots of forgotten transfers that all workers have ended."""
        self._forgotten = [slot for slot in self._forgotten if not self._release(slot)]

    def _release(self, slot: int) -> bool:
        if any(region.ended(slot) < self._ordered[slot] for region in self._regions):
            return False
        self._pool.release(slot)
        return True


PROMOTION_DEADLINE = 5.0
"""Seconds after which a block that is still being promoted is a miss."""


class Answer(enum.Enum):
    """Whether a block can be loaded. LATER: not known yet, or not in host memory yet."""

    HIT = enum.auto()
    MISS = enum.auto()
    PENDING = enum.auto()


class HostedTier:
    """Host memory, and perhaps a store behind it. Used by the scheduler's thread; never waits.
    Blocks have the engine's names, with their KV cache group."""

    def __init__(
        self,
        regions: Sequence[SlotRegion],
        residency: Callable[[SlotPool, int], Residency],
        open_store: OpenStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        events: bool = False,
    ) -> None:
        """Take over `regions`, one per rank. `open_store`: see `BackingStore`. `events`: whether
        the engine takes them."""
        self.pool = SlotPool(min(region.num_slots for region in regions))
        self._regions = regions
        self._clock = clock
        self._events = events
        self._happened: list[Happened] = []
        self._generation = Generation()
        self._is_outdated = False
        self._residency = residency(self.pool, self.pool.num_slots)
        self._host = HostManager(self._residency, self.pool, self._evicted)
        self._orders = SlotOrders(self.pool, regions)
        self._requests: dict[str, HostedRequest] = {}
        self._gathers: dict[bytes, Gather] = {}
        self._promoting: dict[bytes, float] = {}
        self._store = BackingStore(open_store, regions, self.pool, self._generation, clock)

    def _request(self, request_id: str) -> HostedRequest:
        return self._requests.setdefault(request_id, HostedRequest())

    # -- loading -----------------------------------------------------------------------------

    def lookup(self, request_id: str, block: bytes) -> Answer:
        """Answer whether `block` can be loaded for a request, for which it then stays in host
        memory until it is loaded or the request has ended."""
        self._reap()
        if self._is_over():
            return Answer.MISS
        request = self._request(request_id)
        key = self._generation.key(block)
        slot = self._residency.find(key)
        if slot is not None:
            request.pin(key, slot, self.pool)
            return Answer.HIT
        asked = self._promoting.get(key, math.inf)
        if key in request.missed or self._clock() > asked + PROMOTION_DEADLINE:
            return Answer.MISS
        if key in self._gathers or key in self._promoting or key in request.asked:
            return Answer.PENDING
        if self._store.lacks(key):
            return Answer.MISS
        request.wanted[key] = None
        return Answer.PENDING

    @property
    def generation(self) -> bytes:
        """What the keys of now end with."""
        return self._generation.tag

    def weights_changed(self) -> None:
        """Answer and keep nothing until a reset, which alone ends the engine's transfers: what is
        kept is of other weights, as the engine's own cache may be, from which it would be stored.
        """
        self._is_outdated = True

    def _is_over(self) -> bool:
        if not self._is_outdated:
            tag = self._generation.tag
            self._is_outdated = any(region.has_ended(tag) for region in self._regions)
        return self._is_outdated

    def end_step(self, started: Iterable[str]) -> None:
        """Begin to promote what this step's lookups missed. `started`: requests that now run."""
        self._store.join()
        for request_id in started:
            if request_id in self._requests:
                self._requests[request_id].unpin(self.pool)
        self._reap()
        self._orders.release_ended()
        for request_id, request in self._requests.items():
            if request.wanted or request.asked:
                self._ask(request_id, request)

    def _ask(self, request_id: str, request: HostedRequest) -> None:
        if not request.asked:
            request.asked = list(request.wanted)
            request.wanted.clear()
        found = self._store.held(request, request.asked)
        if found is None:
            return
        request.missed.update(set(request.asked) - set(found))
        request.asked = []
        self._promote(request_id, request, found)

    def _promote(self, request_id: str, request: HostedRequest, found: list[bytes]) -> None:
        items: list[Item] = []
        for key in found:
            if key in self._promoting or key in self._gathers:
                continue  # on its way to host memory already
            slot = self._claim(key)
            if slot is not None:
                items.append((key, slot))
            elif self._residency.find(key) is None:
                request.missed.add(key)
        if items:
            self._promoting.update(dict.fromkeys((key for key, _ in items), self._clock()))
            self._store.promote(request_id, items)

    def _claim(self, key: bytes) -> int | None:
        """Return an empty slot, with a reference; None: no room, or a slot holds the block."""
        claim = self.pool.claim(key)
        if claim is None or claim.fresh:
            return None if claim is None else claim.slot
        # Host memory gave the block up while its put still reads the slot: keep it again.
        self._admit(key, claim.slot)
        self.pool.release(claim.slot)
        return None

    def prepare_load(self, request_id: str, blocks: Iterable[bytes]) -> list[int]:
        """Order the load of blocks that were hits, the first of the prefix first; return the slot
        of each, until it has ended."""
        request = self._request(request_id)
        keys = [self._generation.key(block) for block in blocks]
        slots = []
        for key, slot in zip(keys, self._host.prepare_load(keys), strict=True):
            if slot is None:  # the host tier has failed since; the pin still keeps the slot
                slot = request.pinned[key]
                self.pool.retain(slot)
            self._orders.begin(slot)
            request.prefix.number(key)
            slots.append(slot)
        request.unpin(self.pool)
        return slots

    def complete_load(self, blocks: Iterable[bytes]) -> None:
        """Note that blocks were loaded on all ranks."""
        for slot in self.pool.find_all([self._generation.key(block) for block in blocks]):
            assert slot is not None, "a load of a slot that was given away"
            self._orders.end(slot)

    def came_from_store(self, request_id: str, block: bytes) -> bool:
        """Return whether a hit of this request was promoted for it."""
        request = self._requests.get(request_id)
        return request is not None and self._generation.key(block) in request.promoted

    def touch(self, blocks: Sequence[bytes]) -> None:
        """Count blocks as used now, the first as the most recent."""
        self._residency.touch([self._generation.key(block) for block in blocks])

    # -- storing -----------------------------------------------------------------------------

    def prepare_store(
        self, request_id: str, blocks: Collection[bytes]
    ) -> list[tuple[bytes, bytes, int]]:
        """Order the gather of one step's blocks, the first of the prefix first; return (block, key,
        slot) of each that is not held and finds a slot."""
        orders: list[tuple[bytes, bytes, int]] = []
        if self._is_over():
            return orders
        prefix = self._request(request_id).prefix
        keys = [self._generation.key(block) for block in blocks]
        for block, key, held in zip(blocks, keys, self._residency.touch(keys), strict=True):
            number = prefix.number(key)
            if held is not None or key in self._gathers or key in self._promoting:
                continue
            slot = self._claim(key)
            if slot is not None:
                self._gathers[key] = Gather(slot, prefix, number)
                self._orders.begin(slot)
                orders.append((block, key, slot))
        prefix.order.in_flight += bool(orders)
        return orders

    def complete_store(self, blocks: Iterable[bytes], success: bool) -> None:
        """Note that blocks of one request, in any order, were gathered on all ranks, and store
        them. The first of the prefix is kept last, so that the prefix is evicted from its tail."""
        done = [self._gathers.pop(self._generation.key(block)) for block in blocks]
        if not done:
            return
        done.sort(key=lambda gather: gather.number)
        prefix = done[0].prefix
        heads = self._host.predecessors(prefix.keys, [gather.number for gather in done])
        good: list[Item] = []
        for slot, _, number in reversed(done):
            key = prefix.keys[number]
            held = success and all(region.holds(slot, key) for region in self._regions)
            if held and not self._is_over():
                self._admit(key, slot, heads.get(key))
                good.append((key, slot))
        self._store.put(good[::-1], prefix, len(done) if len(done) == len(prefix.keys) else None)
        for gather in done:
            self._orders.end(gather.slot)

    def _admit(self, key: bytes, slot: int, head: bytes | None = None) -> None:
        """Keep a block in host memory, if there is room, to be evicted before block `head`."""
        if self._residency.find(key) is None and self._host.complete_store(key, slot, True, head):
            self._note(key, in_host=True, stored=True)

    def _evicted(self, key: bytes) -> None:
        self._note(key, in_host=True, stored=False)

    def _note(self, key: bytes, *, in_host: bool, stored: bool) -> None:
        if self._events and self._generation.owns(key):
            self._happened.append(Happened(self._generation.block(key), in_host, stored))

    def take_happened(self) -> list[Happened]:
        """Return what came and went since the last call, in order."""
        happened, self._happened = self._happened, []
        return happened

    # -- ends --------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Take in the ended transfers with the store."""
        for transfer, arrived in self._store.take_ended():
            for (key, slot), good in zip(transfer.items, arrived, strict=True):
                if transfer.request_id is not None:
                    self._promoted(transfer.request_id, key, slot, good)
                elif good:
                    self._note(key, in_host=False, stored=True)
                self.pool.release(slot)

    def _promoted(self, request_id: str, key: bytes, slot: int, good: bool) -> None:
        del self._promoting[key]
        if good:
            self._admit(key, slot)
        else:
            self._note(key, in_host=False, stored=False)
        request = self._requests.get(request_id)
        if request is None or not self._generation.owns(key):
            return
        if self._residency.find(key) is None:
            request.missed.add(key)
        else:
            request.pin(key, slot, self.pool)
            request.promoted.add(key)

    def request_finished(self, request_id: str) -> None:
        """Drop what is kept for a request; its transfers in flight end on their own."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.unpin(self.pool)
            self._store.request_finished(request)

    def reset(self) -> None:
        """Never again find what was stored so far. The engine forgets its transfers in flight."""
        self._is_outdated = False
        self._orders.forget()
        self._gathers.clear()
        for request_id, request in self._requests.items():
            request.unpin(self.pool)
            self._requests[request_id] = HostedRequest()
        self._host.reset()
        self._happened.clear()
        self._store.reset()

    def close(self) -> None:
        """Let transfers with the store end, within a limit, and release everything."""
        self._store.close()
        for region in self._regions:
            region.close()
