"""The open folders of this process, by real path.

LMDB must not open one index twice in a process, yet the scheduler half and the worker half of
an engine open the same tier in one process, from different threads. So a folder is opened once
per process and its users are counted here.

The folder's lock is held for moments: to scan the owners and to become one. Work that grows with
the tier happens before (comparing the index with its digest) or after (freeing the slots of dead
owners, shrinking), in steps that hold nobody up.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tiers.disk.folder import clean_close
from tiers.disk.folder.folder import MEMORY, ONE_HOST, Folder
from tiers.disk.folder.open_folder import OpenFolder, require_own
from tiers.disk.folder.owner import Owner, Owners, scan_owners
from tiers.disk.index.edit import Edit, Slot
from tiers.disk.index.index import Damaged, Index, translated
from tiers.disk.slab import Access, Slabs, choose_direct
from tiers.errors import TierError, TierNotOpen, TierUnusable

_TRIES = 5

logger = logging.getLogger(__name__)

Release = Callable[[OpenFolder], None]

_Owned = tuple[OpenFolder, Owners, list[tuple[Slot, bytes]]]
"""A folder yet to be started, its owners before us, and the slots that dead ones reserved."""


def open_folder(path: Path, capacity: int | None, access: Access, release: Release) -> OpenFolder:
    """Open a folder that this process does not have open; see `OpenFolder` for `release`, and
    `acquire` for `capacity`.

    Raises TierUnusable, and TierNotOpen for what may pass: a lock that another process holds, a
    host or a container that has the folder, a disk that is full or not there.
    """
    # A link above the folder may lead elsewhere while it is open.
    place = Path(os.path.realpath(path.parent), path.name)
    folder = Folder(place, keeps=capacity is None)
    try:
        with translated(path):
            folder.prepare()
            for _ in range(_TRIES):
                if (opened := _open(folder, capacity, access, release)) is not None:
                    return opened
            raise TierNotOpen(
                f"{path}: other processes kept opening and closing the folder; try again later"
            )
    except (TierUnusable, TierNotOpen):
        raise
    except TierError as error:
        raise TierNotOpen(f"the disk tier can't be opened: {error}") from error


def _open(
    folder: Folder, capacity: int | None, access: Access, release: Release
) -> OpenFolder | None:
    """Open the folder once. None: it changed after it was compared, or is damaged; try again."""
    with clean_close.compared(folder) as compared, folder.locked():
        owned = _become_owner(folder, capacity, access, compared, release)
    if owned is None:
        return None
    opened, owners, orphans = owned
    try:
        folder.remove_gone()
        with translated(folder.path):
            opened.start(owners, orphans, capacity)
    except Damaged as error:
        clean_close.condemn(folder, error)  # once we have left, another may fill it anew
        opened.abandon()
        return None  # the next try wipes it, if no other has it open
    except BaseException:
        opened.abandon()
        raise
    return opened


def _become_owner(
    folder: Folder,
    capacity: int | None,
    access: Access,
    compared: clean_close.Compared,
    release: Release,
) -> _Owned | None:
    """Wipe a folder that is not usable, and become an owner. Only under the folder's lock."""
    owners = scan_owners(folder.owners, folder.kind in ONE_HOST)
    if owners.refusal is not None:
        raise TierNotOpen(owners.refusal)
    if owners.alive:
        _require_shared(folder)
    else:
        if clean_close.state(folder) != compared.state:
            return None
        if why := compared.why_wiped(owners):
            folder.wipe(why)
    direct, chosen = choose_direct(folder.path, folder.lock, access.io, capacity)
    try:
        owned = _open_files(folder, owners, access, direct, release)
    except Damaged as error:
        if owners.alive:
            clean_close.condemn(folder, error)
            raise
        folder.wipe(str(error))
        owned = _open_files(folder, owners, access, direct, release)
    if folder.kind in MEMORY:  # said now: what can't be opened is tried again for ever
        logger.info("disk tier %s is on %s, so its blocks take memory", folder.path, folder.kind)
    if chosen:
        logger.info("disk tier %s: %s", folder.path, chosen)
    return owned


def _require_shared(folder: Folder) -> None:
    """Raise TierNotOpen if others have yet to leave a damaged index, or if a file that they have
    open was removed: this process would make an index of its own for their slabs, or a lock of its
    own for their index."""
    if clean_close.is_condemned(folder):
        raise TierNotOpen(
            f"{folder.path}: the index is damaged; the tier opens, empty, when no process has it "
            f"open any more ({folder.owners} has a file for each)"
        )
    gone = [file for file in folder.shared_files() if not file.exists()]
    if gone:
        raise TierNotOpen(
            f"{gone[0]} was removed, which other processes have open; end them all, and then start "
            f"again ({folder.owners} has a file for each)"
        )


def _open_files(
    folder: Folder, owners: Owners, access: Access, direct: bool, release: Release
) -> _Owned:
    with translated(folder.path), ExitStack() as undo:
        # The owner file comes before any change: after a power cut it shows that this process
        # may have written.
        owner = Owner(folder.owners, access.synced)
        undo.callback(owner.leave, clean=True)
        is_ours = bool(owners.alive or owners.dead)
        index = Index(folder.index, access.synced, access.durability == "sync", is_ours)
        undo.callback(index.close)
        slabs = Slabs(folder.path, direct)
        undo.callback(slabs.close)
        opened = OpenFolder(folder, index, slabs, owner, access, release)
        undo.callback(opened.threads.shutdown)
        undo.callback(opened.fingerprints.close)
        if not owners.alive:
            clean_close.remove(folder)
        with opened.edit() as edit:
            if not owners.alive:
                _restore_files(edit, slabs, folder, owners.cut)
            living = owners.alive | {owner.id}
            orphans = [item for item in edit.reservations().items() if item[1] not in living]
        undo.pop_all()
        return opened, owners, orphans


def _restore_files(edit: Edit, slabs: Slabs, folder: Folder, is_cut: bool) -> None:
    """Lengthen slab files that a power cut left shorter than the index says: records in the added
    slots will not verify. Raises Damaged if there was none (see `Owners.cut`)."""
    lengths = edit.lengths()
    for size in folder.cut_slabs(lengths, is_cut):
        there = slabs[size].slots()
        slabs[size].allocate(there, lengths[size] - there)


class _OpenFolders:
    """The process's only mutable global, since LMDB's locks, which it guards, are the process's
    too.

    Each store on a folder and each verb in flight is a holder; the last one to release closes the
    folder. So `close` neither waits for a verb stuck on a hung disk nor closes files that it uses.
    `count_lock` guards `holders` alone. A folder's lock in `_locks` is held while the folder is
    opened or closed, which takes longer the larger its index is; `holders` leaves zero only under
    it, so nobody gets a folder that is being closed.
    """

    def __init__(self) -> None:
        self._folders: dict[str, OpenFolder] = {}
        self._locks: dict[str, threading.Lock] = {}

    def _lock(self, name: str) -> threading.Lock:
        return self._locks.setdefault(name, threading.Lock())  # in one step, whoever comes first

    def acquire(self, path: Path, capacity: int | None, access: Access) -> OpenFolder:
        """Open the folder at `path`, or share the one that is open, as one more holder. `capacity`
        None: to look at what it holds, so its capacity stays, and nothing is wiped. Raises
        TierUnusable and TierNotOpen."""
        name = os.path.realpath(path)
        with self._lock(name):
            folder = self._folders.get(name)
            if folder is not None and folder.gone and os.path.lexists(folder.mark):
                raise TierNotOpen(f"{folder.gone}; the tier opens when its last read or write ends")
            if folder is None or folder.gone:
                folder = self._folders[name] = open_folder(path, capacity, access, self.release)
                return folder
            require_own(folder)
            if capacity is not None and folder.access != access:
                raise TierUnusable(
                    f"{path} is open in this process with other settings of io or durability; "
                    "let every tier on the folder have the same"
                )
            with folder.count_lock:
                folder.holders += 1
                folder.stores += 1
        try:
            if capacity is not None:
                with folder.in_use():
                    folder.resize(capacity)
        except BaseException:
            self.leave(folder)
            raise
        return folder

    def leave(self, folder: OpenFolder) -> None:
        """Subtract a store, unless the folder is gone, which no store holds any more."""
        with folder.count_lock:
            if not folder.stores:
                return
            folder.stores -= 1
        self.release(folder)

    def release(self, folder: OpenFolder) -> None:
        """Subtract a holder; the last one closes the folder."""
        with folder.count_lock:
            folder.holders -= 1
            if folder.holders:
                return
        name = str(folder.path)
        with self._lock(name):
            if folder.holders or folder.is_closed:
                return  # acquired again, or closed by another, before we had the lock
            folder.is_closed = True
            if self._folders.get(name) is folder:  # else it was gone, and is opened anew
                del self._folders[name]
            folder.close()

    def after_fork(self) -> None:
        """Replace the locks in a forked child: threads that hold them do not exist there."""
        self._locks = {}


open_folders = _OpenFolders()
os.register_at_fork(after_in_child=open_folders.after_fork)
