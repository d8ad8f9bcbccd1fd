"""HostedTier: tiers behind a connector of the engine's own, which takes no failed load.

Such a connector asks block by block, and believes the answer. So a block is a hit only while its
verified bytes are in host memory, pinned for the request that was told so; one that only the
store has is fetched there first, and the request is asked to come again.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Sequence

from tiers.connector.contract.generation import Generation
from tiers.connector.hosted.joining import LateStore
from tiers.connector.hosted.requests import Happened, HostedRequest, Prefix, Storing
from tiers.connector.hosted.shared_slots import SlotRegion
from tiers.connector.hosted.transfers import StoreTransfers, Transfer
from tiers.connector.scheduler.host_manager import nearest_heads
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.host.slots import Residency, SlotPool
from tiers.store import LocalIndex, capability
from tiers.wrappers.guard import Guarded

FETCH_DEADLINE = 5.0
"""Seconds after which blocks still being fetched are a miss for who waits for them."""


class Answer(enum.Enum):
    """Whether a block can be loaded; LATER: not known, or not here, yet."""

    HIT = enum.auto()
    MISS = enum.auto()
    LATER = enum.auto()


class HostedTier:
    """Host memory, and perhaps a store behind it. Used by the scheduler's thread; never waits.

    `regions`: one per rank, whose slots the workers use as they are told. The tier owns them, and
    the store. Blocks are named as the engine names them, its KV cache group included.
    """

    def __init__(
        self,
        regions: Sequence[SlotRegion],
        residency: Callable[[SlotPool, int], Residency],
        store: Guarded | None,
        clock: Callable[[], float] = time.monotonic,
        late: LateStore | None = None,
        events: bool = False,
    ) -> None:
        """`late`: a store that joins when it can be opened. `events`: whether they are taken."""
        slots = min(region.num_slots for region in regions)
        self.pool = SlotPool(slots)
        self.dropped = 0
        """Blocks not stored because no slot was free, or because the store lags behind."""
        self._regions = regions
        self._residency = residency(self.pool, slots)
        self._happened: list[Happened] = []
        self._events = events
        self._residency.on_evict = lambda key: self._note(key, in_host=True, stored=False)
        self._clock = clock
        self._late = late
        self._generation = Generation()
        self._store: Guarded | None = None
        self._manager: StoreManager | None = None
        self._under_way: StoreTransfers | None = None
        if store is not None:
            self._join(store)
        self._requests: dict[str, HostedRequest] = {}
        self._storing: dict[bytes, Storing] = {}
        self._loading: dict[bytes, list[int]] = {}
        self._fetching: dict[bytes, float] = {}
        self._issued = [0] * slots
        self._unquiet: list[int] = []

    def _join(self, store: Guarded) -> None:
        spaces = [region.namespace for region in self._regions]
        self._store = store
        self._manager = StoreManager(store, spaces, self._generation, self._clock)
        self._under_way = StoreTransfers(store, self._regions)

    @property
    def transfers(self) -> int:
        """Transfers with the store that are not known to have ended."""
        return len(self._under_way or ())

    @property
    def _local(self) -> bool:
        return self._store is not None and capability(self._store, LocalIndex) is not None

    # -- loading -----------------------------------------------------------------------------

    def lookup(self, request_id: str, block: bytes) -> Answer:
        """Whether a block can be loaded for a request; a hit stays until it was, or has ended."""
        self._reap()
        request = self._requests.setdefault(request_id, HostedRequest())
        key = self._generation.key(block)
        slot = self._residency.find(key)
        if slot is not None:
            self._pin(request, key, slot)
            return Answer.HIT
        if key in request.missed or self._is_late(key):
            return Answer.MISS
        if key in self._storing or key in self._fetching or key in request.asked:
            return Answer.LATER
        if self._manager is None or (self._local and not self._held(request_id, [key])):
            return Answer.MISS
        request.wanted[key] = None
        return Answer.LATER

    def _pin(self, request: HostedRequest, key: bytes, slot: int) -> None:
        if key not in request.pinned:
            self.pool.retain(slot)
            request.pinned[key] = slot

    def _is_late(self, key: bytes) -> bool:
        return self._clock() > self._fetching.get(key, float("inf")) + FETCH_DEADLINE

    def _held(self, request_id: str, keys: list[bytes]) -> list[bytes] | None:
        """Which of `keys` the store holds; None: ask again."""
        assert self._manager is not None
        held = self._manager.held(request_id, 0, keys, len(keys))
        if held is None:
            return None
        self._manager.forget_request(request_id)
        return [key for key, has in zip(keys, held, strict=True) if has]

    def end_step(self, started: Iterable[str]) -> None:
        """Begin to fetch what this step's lookups found missing; `started` have begun to run."""
        if self._late is not None and (store := self._late.take()) is not None:
            self._join(store)
        for request_id in started:
            self._unpin(request_id)
        self._reap()
        self._unquiet = [slot for slot in self._unquiet if not self._release_if_quiet(slot)]
        for request_id, request in self._requests.items():
            if request.wanted or request.asked:
                self._ask(request_id, request)

    def _ask(self, request_id: str, request: HostedRequest) -> None:
        if not request.asked:
            request.asked = list(request.wanted)
            request.wanted.clear()
        found = self._held(request_id, request.asked)
        if found is None:
            return
        request.missed.update(set(request.asked) - set(found))
        request.asked = []
        self._fetch(request_id, request, found)

    def _fetch(self, request_id: str, request: HostedRequest, found: list[bytes]) -> None:
        keys: list[bytes] = []
        slots: list[int] = []
        for key in found:
            if key in self._fetching or key in self._storing:
                continue  # for another request, or by one
            slot = self._claim(key)
            if slot is not None:
                keys.append(key)
                slots.append(slot)
            elif self._residency.find(key) is None:
                request.missed.add(key)
        if keys and self._under_way is not None:
            self._fetching.update(dict.fromkeys(keys, self._clock()))
            self._under_way.fetch(request_id, keys, slots, self._generation.tag)

    def _claim(self, key: bytes) -> int | None:
        """A slot to fill, with a reference; None: no room, or the block is in one already."""
        claim = self.pool.claim(key)
        if claim is None or claim.fresh:
            return None if claim is None else claim.slot
        # It found no room among the resident ones before, and its store has not ended yet.
        self._admit(key, claim.slot)
        self.pool.release(claim.slot)
        return None

    def prepare_load(self, request_id: str, blocks: Iterable[bytes]) -> list[int]:
        """The slots of blocks that were hits, each to be loaded once; they stay until it has."""
        keys = [self._generation.key(block) for block in blocks]
        request = self._requests.setdefault(request_id, HostedRequest())
        slots = []
        for key in keys:
            request.blocks.number(key)
            slot = self._residency.find(key)
            if slot is None:
                slot = request.pinned.get(key)  # the tier has failed since
            assert slot is not None, "a block to load that was no hit"
            self.pool.retain(slot)
            self._issued[slot] += 1
            self._loading.setdefault(key, []).append(slot)
            slots.append(slot)
        self._residency.touch(keys)
        self._unpin(request_id)
        return slots

    def complete_load(self, blocks: Iterable[bytes]) -> None:
        """These were loaded on all ranks."""
        for key in map(self._generation.key, blocks):
            self.pool.release(self._loading[key].pop())
            if not self._loading[key]:
                del self._loading[key]

    def came_from_store(self, request_id: str, block: bytes) -> bool:
        """Whether a hit of this request was fetched for it."""
        request = self._requests.get(request_id)
        return request is not None and self._generation.key(block) in request.fetched

    def touch(self, blocks: Sequence[bytes]) -> None:
        """Count these blocks as used now, the first of them most."""
        self._residency.touch([self._generation.key(block) for block in blocks])

    # -- storing -----------------------------------------------------------------------------

    def prepare_store(
        self, request_id: str, blocks: Iterable[bytes]
    ) -> list[tuple[bytes, bytes, int]]:
        """(block, key, slot) of each that is to be gathered; not those that are held or have no
        room. A request's blocks are given in order, those of one step at a time."""
        prefix = self._requests.setdefault(request_id, HostedRequest()).blocks
        orders = []
        for block in blocks:
            key = self._generation.key(block)
            number = prefix.number(key)
            if key in self._storing or key in self._fetching:
                continue
            if self._residency.find(key) is not None:
                self._residency.touch([key])
                continue
            slot = self._claim(key)
            if slot is None:
                self.dropped += self._residency.find(key) is None
                continue
            self._storing[key] = Storing(slot, prefix, number)
            self._issued[slot] += 1
            orders.append((block, key, slot))
        prefix.order.under_way += bool(orders)
        return orders

    def complete_store(self, blocks: Iterable[bytes], success: bool) -> None:
        """These, all of one request, were gathered on all ranks, where their slots say so; now feed
        the store.

        The engine names them in no order. The first are kept last, so that of a prefix the tail
        goes first.
        """
        done = {key: self._storing.pop(key) for key in map(self._generation.key, blocks)}
        if not done:
            return
        ordered = sorted(done, key=lambda key: done[key].number)
        prefix = done[ordered[0]].prefix
        heads = nearest_heads(self._residency, prefix.keys, [done[key].number for key in ordered])
        good: list[bytes] = []
        for key in reversed(ordered):
            slot = done[key].slot
            if success and all(region.holds(slot, key) for region in self._regions):
                self._admit(key, slot, heads.get(key))
                good.append(key)
            else:
                self.pool.release(slot)
        good.reverse()
        self._write_through(good, [done[key].slot for key in good])
        prefix.order.ended(len(done) if len(done) == len(prefix.keys) else None)
        self._settle(prefix)

    def _settle(self, prefix: Prefix) -> None:
        """In the store, let the head of what was stored in steps be the last to go."""
        if self._under_way is not None and prefix.order.settle(len(prefix.keys)):
            self._under_way.touch(list(prefix.keys), self._generation.tag)

    def _admit(self, key: bytes, slot: int, head: bytes | None = None) -> None:
        """Keep a block in host memory, if there is room, to go before the one of key `head`."""
        if self._residency.find(key) is not None:
            return
        self._residency.admit(key, slot, None if head is None else self._residency.find(head))
        if self._residency.find(key) is not None:
            self._note(key, in_host=True, stored=True)

    def _note(self, key: bytes, *, in_host: bool, stored: bool) -> None:
        if self._events and self._generation.made(key):
            self._happened.append(Happened(self._generation.block(key), in_host, stored))

    def take_happened(self) -> list[Happened]:
        """What came and went since the last call, in order."""
        happened, self._happened = self._happened, []
        return happened

    def _write_through(self, keys: list[bytes], slots: list[int]) -> None:
        """Give those the store wants to it, along with the references of their slots."""
        if self._manager is None or self._under_way is None:
            for slot in slots:
                self.pool.release(slot)
            return
        wanted = self._manager.wants(keys)
        room = max(1, self.pool.num_slots // 2) - self._under_way.blocks_being_put
        given: list[tuple[bytes, int]] = []
        for key, slot, want in zip(keys, slots, wanted, strict=True):
            if want and len(given) < room:
                given.append((key, slot))
            else:
                self.dropped += want
                self.pool.release(slot)
        if given:
            keys, slots = [key for key, _ in given], [slot for _, slot in given]
            self._under_way.put(keys, slots, self._generation.tag)

    # -- ends --------------------------------------------------------------------------------

    def _reap(self) -> None:
        if self._manager is None or self._under_way is None:
            return
        for ended in self._under_way.take_ended():
            if ended.request_id is None:
                self._stored(self._manager, ended)
            else:
                self._fetched(self._manager, ended, self._requests.get(ended.request_id))

    def _fetched(
        self, manager: StoreManager, fetch: Transfer, request: HostedRequest | None
    ) -> None:
        for key, slot, good in zip(fetch.keys, fetch.slots, fetch.outcome(), strict=True):
            del self._fetching[key]
            ours = self._generation.made(key)
            if good and ours:
                self._admit(key, slot)
            else:
                manager.discard(key)
                self._note(key, in_host=False, stored=False)
            if request is not None and ours:
                if self._residency.find(key) is None:
                    request.missed.add(key)
                else:
                    self._pin(request, key, slot)
                    request.fetched.add(key)
            self.pool.release(slot)

    def _stored(self, manager: StoreManager, put: Transfer) -> None:
        for key, slot, good in zip(put.keys, put.slots, put.outcome(), strict=True):
            if self._generation.made(key):
                if manager.complete_store(key, slot, good, None):
                    self._note(key, in_host=False, stored=True)
            elif put.generation:  # blocks without one stay: others may use them
                manager.drop([key], put.generation)
            self.pool.release(slot)

    def _unpin(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            for slot in request.pinned.values():
                self.pool.release(slot)
            request.pinned.clear()

    def request_finished(self, request_id: str) -> None:
        """Drop what is kept for a request; its transfers under way end on their own."""
        self._unpin(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.blocks.order.finished = True
            self._settle(request.blocks)
        if self._manager is not None:
            self._manager.forget_request(request_id)

    def reset(self) -> None:
        """Never again find what was stored so far.

        The engine forgets its transfers under way and tells nobody of their end, so their slots
        are used again only when every worker's marks say that they have ended.
        """
        self._unquiet += [one.slot for one in self._storing.values()]
        for slots in self._loading.values():
            self._unquiet += slots
        self._storing.clear()
        self._loading.clear()
        for request_id in self._requests:
            self._unpin(request_id)
            self._requests[request_id] = HostedRequest()
        self._residency.clear()
        self._happened.clear()
        if self._manager is not None:
            self._manager.reset()
        over = self._generation.renew()
        if self._manager is not None:
            self._manager.clear(over)

    def _release_if_quiet(self, slot: int) -> bool:
        if any(region.ended(slot) < self._issued[slot] for region in self._regions):
            return False
        self.pool.release(slot)
        return True

    def close(self) -> None:
        """Let puts under way end, within a limit, and release everything."""
        if self._late is not None:
            self._late.close()
        if self._under_way is not None:
            self._under_way.close()
        if self._manager is not None:
            self._manager.close()
        for region in self._regions:
            region.close()
