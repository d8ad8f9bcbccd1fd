"""The host pool: fixed slots of host memory through which every block enters and leaves.

Its two halves never share memory: `SlotPool` is the scheduler's bookkeeping of who uses which
slot; `SlotMemory` is each worker's bytes. A slot that anything still reads or writes has a
reference in the bookkeeping, so the scheduler never gives it away.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Claim(NamedTuple):
    """A slot taken for a key; `fresh` says that its bytes must still be gathered."""

    slot: int
    fresh: bool


class SlotPool:
    """Which slot holds which key, and how many readers and writers each slot has.

    Used by the scheduler's thread alone. A slot with no reference is free. A resident block is
    one whose tier keeps a reference of its own (see `Residency`).

    All it keeps is arrays, and dicts of bytes and ints: what Python's garbage collector does not
    look at, however many slots there are.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = array("q", range(num_slots - 1, -1, -1))
        self._refs = array("q", bytes(8 * num_slots))
        self._keys: dict[int, bytes] = {}
        self._slots: dict[bytes, int] = {}
        self._evictors: list[Callable[[], bool]] = []

    def add_evictor(self, evict_one: Callable[[], bool]) -> None:
        """Register what is asked, when no slot is free, to give up one resident block."""
        self._evictors.append(evict_one)

    def claim(self, key: bytes) -> Claim | None:
        """Take one reference on the slot of `key`, a new slot if it has none; None: no room."""
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
        """Whose block the slot holds, or None."""
        return self._keys.get(slot)

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        """The slot of each of these keys, resident or on its way, or None."""
        return list(map(self._slots.get, keys))

    def retain(self, slot: int) -> None:
        """Take one more reference on a slot in use."""
        assert self._refs[slot] > 0, f"slot {slot} is free"
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """Give one reference back; the last one frees the slot."""
        assert self._refs[slot] > 0, f"slot {slot} is free"
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self.forget(slot)
            self._free.append(slot)

    def forget(self, slot: int) -> None:
        """Part the slot from its key: a later claim of the key gets another slot."""
        key = self._keys.pop(slot, None)
        if key is not None:
            del self._slots[key]

    def references(self, slot: int) -> int:
        """How many references the slot has now."""
        return self._refs[slot]

    @property
    def in_use(self) -> int:
        """Slots with at least one reference."""
        return self.num_slots - len(self._free)


class Slots(Protocol):
    """What a host tier sees of the pool's slots; used by the scheduler's thread alone."""

    num_slots: int

    def add_evictor(self, evict_one: Callable[[], bool]) -> None:
        """Register what is asked, when no slot is free, to give up one resident block; True: it
        has. Without it, blocks that the tier keeps never make room for others."""
        ...

    def key(self, slot: int) -> bytes | None:
        """Whose block the slot holds, or None."""
        ...

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        """The slot of each of these keys, resident or on its way, or None."""
        ...

    def references(self, slot: int) -> int:
        """How many references the slot has now. A resident one with more than its own is being
        copied and must not be evicted."""
        ...

    def retain(self, slot: int) -> None:
        """Take the tier's one reference on a slot in use, so that its block stays."""
        ...

    def release(self, slot: int) -> None:
        """Give that reference back."""
        ...


class Residency(Protocol):
    """Which blocks a host tier keeps in the pool; used by the scheduler's thread alone.

    Each resident block holds one reference on its slot. `on_evict` is told the key of each block
    given up for room. A prefix's blocks are admitted its first last, and touched its first first:
    the head of a prefix must outlive its tail, which is of no use without it.
    """

    on_evict: Callable[[bytes], None] | None

    def find(self, key: bytes) -> int | None:
        """The slot of a resident block, or None."""
        ...

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        """The slot of each of these blocks, or None."""
        ...

    def admit(self, key: bytes, slot: int, head: int | None = None) -> None:
        """Make a gathered block resident, evicting as the capacity demands.

        It should go before the resident block in slot `head`, the nearest before it in its prefix.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> list[int | None]:
        """Count these blocks as used now, the first of them most; the slot of each, or None."""
        ...

    def discard(self, key: bytes) -> None:
        """Stop keeping this block; unknown keys are ignored."""
        ...

    def clear(self) -> list[bytes]:
        """Stop keeping any block; the keys of those that were kept."""
        ...

    def __len__(self) -> int: ...
