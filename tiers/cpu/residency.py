"""SlotResidency: the common part of the CPU tier's eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tiers.cpu.queues import NOWHERE, SlotQueues
from tiers.host.slots import Slots


class SlotResidency(ABC):
    """A Residency; a policy says in which order its blocks go.

    A slot is resident if it is in one of the policy's queues; whose block it holds, the pool knows.
    """

    SCAN = 128
    """Blocks looked at for one eviction, so that a pool in which all are in use costs little."""

    def __init__(self, pool: Slots, max_slots: int, queues: int) -> None:
        self.on_evict: Callable[[bytes], None] | None = None
        self._pool = pool
        self._max_slots = max_slots
        self._queues = SlotQueues(pool.num_slots, queues)
        pool.add_evictor(self.evict_one)

    # -- what a policy says ------------------------------------------------------------------

    @abstractmethod
    def _used(self, slots: Sequence[int]) -> None:
        """Count these resident slots as used now, the last of them most."""

    @abstractmethod
    def _enter(self, key: bytes, slot: int, head: int | None) -> None:
        """Put the slot of a block that was not resident into a queue: before `head`, where the
        policy gives the two the same right to stay, else at the end."""

    @abstractmethod
    def _next(self) -> int:
        """The slot that is to go next; there is a resident one."""

    def _evicted(self, key: bytes, queue: int) -> None:
        """Note that a block has gone from a queue for room."""

    # -- what is common ----------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        return self.find_all([key])[0]

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        where = self._queues.where
        slots = self._pool.find_all(keys)
        return [slot if slot is not None and where[slot] else None for slot in slots]

    def admit(self, key: bytes, slot: int, head: int | None = None) -> None:
        """Keep the block in `slot`, unless it is kept already, or the tier is full and all its
        blocks are in use or the next to go is `head`, or the slot was parted from the key."""
        if self._queues.where[slot] != NOWHERE or self._pool.key(slot) != key:
            return
        if len(self._queues) >= self._max_slots:
            victim = self._victim()
            if victim is None or victim == head:
                return
            self._evict(victim)
        self._pool.retain(slot)
        self._enter(key, slot, head)

    def touch(self, keys: Sequence[bytes]) -> list[int | None]:
        slots = self.find_all(keys)
        self._used([slot for slot in reversed(slots) if slot is not None])
        return slots

    def discard(self, key: bytes) -> None:
        slot = self.find(key)
        if slot is not None:
            self._queues.remove(slot)
            self._pool.release(slot)

    def clear(self) -> list[bytes]:
        """Stop keeping any block; the slot of one that is being copied goes with its last user."""
        keys = [key for slot in self._queues.slots() if (key := self._pool.key(slot)) is not None]
        for key in keys:
            self.discard(key)
        return keys

    def evict_one(self) -> bool:
        """Give up the block that is next to go of those that nothing is copying, if any."""
        victim = self._victim()
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _victim(self) -> int | None:
        """The slot of the block that is next to go. Blocks in use that are passed by go to the end
        of their queue, so that the next call looks further."""
        for _ in range(min(self.SCAN, len(self._queues))):
            slot = self._next()
            if self._pool.references(slot) == 1:
                return slot
            self._queues.move(slot, self._queues.where[slot])
        return None

    def _evict(self, slot: int) -> None:
        key = self._pool.key(slot)
        assert key is not None, f"resident slot {slot} has no key"
        queue = self._queues.where[slot]
        self._queues.remove(slot)
        self._pool.release(slot)
        self._evicted(key, queue)
        if self.on_evict is not None:
            self.on_evict(key)

    def __len__(self) -> int:
        return len(self._queues)
