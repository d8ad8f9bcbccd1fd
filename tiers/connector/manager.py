"""A tier as the scheduler sees it: what it holds, and what goes in and out.

Two kinds: `HostManager` keeps blocks in the host pool, `StoreManager` asks a store. Used by the
scheduler's thread alone; nothing here waits.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from tiers.connector.policy import WAVE
from tiers.pool import Residency, SlotPool
from tiers.store import Clear, LocalIndex, TierStore, Touch


class TierManager(Protocol):
    """The scheduler's side of one tier."""

    completes_on_gather: bool
    """Whether stores end as soon as the slots are filled, so that the engine should step on."""
    on_evict: Callable[[bytes], None] | None
    """Told of each block that the tier gave up for room, if it knows."""

    def lookup(self, request_id: str, first: int, keys: Sequence[bytes]) -> int | None:
        """How many leading `keys` the tier holds; None: not known yet, ask again.

        `first` is the block index of `keys[0]` in its request.
        """
        ...

    def held(
        self, request_id: str, first: int, keys: Sequence[bytes], count: int
    ) -> list[bool] | None:
        """Which of the first `count` keys the tier holds, gaps or not; None: ask again.

        `first` is as for `lookup`; `keys` are all that the request may yet be asked for.
        """
        ...

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Pin these blocks; the slot of each that is in the host pool."""
        ...

    def complete_load(self, keys: Sequence[bytes], slots: Sequence[int | None]) -> None:
        """Unpin blocks of an ended load."""
        ...

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the tier should be given each block; those it has count as used."""
        ...

    def complete_store(self, key: bytes, slot: int, stored: bool) -> bool:
        """Note how storing a block ended; the slot is still referenced. Whether it is held now."""
        ...

    def discard(self, key: bytes) -> None:
        """Forget a block that failed to load."""
        ...

    def drop(self, key: bytes) -> None:
        """Give up a block that was stored for a generation that is over."""
        ...

    def reset(self) -> list[bytes]:
        """Give up all blocks, and all answers; the keys of those that are known to be gone.

        The caller makes other keys from now on, so that nothing depends on what is left.
        """
        ...

    def expect(self, request_id: str, keys: Sequence[bytes]) -> None:
        """A request with these blocks will be looked up soon."""
        ...

    def forget_request(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class HostManager:
    """A tier whose blocks stay in the host pool."""

    completes_on_gather = True

    def __init__(self, residency: Residency, pool: SlotPool) -> None:
        self.on_evict: Callable[[bytes], None] | None = None
        self._residency = residency
        self._pool = pool
        residency.on_evict = self._evicted

    def _evicted(self, key: bytes) -> None:
        if self.on_evict is not None:
            self.on_evict(key)

    def lookup(self, request_id: str, first: int, keys: Sequence[bytes]) -> int:
        """Count leading resident blocks."""
        for count, key in enumerate(keys):
            if self._residency.find(key) is None:
                return count
        return len(keys)

    def held(self, request_id: str, first: int, keys: Sequence[bytes], count: int) -> list[bool]:
        """Look each of them up."""
        return [self._residency.find(key) is not None for key in keys[:count]]

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Take a reference on each resident slot, so that eviction passes it by."""
        slots = [self._residency.find(key) for key in keys]
        for slot in slots:
            if slot is not None:
                self._pool.retain(slot)
        self._residency.touch(keys)
        return slots

    def complete_load(self, keys: Sequence[bytes], slots: Sequence[int | None]) -> None:
        """Give the references back."""
        for slot in slots:
            if slot is not None:
                self._pool.release(slot)

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Want what is not resident."""
        held = [self._residency.find(key) is not None for key in keys]
        self._residency.touch([key for key, has in zip(keys, held, strict=True) if has])
        return [not has for has in held]

    def complete_store(self, key: bytes, slot: int, stored: bool) -> bool:
        """Make a gathered block resident, if there is room."""
        if stored and self._residency.find(key) is None:
            self._residency.admit(key, slot)
        return self._residency.find(key) is not None

    def discard(self, key: bytes) -> None:
        """Stop keeping the block."""
        self._residency.discard(key)

    def drop(self, key: bytes) -> None:
        """Its slot goes with the store's reference."""

    def reset(self) -> list[bytes]:
        """Stop keeping all blocks; the slot of one that is being loaded goes when that ends."""
        return self._residency.clear()

    def expect(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Answers come from memory."""

    def forget_request(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def close(self) -> None:
        """The pool goes with the connector."""


class _Lookup(NamedTuple):
    first: int
    answer: Future[list[bool]]
    asked: float


class StoreManager:
    """A tier behind a store, asked on this thread where it answers from memory, else behind it.

    `namespaces`: one per rank; a block is held only where every rank's part is.
    """

    completes_on_gather = False
    RECENT = 1 << 17
    """Keys remembered as held, so that a store behind a network is not offered them again."""
    RECENT_SECONDS = 60.0
    """How long they are; then an offer renews a time to live, or replaces what was evicted."""
    LOOKUP_DEADLINE = 1.0
    """Seconds after which a lookup under way counts as a miss."""
    CLEAR_DEADLINE = 10.0
    """Seconds that closing waits for a store to be cleared."""
    LOOKUP_LIFETIME = 0.5
    """Seconds for which an answer holds while its request waits to run."""

    def __init__(
        self,
        store: TierStore,
        namespaces: Sequence[bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_evict: Callable[[bytes], None] | None = None
        self._store = store
        self._clear = store if isinstance(store, Clear) else None
        self._index = store if isinstance(store, LocalIndex) else None
        self._touch = store if isinstance(store, Touch) else None
        self._namespaces = namespaces
        self._clock = clock
        self._recent: OrderedDict[bytes, float] = OrderedDict()
        self._lookups: dict[str, _Lookup] = {}
        self._clearing: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtiers-lookup")

    def lookup(self, request_id: str, first: int, keys: Sequence[bytes]) -> int | None:
        """Count leading held blocks, or begin to find out."""
        if self._index is not None:
            return self._peek_prefix(self._index, keys)
        held = self._answer(request_id, first, keys)
        if held is None:
            return None
        return held.index(False) if False in held else len(held)

    def held(
        self, request_id: str, first: int, keys: Sequence[bytes], count: int
    ) -> list[bool] | None:
        """Look up `count` of them in the index, or begin to find out about all."""
        if self._index is not None:
            return self._on_all_ranks(self._index.peek, keys[:count])
        held = self._answer(request_id, first, keys)
        if held is None:
            return None
        return held[:count] + [False] * (count - len(held))

    def _answer(self, request_id: str, first: int, keys: Sequence[bytes]) -> list[bool] | None:
        """What the store said of `keys`, leading ones at least; None: nothing yet."""
        now = self._clock()
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.first > first or self._is_stale(lookup, now):
            answer = self._thread.submit(self._ask, list(keys))
            lookup = self._lookups[request_id] = _Lookup(first, answer, now)
        if lookup.answer.done():
            return lookup.answer.result()[first - lookup.first :]
        return None if now < lookup.asked + self.LOOKUP_DEADLINE else []

    def _is_stale(self, lookup: _Lookup, now: float) -> bool:
        return lookup.answer.done() and now > lookup.asked + self.LOOKUP_LIFETIME

    def _peek_prefix(self, index: LocalIndex, keys: Sequence[bytes]) -> int:
        for start in range(0, len(keys), WAVE):
            part = keys[start : start + WAVE]
            held = self._on_all_ranks(index.peek, part)
            if not all(held):
                return start + held.index(False)
        return len(keys)

    def _ask(self, keys: list[bytes]) -> list[bool]:
        return self._on_all_ranks(self._store.has, keys)

    def _on_all_ranks(
        self, has: Callable[[Sequence[bytes]], list[bool]], keys: Sequence[bytes]
    ) -> list[bool]:
        ranks = [has([space + key for key in keys]) for space in self._namespaces]
        return [all(held) for held in zip(*ranks, strict=True)]

    def _remember(self, key: bytes) -> None:
        if self._index is not None:
            return
        self._recent[key] = self._clock() + self.RECENT_SECONDS
        self._recent.move_to_end(key)
        if len(self._recent) > self.RECENT:
            self._recent.popitem(last=False)

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Stores keep their blocks elsewhere; one that goes before it is read is a miss."""
        for key in keys:
            self._remember(key)
        return [None] * len(keys)

    def complete_load(self, keys: Sequence[bytes], slots: Sequence[int | None]) -> None:
        """Nothing was pinned."""

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Want what is not known to be held; the store itself skips what it turns out to have."""
        if self._index is None:
            now = self._clock()
            return [self._recent.get(key, now) <= now for key in keys]
        held = self._on_all_ranks(self._index.peek, keys)
        if self._touch is not None:
            known = [key for key, has in zip(keys, held, strict=True) if has]
            for space in self._namespaces:
                self._touch.touch([space + key for key in known])
        return [not has for has in held]

    def complete_store(self, key: bytes, slot: int, stored: bool) -> bool:
        """Remember what is held now."""
        if stored:
            self._remember(key)
        return stored

    def discard(self, key: bytes) -> None:
        """Forget that the block is held."""
        self._recent.pop(key, None)

    def drop(self, key: bytes) -> None:
        """Drop it, in the background, from a store of this host's own.

        In a shared store it stays: replicas that were not reset may still use it.
        """
        if self._clear is not None:
            keys = [space + key for space in self._namespaces]
            self._clearing.append(self._thread.submit(self._store.drop, keys))

    def reset(self) -> list[bytes]:
        """Forget all answers, and drop, in the background, all blocks of a store of this host's
        own; those of a shared one stay, as with `drop`."""
        self._recent.clear()
        self._lookups.clear()
        self._clearing = [future for future in self._clearing if not future.done()]
        if self._clear is not None:
            for space in self._namespaces:
                self._clearing.append(self._thread.submit(self._clear.clear, space))
        return []

    def expect(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Begin to ask a store behind a network, so that its answer is there in time."""
        if self._index is None and request_id not in self._lookups:
            self._answer(request_id, 0, keys)

    def forget_request(self, request_id: str) -> None:
        """Drop the request's lookup; one under way ends unread."""
        self._lookups.pop(request_id, None)

    def close(self) -> None:
        """Close the store, once it is cleared as a reset has asked."""
        wait(self._clearing, self.CLEAR_DEADLINE)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._store.close()
