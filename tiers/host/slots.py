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

A pool that is made smaller hands out no slot beyond its new end. Those that are in use there are
vacated step by step: a resident block is moved to a slot before the end, a pinned one stays until
it is released. Then the workers give back their memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

ALIGNMENT = 4096
"""Slots start at multiples of this: what direct I/O asks of addresses, to be safe everywhere."""


def slot_stride(payload_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-payload_bytes // ALIGNMENT) * ALIGNMENT


def slots_within(budget: int, payload_bytes: int, world_size: int) -> int:
    """How many slots each of `world_size` ranks gets of a budget in bytes for all of them."""
    return budget // world_size // slot_stride(payload_bytes)


class Claim(NamedTuple):
    """A slot claimed for a key; `fresh`: its bytes must still be gathered."""

    slot: int
    fresh: bool


IN_USE = 256
"""Slots in use that one search for a free slot passes over at most."""
EVICTIONS = 16
"""Blocks that are evicted at most for one slot: of a pool that is made smaller they may lie in
slots beyond its end."""
LOOKS = 4096
"""Slots beyond the end of which one step finds out whether they are in use, in 0.3 ms."""


class SlotPool:
    """Which slot holds which key, and how many references each slot has. Used by the scheduler's
    thread alone. Keeps only arrays, and dicts of bytes and ints, which Python's garbage collector
    does not traverse before 3.14; from then on a million take it 24 ms, unless frozen."""

    def __init__(self, num_slots: int) -> None:
        self.end = num_slots
        """Slots from this number on are not handed out."""
        self.in_use = self.resizes = 0
        """Slots with at least one reference; how often `resize` was called."""
        self._free = array("q")
        """Slots that were released. They are handed out before those from `_next` on."""
        self._next = 0
        """From this slot on those that are free need not be in `_free`."""
        self._looked, self._waiting = num_slots, deque[int]()
        self._refs = array("q", bytes(8 * num_slots))
        self._keys: dict[int, bytes] = {}
        self._slots: dict[bytes, int] = {}
        # Bound, not methods: they are asked several times for each block that is stored.
        self.key: Callable[[int], bytes | None] = self._keys.get
        self.find: Callable[[bytes], int | None] = self._slots.get
        """The slot of a key, resident or being gathered, or None."""
        self.references: Callable[[int], int] = self._refs.__getitem__
        self._evictors: list[Callable[[], bool]] = []
        self._idle: list[Callable[[int], None]] = []

    def add_evictor(self, evict_one: Callable[[], bool], idle: Callable[[int], None]) -> None:
        """Register `evict_one`, which is called when no slot is free: it gives up one resident
        block and returns True, or returns False. `idle` is called with each slot that has one
        reference left: if that is the tier's own, its block may be evicted now."""
        self._evictors.append(evict_one)
        self._idle.append(idle)

    def claim(self, key: bytes) -> Claim | None:
        """Take a reference on the slot of `key`, or on a free or evicted one; None: no room."""
        slot = self.find(key)
        if is_fresh := slot is None:
            slot = self.reserve()
            if slot is None:
                return None
            self._keys[slot] = key
            self._slots[key] = slot
        else:
            self._refs[slot] += 1
        # As `Claim(slot, is_fresh)`, in a third of the time.
        return tuple.__new__(Claim, (slot, is_fresh))

    def reserve(self) -> int | None:
        """Take a reference on a free or evicted slot, which has no key yet; None: no room."""
        slot = self._find_free()
        for _ in range(EVICTIONS):
            if slot is not None or not any(evict() for evict in self._evictors):
                break
            slot = self._find_free()
        if slot is not None:
            self._refs[slot] = 1
            self.in_use += 1
        return slot

    def _find_free(self) -> int | None:
        if self._free:
            return self._free.pop()
        for slot in range(self._next, min(self._next + IN_USE, self.end)):
            self._next = slot + 1
            if not self._refs[slot]:
                return slot
        return None

    def rename(self, slot: int, key: bytes) -> bool:
        """Let a claimed slot hold another key, unless a slot does so already; whether it does."""
        if key in self._slots:
            return False
        self.forget(slot)
        self._keys[slot] = key
        self._slots[key] = slot
        return True

    def retain(self, slot: int) -> None:
        """Take one more reference on a slot that is in use."""
        assert self._refs[slot] > 0, f"slot {slot} is free"
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """Give one reference back; the last one frees the slot."""
        left = self._refs[slot] - 1
        assert left >= 0, f"slot {slot} is free"
        self._refs[slot] = left
        if left == 0:
            self.forget(slot)
            self.in_use -= 1
            if slot < self.end:
                self._free.append(slot)
        elif left == 1:
            for idle in self._idle:
                idle(slot)

    def forget(self, slot: int) -> None:
        """Separate the slot from its key: a later claim of the key gets another slot."""
        key = self._keys.pop(slot, None)
        if key is not None:
            del self._slots[key]

    @property
    def num_slots(self) -> int:
        """Slots that there are, those beyond the end too until they are vacated."""
        return len(self._refs)

    def move(self, slot: int, target: int) -> None:
        """The key of a slot belongs to `target`, which has none, from now on; both are in use."""
        key = self._keys.pop(slot)
        self._keys[target] = key
        self._slots[key] = target

    # -- another size ------------------------------------------------------------------------

    def resize(self, num_slots: int) -> None:
        """Hand out the slots below `num_slots` alone, which may be more than before. Those that are
        in use beyond it stay so until they are released (see `beyond`)."""
        self.resizes += 1
        if num_slots < self.end:  # `_free` may have some that are beyond it, and many
            self._free, self._next = array("q"), 0
        self.end = num_slots
        self._refs.frombytes(bytes(8 * max(0, num_slots - len(self._refs))))
        self._looked = num_slots
        self._waiting.clear()

    def beyond(self, most: int) -> list[int]:
        """Some slots beyond the end that are in use yet, `most` at most; each time others, as far
        as there are."""
        waiting = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        found = [slot for slot in waiting if self._refs[slot]]
        for slot in range(self._looked, min(self._looked + LOOKS, len(self._refs))):
            if len(found) >= most:
                break
            self._looked = slot + 1
            if self._refs[slot]:
                found.append(slot)
        self._waiting.extend(found)
        return found

    @property
    def is_vacating(self) -> bool:
        """Whether slots beyond the end are, or may be, in use."""
        return self.end < len(self._refs)

    @property
    def is_searching(self) -> bool:
        """Whether some slots beyond the end were not looked at yet."""
        return self._looked < len(self._refs)

    def take_vacated(self) -> int | None:
        """The number of slots, once none beyond it is in use any more; None: some are, or it was
        returned before."""
        if not self.is_vacating or self.is_searching or self._waiting:
            return None
        del self._refs[self.end :]
        return self.end
