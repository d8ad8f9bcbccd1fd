"""A folder as one process has it open, for every store on it (see `open_folders`)."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import lmdb

from spec.fields import format_size
from tiers.concurrency.counter import LockedCounter
from tiers.concurrency.executors import BATCH_THREADS, IoExecutor, require_unforked
from tiers.disk.folder import clean_close
from tiers.disk.folder.folder import Folder
from tiers.disk.folder.owner import Owner, Owners, scan_owners
from tiers.disk.folder.upkeep import Keeping, Upkeep
from tiers.disk.index import slot_allocator
from tiers.disk.index.edit import FIRST, Edit, Entry, Slot
from tiers.disk.index.fingerprint_index import FingerprintIndex
from tiers.disk.index.index import BRIEF_WAIT_S, WAIT_S, Damaged, Index, translated
from tiers.disk.index.slot_allocator import EVICT_BATCH, PendingUses, Space
from tiers.disk.slab import Access, Slabs, sync_folder
from tiers.errors import TierError, TierNotOpen, TierUnavailable, TierUnusable

_PUNCH_BATCH = 512
NO_ENTRIES: Mapping[bytes, Entry] = {}

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Put:
    """Blocks that are being stored: by index key, the first of which counts as used last, the sizes
    of their slots, and what is reserved for them. Only its own edits add to that."""

    sizes: dict[bytes, int]
    slots: dict[bytes, Slot] = field(default_factory=dict)


class OpenFolder:
    """An open folder: index, slabs, this process's owner file, and the I/O threads."""

    def __init__(
        self,
        folder: Folder,
        index: Index,
        slabs: Slabs,
        owner: Owner,
        access: Access,
        release: Callable[[OpenFolder], None],
    ) -> None:
        """`release`: subtracts one holder, and closes this object if it was the last."""
        self.path = folder.path
        self._files = folder
        self.access = access
        self.index = index
        self.slabs = slabs
        self.pid = os.getpid()
        self.threads = IoExecutor(BATCH_THREADS, "disk")
        self.fingerprints = FingerprintIndex(index)
        of_index = (self._reopen, self._write_uses, index.keep_pages)
        of_slots = (self._shrink, self._sweep, self._give_back)
        keeping = Keeping(folder, owner.file, self._lose)
        rest = (self.fingerprints.follow, self._look_at_folder)
        # First: other duties fail in a folder that is gone, which must be noticed all the same.
        self.upkeep = Upkeep(self.path, self.in_use, (keeping.look, *of_index, *of_slots, *rest))
        self._owner, self.mark = owner, owner.file
        self._release = release
        self._swept: Slot | None = None
        self.uses = PendingUses()
        self.evicted = LockedCounter()
        """Blocks that this process evicted and that no store has counted yet."""
        self._leaked: deque[Slot] = deque()
        """Slots that the next edit frees if they are reserved for this process and in no put's."""
        self._puts: set[Put] = set()
        """Those between `reserve` and `commit`."""
        self._freed: deque[Slot] = deque()
        """Free slots that may still have disk space behind them."""
        self.holders = self.stores = 1
        """Stores and verbs in flight; stores alone."""
        self.gone = ""
        """Why the open files may not be used any more; empty: they may."""
        self.is_closed = False
        self.capacity = 0
        """The capacity that this process has set, in bytes."""
        self.short = ""
        """Why others could change the tier, or it can't hold that; empty: all is well."""
        self._shortage: dict[tuple[int | None, int], str] = {}  # by the folder's capacity and ours
        self.count_lock = threading.Lock()

    @contextmanager
    def in_use(self) -> Iterator[OpenFolder]:
        """Keep the folder open during one verb, and translate what the verb raises."""
        require_own(self)
        with self.count_lock:
            if self.gone:
                raise TierNotOpen(self.gone)
            if not self.holders:
                raise TierUnavailable(f"the disk tier {self.path} is closed")
            self.holders += 1
        try:
            with self.translated():
                yield self
        finally:
            self._release(self)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate what the body raises. Damage condemns the folder, and no verb uses it any more:
        LMDB ends a process that goes on in a damaged index."""
        try:
            with translated(self.path):
                yield
        except Damaged as error:
            if self._lose(str(error)):
                clean_close.condemn(self._files, error)
            raise

    @contextmanager
    def edit(self) -> Iterator[Edit]:
        """One write transaction, which first frees leaked slots. Behind its commit the disk space
        of all that it has freed is given back."""
        leaked: list[Slot] = []
        try:
            with self.index.edit(self._owner.id) as edit:
                # Only inside the edit, of which there is one at a time: two threads could otherwise
                # find the deque longer than it is.
                leaked = [self._leaked.popleft() for _ in repeat(None, len(self._leaked))]
                in_puts = {slot for put in self._puts.copy() for slot in put.slots.values()}
                for slot in leaked:
                    if slot not in in_puts and edit.is_of(self._owner.id, slot):
                        edit.vacate(slot)
                yield edit
                self.uses.stamp = edit.clock
        except BaseException:
            self._leaked.extend(leaked)
            raise
        self.evicted.count("for room", edit.evicted)
        self._freed.extend(edit.freed)
        with suppress(OSError, lmdb.Error):  # the change is committed; upkeep tries again
            self._give_back()

    def _give_back(self) -> None:
        """Punch freed slots, while nobody can claim them: of others they would take the bytes."""
        while self._freed:
            some: list[Slot] = []
            try:
                with self.index.edit(self._owner.id) as edit:
                    count = min(len(self._freed), EVICT_BATCH)
                    some = [self._freed.popleft() for _ in range(count)]
                    self.slabs.punch(slot for slot in some if edit.is_free(slot))
            except BaseException:
                self._freed.extend(some)
                raise

    def _reopen(self) -> None:
        if self.index.reopen():
            self.fingerprints.stop()  # or it would make none where it failed to meanwhile

    def _write_uses(self) -> bool:
        if self.uses:
            with self.edit() as edit:
                for key in self.uses.take():
                    edit.renew(key)
        return bool(self.uses)

    def _shrink(self) -> bool:
        usage = self.index.usage()
        if usage.capacity is None or usage.used <= usage.capacity:
            return False
        with self.edit() as edit:
            return slot_allocator.shrink(edit, self.uses)

    def _sweep(self) -> bool:
        """Give back disk space that a killed edit left behind free slots, a few at a time."""
        if self._swept is not None:
            with self.edit() as edit:
                some = edit.free(self._swept, _PUNCH_BATCH)
                self.slabs.punch(some)
                self._swept = some[-1] if len(some) == _PUNCH_BATCH else None
        return self._swept is not None

    def _look_at_folder(self) -> None:
        try:
            found = os.statvfs(self.path)
        except (FileNotFoundError, NotADirectoryError):  # `Keeping` reports it
            return
        free = found.f_bavail * found.f_frsize
        if (self.index.usage().capacity or 0) < self.capacity:
            with self.index.begin() as txn:
                has_ended = self._has_setter_ended(Edit(txn, self.index.tables, b""))
            if has_ended:
                # Under the lock: who has joined meanwhile, and may set one, is seen.
                with self._files.locked(), self.edit() as edit:
                    if self._has_setter_ended(edit):
                        edit.set_capacity(self.capacity)
        usage = self.index.usage()
        of = usage.capacity, self.capacity
        short = slot_allocator.shortage(usage, self.capacity, free)
        self._shortage = {of: self._shortage.get(of, short)} if short else {}  # whose text stays
        try:
            self._files.check()
            self.short = self._shortage.get(of, "")
        except TierUnusable as error:
            self.short = str(error)

    def _has_setter_ended(self, edit: Edit) -> bool:
        """Whether the process that set the capacity uses the folder no more."""
        return edit.setter not in (None, *scan_owners(self._files.owners, one_host=True).alive)

    def _lose(self, why: str) -> bool:
        """Let no verb use the files any more; whether this is the first to find that. The last verb
        in flight closes them, which frees their space."""
        self.upkeep.stop()
        with self.count_lock:
            if self.gone:
                return False
            stores, self.stores, self.gone = self.stores, 0, why
        for _ in range(stores):
            self._release(self)
        return True

    def resize(self, capacity: int) -> None:
        """Set the capacity, in bytes, for every process on the folder, and evict the first few
        blocks beyond it; `upkeep` evicts the rest in steps."""
        self.capacity = capacity
        with self.edit() as edit:
            edit.set_capacity(capacity)
            slot_allocator.shrink(edit, self.uses)

    def reserve(self, sizes: dict[bytes, int]) -> Put:
        """Return a put of these sizes, for `commit`, with a reserved slot for each key that is not
        held, as far as there is room. Evicted blocks leave the index in the same transaction."""
        put = Put(sizes)
        self._puts.add(put)
        before = -1
        try:
            while before < len(put.slots) < len(sizes):
                before = len(put.slots)
                with self.edit() as edit:
                    self._reserve(edit, put)
                # On a full file system the space of slots of other sizes is there from now on.
                if not edit.freed or edit.used > edit.capacity:
                    break
        except BaseException:
            self._leak(put)
            raise
        return put

    def _leak(self, put: Put) -> None:
        """Leave a put's slots to the next edit. What a failed edit had claimed may be another put's
        at once, or reserved all the same: by a device that took the commit and then failed."""
        self._puts.remove(put)
        self._leaked.extend(put.slots.values())

    def _reserve(self, edit: Edit, put: Put) -> None:
        sizes, slots = put.sizes, put.slots
        held = {key for key in sizes if edit.entry(key) is not None}
        for key in filter(held.__contains__, reversed(sizes)):
            edit.renew(key)
        missing = [key for key in sizes if key not in held and key not in slots]
        space = Space(self.slabs, (sizes[key] for key in missing))
        for key in missing:
            slot = slot_allocator.allocate(edit, space, sizes[key], sizes.keys(), self.uses)
            if slot is None:
                break
            slots[key] = slot

    def commit(self, put: Put, written: Iterable[Entry]) -> set[bytes]:
        """End a put: publish the blocks `written`, free its other slots; return which of its keys
        are held now."""
        entries = {entry.slot: entry for entry in written}
        try:
            with self.edit() as edit:
                is_held = partial(self._commit_one, edit, entries)
                held = {k for k in reversed(put.sizes) if is_held(k, put.slots.get(k))}
        except BaseException:
            self._leak(put)
            raise
        self._puts.remove(put)
        return held

    def _commit_one(
        self, edit: Edit, entries: Mapping[Slot, Entry], key: bytes, slot: Slot | None
    ) -> bool:
        # Another thread or process may have published the key while we wrote: its block stays.
        held = edit.renew(key)
        if slot is not None and not held and slot in entries:
            edit.publish(key, entries[slot])
            return True
        if slot is not None:
            edit.vacate(slot)
        return held

    def drop(self, keys: Iterable[bytes], seen: Mapping[bytes, Entry] = NO_ENTRIES) -> int:
        """Drop the live blocks of these index keys; those in `seen` only if they have that entry
        still, stamp and all: a block that was evicted and stored anew has another. Return
        how many were dropped."""
        dropped = 0
        with self.edit() as edit:
            for key in keys:
                entry = edit.entry(key)
                if entry is not None and seen.get(key, entry) == entry:
                    edit.vacate(edit.retire(key))
                    dropped += 1
        return dropped

    def start(
        self, owners: Owners, orphans: Sequence[tuple[Slot, bytes]], capacity: int | None
    ) -> None:
        """Free what dead owners left behind, then set the capacity, if given, and start `upkeep`.

        Works in steps and without the folder's lock: dead owners stay dead, and each step checks
        that a slot is still reserved for its dead owner.
        """
        if self.access.synced:
            # A process with durability none may have died and left commits unsynced: sync them, so
            # that a power cut leaves an index in order.
            self.index.sync()
            sync_folder(self.path)
        if freed := self.reclaim(orphans):
            logger.info("disk tier %s: freed %d slots of dead processes", self.path, freed)
        for file in owners.dead:
            file.unlink(missing_ok=True)
        if owners.dead or not owners.alive:
            with self.edit() as edit:
                lengths = edit.lengths()
                for size in self.slabs.on_disk():  # a killed edit may have let them grow
                    self.slabs[size].truncate(lengths.get(size, 0))
            self._swept = FIRST
            self._sweep()
        before = self.index.usage().capacity or 0
        if capacity is not None and owners.alive and capacity < before:
            logger.warning(
                "disk tier %s: capacity %s replaces the %s of another engine on the folder, for "
                "both, and blocks beyond it are evicted; give all engines on it the same",
                self.path,
                format_size(capacity),
                format_size(before),
            )
        if capacity is not None:
            self.resize(capacity)
        self.index.keep_all()
        self.index.wait = WAIT_S
        self.upkeep.start()

    def reclaim(self, orphans: Sequence[tuple[Slot, bytes]]) -> int:
        """Free those of `orphans` that are still their dead owners', a few in each edit, since an
        edit keeps all processes waiting; return how many were freed."""
        freed = 0
        for start in range(0, len(orphans), EVICT_BATCH):
            with self.edit() as edit:
                for slot, owner in orphans[start : start + EVICT_BATCH]:
                    if edit.is_of(owner, slot):
                        edit.vacate(slot)
                        freed += 1
        return freed

    def abandon(self) -> None:
        """Close a folder that could not be started; the owner file stays and asks for repair."""
        self._close_files()
        self._owner.leave(clean=False)

    def close(self) -> None:
        """Sync the index and close; the owner file of a folder that could not be synced stays."""
        self.upkeep.stop()
        self.index.wait = BRIEF_WAIT_S
        self.fingerprints.stop()
        if self.gone:
            self.abandon()
            return
        clean = False
        try:
            with self.translated():
                while self._write_uses():
                    pass
                with self.edit():  # frees leaked slots
                    pass
                self.index.sync()
            clean = True
        except TierError as error:
            logger.warning(
                "disk tier %s: closed, but its index could not be synced: %s", self.path, error
            )
        finally:
            self._close_files()
            self._leave(clean)

    def _close_files(self) -> None:
        self.threads.shutdown()
        self.fingerprints.close()
        self.index.close()
        self.slabs.close()

    def _leave(self, clean: bool) -> None:
        """Give up ownership. The last process to leave records the index's digest."""
        try:
            with translated(self.path):
                if clean and clean_close.leave(self._files, self._owner):
                    return
        except TierError as error:
            logger.info(
                "disk tier %s: closed without a digest of its index, so the next open does not "
                "check it: %s",
                self.path,
                error,
            )
        self._owner.leave(clean)


def require_own(opened: OpenFolder) -> None:
    """Raise TierUnusable in a forked child: LMDB's state and the threads did not come along."""
    require_unforked(opened.pid, f"the disk tier {opened.path}")
