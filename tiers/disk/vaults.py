"""The vaults of this process, by real path.

LMDB must not open one index twice in a process, yet the scheduler half and the worker half of
an engine open the same tier in one process, from different threads. So a folder is opened once
per process and counted; here is the one place that knows.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

from tiers.disk.access import Access
from tiers.disk.opening import open_vault
from tiers.disk.vault import Vault, require_own
from tiers.errors import TierUnusable


class _Vaults:
    """The process's only mutable global, since what it guards (LMDB's locks) is the process's, too.

    A vault is held by each store on it and by each verb under way, so that the last one out
    closes it: a `close` neither waits for a verb stuck on a hung disk nor pulls the files from
    under it. `count_lock` guards the counting alone. A folder's lock of `_locks` is held while its
    vault is opened or shut, which may take as long as its index is large; a count leaves zero only
    under it, so no one gets a vault that is being shut.
    """

    def __init__(self) -> None:
        self._vaults: dict[str, Vault] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        # Without it two threads could each make a lock for one folder.
        self._locks_lock = threading.Lock()

    def _lock(self, name: str) -> threading.Lock:
        with self._locks_lock:
            return self._locks[name]

    def acquire(self, path: Path, capacity: int, access: Access) -> Vault:
        """Hold the vault of a folder, opened if need be. Raises TierUnusable."""
        name = os.path.realpath(path)
        with self._lock(name):
            vault = self._vaults.get(name)
            if vault is None:
                vault = self._vaults[name] = open_vault(path, capacity, access, self.release)
                return vault
            require_own(vault)
            if vault.access != access:
                raise TierUnusable(
                    f"{path} is open in this process with other settings of io or durability; "
                    "let every tier on the folder have the same"
                )
            with vault.translated():
                vault.resize(capacity)
            with vault.count_lock:
                vault.holders += 1
            return vault

    def release(self, vault: Vault) -> None:
        """Let go; the last to do so shuts the vault."""
        with vault.count_lock:
            vault.holders -= 1
            if vault.holders:
                return
        name = os.path.realpath(vault.path)
        with self._lock(name):
            if vault.holders or self._vaults.get(name) is not vault:
                return  # taken up again, or shut by another, before we had the lock
            del self._vaults[name]
            vault.shut()

    def after_fork(self) -> None:
        """In a forked child: a lock may be held by a thread that does not exist here."""
        self._locks = defaultdict(threading.Lock)
        self._locks_lock = threading.Lock()


vaults = _Vaults()
os.register_at_fork(after_in_child=vaults.after_fork)
