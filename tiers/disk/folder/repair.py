"""What is repaired when a folder is opened: slots and disk space that dead processes left behind.

An edit keeps all processes waiting, so long work is done in steps of one edit each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from tiers.disk.failures import Damaged
from tiers.disk.folder.owner import Owners
from tiers.disk.index.edit import FIRST, Edit, Slot
from tiers.disk.index.slot_allocator import EVICT_BATCH
from tiers.disk.slab import Slabs

_PUNCH_BATCH = 512


def restore_files(edit: Edit, slabs: Slabs, owners: Owners) -> None:
    """Lengthen slab files that a power cut left shorter than the index says, if nobody is there:
    records in the added slots will not verify. Raises Damaged if the machine did not go down."""
    if owners.alive:
        return
    lengths = edit.lengths()
    cut = [size for size, length in lengths.items() if slabs[size].slots() < length]
    if cut and not owners.rebooted:
        raise Damaged(f"slab files of slot sizes {cut} are cut or gone")
    for size in cut:
        there = slabs[size].slots()
        slabs[size].allocate(there, lengths[size] - there)


def orphans(edit: Edit, living: Collection[bytes]) -> list[tuple[Slot, bytes]]:
    """Return the reserved slots whose owners' ids are not in `living`, with those ids."""
    return [one for one in edit.reservations().items() if one[1] not in living]


def reclaim(
    edit: Callable[[], AbstractContextManager[Edit]], orphans: Sequence[tuple[Slot, bytes]]
) -> int:
    """Free those of `orphans` that are still their dead owners', in steps of one `edit` each;
    return how many were freed."""
    freed = 0
    for start in range(0, len(orphans), EVICT_BATCH):
        with edit() as step:
            for slot, owner in orphans[start : start + EVICT_BATCH]:
                if step.is_of(owner, slot):
                    step.vacate(slot)
                    freed += 1
    return freed


def trim(edit: Edit, slabs: Slabs) -> None:
    """Cut slab files to their lengths in the index: a killed edit may have let them grow."""
    lengths = edit.lengths()
    for size in slabs.on_disk():
        slabs[size].truncate(lengths.get(size, 0))


def sweep(edit: Edit, slabs: Slabs, after: Slot = FIRST) -> Slot | None:
    """Give back disk space that a killed edit left behind free slots, a few after slot `after`;
    return the last of them, or None if there are no more."""
    some = edit.free(after, _PUNCH_BATCH)
    slabs.punch(some)
    return some[-1] if len(some) == _PUNCH_BATCH else None
