"""The host pool: fixed slots of host memory through which every block enters and leaves.

`SlotPool` is the scheduler's bookkeeping of who uses which slot; `SlotMemory` is each worker's
bytes. They never share memory. A slot that anything reads or writes has a reference in the
bookkeeping, so the scheduler gives it to nobody else. A slot's states, by its references:

    free ──claim──> gathering ──admit──> pinned ──release──> resident
     ^                  │                  ^                  │    │
     ├──release (last)──┘                  └──claim, retain───┘    │
     └───────────────────evict, discard, clear─────────────────────┘

`gathering`: of the store jobs that fill the slot or read it; the last one to release frees it
unless a host tier has admitted the block. `pinned`: of a host tier and of loads or stores that copy
it. `resident`: of the host tier alone; only such a slot may be evicted. A block that a tier drops
while it is pinned keeps its slot until the last copy releases it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Claim(NamedTuple):
    """A slot claimed for a key; `fresh`: its bytes must still be gathered."""

    slot: int
    fresh: bool


class SlotPool:
    """Which slot holds which key, and how many references each slot has (`Slots`). Used by the
    scheduler's thread alone. Keeps only arrays, and dicts of bytes and ints, which Python's garbage
    collector does not traverse."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = array("q", range(num_slots - 1, -1, -1))
        self._refs = array("q", bytes(8 * num_slots))
        self._keys: dict[int, bytes] = {}
        self._slots: dict[bytes, int] = {}
        self._evictors: list[Callable[[], bool]] = []
        self._idle: list[Callable[[int], None]] = []

    def add_evictor(
        self, evict_one: Callable[[], bool], idle: Callable[[int], None] | None = None
    ) -> None:
        self._evictors.append(evict_one)
        if idle is not None:
            self._idle.append(idle)

    def claim(self, key: bytes) -> Claim | None:
        """Take a reference on the slot of `key`, or on a free or evicted one; None: no room."""
        slot = self._slots.get(key)
        if slot is not None:
            self._refs[slot] += 1
            return Claim(slot, fresh=False)
        if not self._free and not any(evict() for evict in self._evictors):
            return None
        slot = self._free.pop()
        self._refs[slot] = 1
        self._keys[slot] = key
        self._slots[key] = slot
        return Claim(slot, fresh=True)

    def key(self, slot: int) -> bytes | None:
        return self._keys.get(slot)

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        return list(map(self._slots.get, keys))

    def retain(self, slot: int) -> None:
        """Take one more reference on a slot that is in use."""
        assert self._refs[slot] > 0, f"slot {slot} is free"
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """Give one reference back; the last one frees the slot."""
        assert self._refs[slot] > 0, f"slot {slot} is free"
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self.forget(slot)
            self._free.append(slot)
        elif self._refs[slot] == 1:
            for idle in self._idle:
                idle(slot)

    def forget(self, slot: int) -> None:
        """Separate the slot from its key: a later claim of the key gets another slot."""
        key = self._keys.pop(slot, None)
        if key is not None:
            del self._slots[key]

    def references(self, slot: int) -> int:
        return self._refs[slot]

    @property
    def in_use(self) -> int:
        """Slots with at least one reference."""
        return self.num_slots - len(self._free)


class Slots(Protocol):
    """What a host tier sees of the pool. Used by the scheduler's thread alone; lives as long as the
    engine's scheduler."""

    num_slots: int

    def add_evictor(
        self, evict_one: Callable[[], bool], idle: Callable[[int], None] | None = None
    ) -> None:
        """Register `evict_one`, which is called when no slot is free: it gives up one resident
        block and returns True, or returns False. `idle` is called with each slot that has one
        reference left: if that is the tier's own, its block may be evicted now."""

    def key(self, slot: int) -> bytes | None:
        """Return the key of the block that the slot holds, or None."""

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the slot of each of these keys, resident or being gathered, or None."""

    def references(self, slot: int) -> int:
        """Return how many references the slot has. A resident slot with more than its tier's own is
        being copied and must not be evicted."""

    def retain(self, slot: int) -> None:
        """Take the tier's one reference on a slot in use, so that its block stays."""

    def release(self, slot: int) -> None:
        """Give the tier's reference back. Without another reference the slot is free."""


class Residency(Protocol):
    """Which blocks a host tier keeps in the pool. Used by the scheduler's thread alone: no method
    may wait. Lives as long as the engine's scheduler.

    What it owes the pool:

    - It calls `pool.add_evictor` when it is made. Without an evictor its blocks never make room for
      others, and a full pool takes no more blocks, of any tier.
    - It holds exactly one reference on the slot of each block that it keeps: `admit` takes it by
      `pool.retain`; eviction, `discard` and `clear` give it back by `pool.release`.
    - It evicts only slots with `pool.references(slot) == 1`, and keeps `max_slots` at most.
    - It calls `on_evict`, if set, with the key of each block that it evicts for room, and no other.

    The head of a prefix must outlive its tail, which is useless without it. Blocks of a prefix are
    admitted head last, and touched head first.
    """

    on_evict: Callable[[bytes], None] | None

    def find(self, key: bytes) -> int | None:
        """Return the slot of a resident block, or None. Not a use."""

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the slot of each block, or None. Not a use."""

    def admit(self, key: bytes, slot: int, predecessor: int | None = None) -> None:
        """Keep the gathered block in `slot`, evicting if the tier is full; it may decline.

        `predecessor`: the slot of the nearest resident block before it in its prefix, which must
        stay longer.
        """

    def touch(self, keys: Sequence[bytes]) -> list[int | None]:
        """Count these blocks as used now, the first as the most recent; return their slots."""

    def discard(self, key: bytes) -> None:
        """Stop keeping this block; unknown keys are ignored."""

    def clear(self) -> list[bytes]:
        """Stop keeping all blocks; return their keys. `on_evict` is not called."""

    def __len__(self) -> int: ...


@runtime_checkable
class Demotes(Protocol):
    """Capability: a host tier takes hints about the next blocks to evict."""

    def demote(self, keys: Sequence[bytes]) -> int:
        """Evict these blocks next, the last of them first, unless they are used again; return how
        many were not next yet."""
