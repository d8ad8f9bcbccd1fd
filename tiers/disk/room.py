"""Who gets a slot: grow within the capacity, else evict what was used longest ago.

All of it happens inside one edit, which all processes wait for: so what there may be much of is
done in steps. Disk space goes before the slot is free in the index, and comes before the slot is
claimed for good, so the files never take more than the index counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby, islice

from tiers.disk.edit import FIRST, Edit
from tiers.disk.failures import NO_SPACE
from tiers.disk.rows import Slot
from tiers.disk.slab import Slabs

INDEX_MARGIN = 8 << 20
"""Bytes of the file system left free: on a full disk even an eviction could not be committed."""

AT_ONCE = 128
"""Blocks evicted or freed by one step: 4 ms."""

_PUNCHED_AT_ONCE = 512
_REPLACED_OF = 16


def take(edit: Edit, slabs: Slabs, size: int, batch: Collection[bytes]) -> Slot | None:
    """Reserve a slot with disk space behind it; None if evicting all but `batch` gives none."""
    if size > edit.capacity:
        return None
    if edit.used > edit.capacity:
        return _replace(edit, slabs, size, batch)
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


def _replace(edit: Edit, slabs: Slabs, size: int, batch: Collection[bytes]) -> Slot | None:
    """Reserve the slot of a block, in a tier that has yet to shrink: evicting until there is room
    would take as long as all of the shrinking. None if the few oldest are of another size."""
    for _ in range(_REPLACED_OF):
        victim = edit.oldest(batch)
        if victim is None:
            return None
        slot = edit.retire(victim)
        if slot.size == size:
            return slot
        give_back(edit, slabs, slot)
    return None


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


def shrink(edit: Edit, slabs: Slabs) -> bool:
    """Evict some of what is beyond the capacity; whether more is."""
    for _ in range(AT_ONCE):
        if edit.used <= edit.capacity:
            return False
        victim = edit.oldest(())
        if victim is None:
            return False
        give_back(edit, slabs, edit.retire(victim))
    return bool(edit.used > edit.capacity)


def reclaim(edit: Edit, slabs: Slabs, orphans: Iterable[tuple[Slot, bytes]]) -> int:
    """Free some of what owners had reserved who are dead now, and take it from `orphans`; how
    many were still theirs."""
    some = [slot for slot, owner in islice(orphans, AT_ONCE) if edit.is_of(owner, slot)]
    for slot in some:
        give_back(edit, slabs, slot)
    return len(some)


def trim(edit: Edit, slabs: Slabs) -> None:
    """Cut slab files to their lengths: a killed edit may have let them grow."""
    lengths = edit.lengths()
    for size in slabs.on_disk():
        slabs[size].truncate(lengths.get(size, 0))


def sweep(edit: Edit, slabs: Slabs, after: Slot = FIRST) -> Slot | None:
    """Give back space that a killed edit left behind some free slots; the last of them, behind
    which to go on, if there are more."""
    some = edit.free(after, _PUNCHED_AT_ONCE)
    for size, slots in groupby(some, key=lambda slot: slot.size):
        slabs[size].punch(slot.number for slot in slots)
    return some[-1] if len(some) == _PUNCHED_AT_ONCE else None


def lengthen(edit: Edit, slabs: Slabs, sizes: Iterable[int]) -> None:
    """Let slab files be as long as the index says: the machine went down before they grew. The
    slots' blocks are lost, which their records, or rather the lack of them, will tell."""
    lengths = edit.lengths()
    for size in sizes:
        there = slabs[size].slots()
        slabs[size].allocate(there, lengths[size] - there)


def missing(edit: Edit, slabs: Slabs) -> list[int]:
    """Slot sizes whose slab file is gone or cut."""
    return [size for size, length in edit.lengths().items() if slabs[size].slots() < length]
