"""Who gets a slot: grow within the capacity, else evict what was used longest ago.

All of it happens inside one edit. Disk space goes before the slot is free in the index, and
comes before the slot is claimed for good, so the files never take more than the index counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

from tiers.disk.edit import Edit
from tiers.disk.failures import NO_SPACE
from tiers.disk.rows import Slot
from tiers.disk.slab import Slabs

INDEX_MARGIN = 8 << 20
"""Bytes of the file system left free: on a full disk even an eviction could not be committed."""


def take(edit: Edit, slabs: Slabs, size: int, batch: Collection[bytes]) -> Slot | None:
    """Reserve a slot with disk space behind it; None if evicting all but `batch` gives none."""
    if size > edit.capacity:
        return None
    slot = _grow(edit, slabs, size)
    while slot is None:
        victim = edit.oldest(batch)
        if victim is None:
            return None
        slot = edit.retire(victim)
        if slot.size == size and edit.used <= edit.capacity:
            return slot
        give_back(edit, slabs, slot)
        if edit.used + size > edit.capacity:
            slot = None
        elif (slot := _grow(edit, slabs, size)) is None:
            return None  # the file system is full of other things: evicting more won't help
    return slot


def _grow(edit: Edit, slabs: Slabs, size: int) -> Slot | None:
    slab = slabs[size]
    if edit.used + size > edit.capacity or slab.room() < size + INDEX_MARGIN:
        return None
    slot = edit.claim(size)
    try:
        slab.allocate(slot.number)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        give_back(edit, slabs, slot)
        return None
    return slot


def give_back(edit: Edit, slabs: Slabs, slot: Slot) -> None:
    """Free a reserved slot and its disk space."""
    slabs[slot.size].punch([slot.number])
    edit.vacate(slot)


def shrink(edit: Edit, slabs: Slabs, capacity: int) -> None:
    """Set the capacity; evict down to it. The last process to open the tier decides."""
    edit.capacity = capacity
    while edit.used > capacity and (victim := edit.oldest(())) is not None:
        give_back(edit, slabs, edit.retire(victim))


def reclaim(edit: Edit, slabs: Slabs, alive: Collection[bytes]) -> int:
    """Free what dead owners had reserved, and space that a killed edit left behind; how many."""
    orphans = [slot for slot, owner in edit.reservations().items() if owner not in alive]
    for slot in orphans:
        give_back(edit, slabs, slot)
    lengths = edit.lengths()
    for size in slabs.on_disk():
        slabs[size].truncate(lengths.get(size, 0))
    for size, slots in groupby(edit.free(), key=lambda slot: slot.size):
        slabs[size].punch(slot.number for slot in slots)
    return len(orphans)


def lengthen(edit: Edit, slabs: Slabs, sizes: Iterable[int]) -> None:
    """Let slab files be as long as the index says: the machine went down before they grew. The
    slots' blocks are lost, which their records, or rather the lack of them, will tell."""
    lengths = edit.lengths()
    for size in sizes:
        for number in range(slabs[size].slots(), lengths[size]):
            slabs[size].allocate(number)


def missing(edit: Edit, slabs: Slabs) -> list[int]:
    """Slot sizes whose slab file is gone or cut."""
    return [size for size, length in edit.lengths().items() if slabs[size].slots() < length]
