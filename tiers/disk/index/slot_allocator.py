"""Which block does the disk tier evict? Past its capacity the one whose use is longest ago.

All of it happens inside one edit, which all processes wait for, so long work is done in steps. A
slot's disk space is allocated before the index counts the slot as reserved, and given back as soon
as the edit that frees it is committed: a killed process leaves space behind free slots at most.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice, repeat

from spec.fields import format_size
from tiers.disk.index.edit import MAX_SKIPPED, Edit, Slot
from tiers.disk.slab import NO_SPACE, Slabs
from tiers.store import Usage, is_use

_MAX_USES = 1 << 16
"""Blocks whose uses are remembered until they are written down; older ones are forgotten."""

USE_BATCH = 512
"""Blocks whose uses one edit writes down, in 2 ms: all processes wait for it."""


class PendingUses:
    """Index keys in the order of their last use. Any thread may record; others are for edits."""

    def __init__(self) -> None:
        self.stamp = 0
        """The last stamp of the index that this process knows: blocks used from then on were used
        after all blocks that have it or an older one."""
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        # Without it a key could be taken while it moves to the end. Held for memory's time alone.
        self._lock = threading.Lock()

    def record(self, keys: Sequence[bytes]) -> None:
        """Remember a use of each of these index keys, the first key the most recent."""
        if not is_use.get():
            return
        with self._lock:
            for key in reversed(keys):
                self._uses[key] = self.stamp
                self._uses.move_to_end(key)
            for _ in repeat(None, len(self._uses) - _MAX_USES):
                self._uses.popitem(last=False)

    def take(self) -> list[bytes]:
        """Remove and return the keys whose uses are the oldest, `USE_BATCH` at most."""
        with self._lock:
            return [self._uses.popitem(last=False)[0] for _ in range(min(USE_BATCH, len(self)))]

    def take_before(self, stamp: float) -> tuple[bytes, int] | None:
        """Remove and return the key whose use is the oldest, and the index's last stamp when it was
        used, if that is less than `stamp`."""
        with self._lock:
            if self._uses and next(iter(self._uses.values())) < stamp:
                return self._uses.popitem(last=False)
            return None

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)


INDEX_MARGIN = 6 << 20
"""Bytes of the file system left free for the index, beside what is allocated to it: where it can't
grow, even an eviction could not be committed."""

EVICT_BATCH = 128
"""Blocks evicted or freed by one step: 4 ms."""

_REPLACED_OF = 16


def shortage(usage: Usage, capacity: int, free: int) -> str:
    """Why a tier can't hold the capacity that its process set; empty: it can. `free`: bytes of
    the file system."""
    set_now = usage.capacity or 0
    if set_now < capacity:
        return (
            f"another engine on its folder has set capacity {format_size(set_now)}, for both, in "
            f"place of {format_size(capacity)}; let all engines on it say the same"
        )
    room = max(0, usage.used + free - INDEX_MARGIN)
    if room < set_now:
        return (
            f"its file system has room for {format_size(room)} of its capacity "
            f"{format_size(set_now)}; make room, or lower capacity"
        )
    return ""


class Space:
    """Disk space for the slots of one edit. At the end of a file one call allocates it for all
    blocks of the batch that may follow: a call and a look at the file system for each took half of
    what storing a small block takes. A killed edit leaves what it did not use; see `truncate`."""

    def __init__(self, slabs: Slabs, sizes: Iterable[int]) -> None:
        """`sizes`: slot bytes of each block of the batch that is to be stored."""
        self._slabs = slabs
        self._left = Counter(sizes)
        self._free: int | None = None
        self._ahead: dict[int, range] = {}

    def begin(self, size: int) -> None:
        """The next block of the batch is one of this size."""
        self._left[size] -= 1

    def has(self, size: int) -> bool:
        """Whether the file system has room for one more slot, and the index."""
        if self._free is None:
            self._free = self._slabs[size].free_bytes()
        return self._free >= size + INDEX_MARGIN

    def allocate(self, edit: Edit, slot: Slot) -> bool:
        """Allocate space for a slot that is reserved; whether there was any."""
        size, number = slot
        if number not in self._ahead.get(size, ()):
            room = edit.capacity - edit.used, (self._free or 0) - INDEX_MARGIN - size
            more = min(self._left[size], *(most // size for most in room))
            ahead = 1 + max(0, more) if edit.is_last(slot) else 1
            # A quota does not show in what is free: where not all find room, one may.
            if not any(self._try(slot, count) for count in sorted({ahead, 1}, reverse=True)):
                return False
        self._free = (self._free or 0) - size
        return True

    def _try(self, slot: Slot, count: int) -> bool:
        try:
            self._slabs[slot.size].allocate(slot.number, count)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return False
        self._ahead[slot.size] = range(slot.number, slot.number + count)
        return True


def allocate(
    edit: Edit, space: Space, size: int, batch: Collection[bytes], uses: PendingUses
) -> Slot | None:
    """Reserve a slot of `size` bytes with disk space behind it, evicting blocks other than those of
    `batch` if need be. None: there is no room without them."""
    space.begin(size)
    if size > edit.capacity:
        return None
    if edit.used > edit.capacity:
        return _replace(edit, size, batch, uses)
    slot = _grow(edit, space, size)
    while slot is None:
        if (slot := _evict(edit, batch, uses)) is None:
            return None
        if slot.size == size and edit.used <= edit.capacity:
            return slot
        edit.vacate(slot)
        if edit.used + size > edit.capacity:
            slot = None
        elif (slot := _grow(edit, space, size)) is None:
            return None  # a full file system gets no space from evictions before the commit
    return slot


def _oldest(edit: Edit, batch: Collection[bytes], uses: PendingUses) -> bytes | None:
    """Return the block outside `batch` whose use is longest ago, or None; uses that are yet to be
    written to the index count."""
    written, stamp = edit.next_oldest((batch, uses)) or (None, math.inf)
    for key, after in islice(iter(lambda: uses.take_before(stamp), None), MAX_SKIPPED):
        entry = None if key in batch else edit.entry(key)
        if entry is not None and entry.stamp <= after:
            return key
    return written or edit.oldest(batch)


def _replace(edit: Edit, size: int, batch: Collection[bytes], uses: PendingUses) -> Slot | None:
    """Reserve the slot of an evicted block, in a tier that has yet to shrink to its capacity, which
    takes too long for one edit. None: the few oldest blocks have slots of another size."""
    for _ in range(_REPLACED_OF):
        if (slot := _evict(edit, batch, uses)) is None:
            return None
        if slot.size == size:
            return slot
        edit.vacate(slot)
    return None


def _grow(edit: Edit, space: Space, size: int) -> Slot | None:
    if edit.used + size > edit.capacity or not space.has(size):
        return None
    slot = edit.claim(size)
    if not space.allocate(edit, slot):
        edit.vacate(slot)
        return None
    return slot


def _evict(edit: Edit, batch: Collection[bytes], uses: PendingUses) -> Slot | None:
    """Evict the block outside `batch` whose use is longest ago; its slot is reserved now."""
    if (victim := _oldest(edit, batch, uses)) is None:
        return None
    edit.evicted += 1
    return edit.retire(victim)


def shrink(edit: Edit, uses: PendingUses) -> bool:
    """Evict some of the blocks beyond the capacity; return whether more are."""
    for _ in range(EVICT_BATCH):
        if edit.used <= edit.capacity:
            return False
        if (slot := _evict(edit, (), uses)) is None:
            return False
        edit.vacate(slot)
    return bool(edit.used > edit.capacity)
