"""The open folders of this process, by real path.

LMDB must not open one index twice in a process, yet the scheduler half and the worker half of
an engine open the same tier in one process, from different threads. So a folder is opened once
per process and its users are counted here.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

from tiers.disk.access import Access
from tiers.disk.folder.open_folder import OpenFolder, require_own
from tiers.disk.folder.opening import open_folder
from tiers.errors import TierUnusable


class _OpenFolders:
    """The process's only mutable global, since what it guards (LMDB's locks) is the process's, too.

    Each store on a folder and each verb under way is a holder; the last one to release closes the
    folder. So `close` neither waits for a verb stuck on a hung disk nor closes files that it uses.
    `count_lock` guards `holders` alone. A folder's lock in `_locks` is held while the folder is
    opened or closed, which takes longer the larger its index is; `holders` leaves zero only under
    it, so nobody gets a folder that is being closed.
    """

    def __init__(self) -> None:
        self._folders: dict[str, OpenFolder] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        # Without it two threads could each make a lock for one folder.
        self._locks_lock = threading.Lock()

    def _lock(self, name: str) -> threading.Lock:
        with self._locks_lock:
            return self._locks[name]

    def acquire(self, path: Path, capacity: int, access: Access) -> OpenFolder:
        """Open the folder at `path`, or share the one that is open, as one more holder. Raises
        TierUnusable and TierNotOpen."""
        name = os.path.realpath(path)
        with self._lock(name):
            folder = self._folders.get(name)
            if folder is None or folder.gone:
                folder = self._folders[name] = open_folder(path, capacity, access, self.release)
                return folder
            require_own(folder)
            if folder.access != access:
                raise TierUnusable(
                    f"{path} is open in this process with other settings of io or durability; "
                    "let every tier on the folder have the same"
                )
            with folder.translated():
                folder.resize(capacity)
            with folder.count_lock:
                folder.holders += 1
                folder.stores += 1
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
        self._locks = defaultdict(threading.Lock)
        self._locks_lock = threading.Lock()


open_folders = _OpenFolders()
os.register_at_fork(after_in_child=open_folders.after_fork)
