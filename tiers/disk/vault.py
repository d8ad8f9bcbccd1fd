"""What one process has open of a tier's folder, shared by every store on it.

LMDB must not open one index twice in a process, yet the scheduler half and the worker half of
an engine open the same tier in one process, from different threads. So a folder is opened once
per process and counted; `_Vaults`, below, is the one place that knows.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path

from tiers.disk import room, seal
from tiers.disk.access import Access, choose_direct
from tiers.disk.edit import Edit
from tiers.disk.failures import Damaged, translated
from tiers.disk.folder import Folder
from tiers.disk.index import Index
from tiers.disk.owner import Census, Owner, survey
from tiers.disk.presence import Presence
from tiers.disk.rows import Entry, Slot
from tiers.disk.slab import Slabs, sync_folder
from tiers.errors import TierError, TierNotOpen, TierUnavailable, TierUnusable
from tiers.threads import threads

THREADS = 4
"""Reads and writes under way at once; 4 to 8 were fastest cold, and warm no slower than one."""

_MAX_USES = 1 << 16
"""Uses remembered until the next edit; beyond it the oldest are forgotten."""

logger = logging.getLogger(__name__)


class Vault:
    """An open folder: index, slabs, this process's owner file, and the I/O threads."""

    def __init__(
        self, folder: Folder, index: Index, slabs: Slabs, owner: Owner, access: Access
    ) -> None:
        self.path = folder.path
        self._folder = folder
        self.access = access
        self.index = index
        self.slabs = slabs
        self.pid = os.getpid()
        self.threads = threads(THREADS, "disk")
        self.presence = Presence(index, self.threads.submit)
        self._owner = owner
        self._uses: deque[bytes] = deque(maxlen=_MAX_USES)
        self._strays: deque[Slot] = deque()
        self._condemned = False
        self.holders = 1
        self.count_lock = threading.Lock()

    @contextmanager
    def in_use(self) -> Iterator[Vault]:
        """Hold the vault for one verb, and translate what the verb raises."""
        require_own(self)
        with self.count_lock:
            if not self.holders:
                raise TierUnavailable(f"the disk tier {self.path} is closed")
            self.holders += 1
        try:
            with self.translated():
                yield self
        finally:
            vaults.release(self)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate what the body raises. Damage is left to the next process that opens the
        folder: it wipes it, if the damage shows at once or not."""
        try:
            with translated(self.path):
                yield
        except Damaged:
            self._condemn()
            raise

    def _condemn(self) -> None:
        if self._condemned:
            return
        self._condemned = True
        logger.error("disk tier %s: the index is damaged; a restart empties the tier", self.path)
        try:
            seal.condemn(self._folder.seal)
        except OSError as error:
            logger.warning("disk tier %s can't be condemned: %s", self.path, error)

    def note(self, keys: Sequence[bytes]) -> None:
        """Remember a use of these keys, the first the most recent, for the next edit.

        Without a lock or I/O: a deque takes the keys in one step.
        """
        self._uses.extend(reversed(keys))

    @contextmanager
    def edit(self) -> Iterator[Edit]:
        """One write transaction, which first catches up with what is only in memory."""
        uses = [self._uses.popleft() for _ in repeat(None, len(self._uses))]
        strays = [self._strays.popleft() for _ in repeat(None, len(self._strays))]
        try:
            with self.index.edit(self._owner.id) as edit:
                for key in reversed(dict.fromkeys(reversed(uses))):
                    edit.renew(key)
                for slot in filter(edit.is_mine, strays):
                    room.give_back(edit, self.slabs, slot)
                yield edit
        except BaseException:
            self._strays.extend(strays)
            raise

    def resize(self, capacity: int) -> None:
        """Set the capacity that every process on the folder keeps to from now on."""
        with self.edit() as edit:
            room.shrink(edit, self.slabs, capacity)

    def reserve(self, sizes: dict[bytes, int]) -> tuple[set[bytes], dict[bytes, Slot]]:
        """Tell which keys are held; reserve a slot for each other, as many as there is room for.

        The victims' entries go in the same transaction, so no key points to a slot being written.
        """
        slots: dict[bytes, Slot] = {}
        with self.edit() as edit:
            held = {key for key in sizes if edit.entry(key) is not None}
            for key in reversed(sizes):
                edit.renew(key)
            for key in (key for key in sizes if key not in held):
                slot = room.take(edit, self.slabs, sizes[key], sizes.keys())
                if slot is None:
                    break
                slots[key] = slot
        return held, slots

    def settle(
        self, keys: Sequence[bytes], slots: Mapping[bytes, Slot], written: Mapping[bytes, Entry]
    ) -> set[bytes]:
        """Publish what was written, free the other reserved slots; which of those are held now.

        The first key counts as used last: a prefix's head must outlive its tail.
        """
        try:
            with self.edit() as edit:
                for key in reversed(keys):
                    self._settle(edit, key, slots.get(key), written.get(key))
                return {key for key in slots if edit.entry(key) is not None}
        except BaseException:
            self._strays.extend(slots.values())  # freed by the next edit that succeeds
            raise

    def _settle(self, edit: Edit, key: bytes, slot: Slot | None, entry: Entry | None) -> None:
        # Another thread or process may have published the key while we wrote: its block stays.
        if slot is not None and entry is not None and edit.entry(key) is None:
            edit.publish(key, slot, entry.payload_bytes, entry.checksum)
            return
        edit.renew(key)
        if slot is not None:
            room.give_back(edit, self.slabs, slot)

    def forget(self, seen: Mapping[bytes, Entry]) -> int:
        """Drop live blocks that are still as they were seen; how many were."""
        dropped = 0
        with self.edit() as edit:
            for key, entry in seen.items():
                now = edit.entry(key)
                if now is not None and now._replace(stamp=entry.stamp) == entry:
                    room.give_back(edit, self.slabs, edit.retire(key))
                    dropped += 1
        return dropped

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop these blocks, whatever they are."""
        with self.edit() as edit:
            for key in keys:
                if edit.entry(key) is not None:
                    room.give_back(edit, self.slabs, edit.retire(key))

    def recover(self, census: Census, capacity: int) -> None:
        """Free what the dead left behind. Only under the folder's lock."""
        with self.edit() as edit:
            cut = [] if census.alive else room.missing(edit, self.slabs)
            if cut and census.rebooted:
                room.lengthen(edit, self.slabs, cut)
            elif cut:
                raise Damaged(f"{self.path}: slab files of slot sizes {cut} are cut or gone")
            freed = room.reclaim(edit, self.slabs, census.alive | {self._owner.id})
            room.shrink(edit, self.slabs, capacity)
        if freed:
            logger.info("disk tier %s: freed %d slots of dead processes", self.path, freed)
        for file in census.dead:
            file.unlink(missing_ok=True)

    def shut(self) -> None:
        """Sync and close; the owner file of a folder that could not be synced stays.

        Payloads are not synced: each record proves itself when it is read.
        """
        clean = False
        try:
            with self.translated():
                with self.edit():
                    pass
                self.index.sync()
            clean = True
        except TierError as error:
            logger.warning("disk tier %s: closed, but not in order: %s", self.path, error)
        finally:
            self.threads.shutdown()
            self.index.close()
            self.slabs.close()
            self._leave(clean)

    def _leave(self, clean: bool) -> None:
        """Give up ownership; the last one out seals the index, and nobody comes in meanwhile."""
        with ExitStack() as locked:
            try:
                with translated(self.path):
                    locked.enter_context(self._folder.locked())
                    if clean and survey(self._folder.owners).alive == {self._owner.id}:
                        seal.put(self._folder.index, self._folder.seal)
            except TierError as error:
                logger.info("disk tier %s: closed without a seal: %s", self.path, error)
            finally:
                self._owner.leave(clean)


def _open(path: Path, capacity: int, access: Access) -> Vault:
    """Open a folder that this process does not have open. Raises TierUnusable."""
    folder = Folder(path)
    folder.prepare()
    try:
        with translated(path), folder.locked():
            census = survey(folder.owners)
            direct = choose_direct(path, folder.lock, access.io, capacity)
            if census.torn and not census.alive:
                folder.wipe("the machine went down while it was in use")
            try:
                return _enter(folder, census, capacity, access, direct)
            except Damaged as error:
                if census.alive:
                    raise
                folder.wipe(str(error))
                return _enter(folder, census, capacity, access, direct)
    except (TierUnusable, TierNotOpen):
        raise
    except TierError as error:
        raise TierNotOpen(f"the disk tier can't be opened: {error}") from error


def _enter(folder: Folder, census: Census, capacity: int, access: Access, direct: bool) -> Vault:
    with translated(folder.path), ExitStack() as undo:
        if not census.alive:
            seal.require(folder.index, folder.seal)
        # Before any change, so that a machine that stops now finds who had begun to write.
        owner = Owner(folder.owners, access.synced)
        undo.callback(owner.leave, clean=True)
        index = Index(folder.index, access.synced, lasting=access.durability == "sync")
        undo.callback(index.close)
        slabs = Slabs(folder.path, direct)
        undo.callback(slabs.close)
        vault = Vault(folder, index, slabs, owner, access)
        if access.synced:
            # What a process of another durability left unsynced when it died counts as ours now.
            index.sync()
            sync_folder(folder.path)
        if not census.alive:
            seal.remove(folder.seal)
        vault.recover(census, capacity)
        undo.pop_all()
        return vault


class _Vaults:
    """The vaults of this process by real path: its only mutable global, since what it guards
    (LMDB's locks) belongs to the process as well.

    A vault is held by each store on it and by each verb under way, so that the last one out
    closes it: a `close` neither waits for a verb stuck on a hung disk nor pulls the files from
    under it. `count_lock` guards the counting alone. `_lock` is held while a vault is opened or
    shut; a count leaves zero only under it, so no one gets a vault that is being shut.
    """

    def __init__(self) -> None:
        self._vaults: dict[str, Vault] = {}
        self._lock = threading.Lock()

    def acquire(self, path: Path, capacity: int, access: Access) -> Vault:
        """Hold the vault of a folder, opened if need be. Raises TierUnusable."""
        with self._lock:
            name = os.path.realpath(path)
            vault = self._vaults.get(name)
            if vault is None:
                vault = self._vaults[name] = _open(path, capacity, access)
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
        with self._lock:
            name = os.path.realpath(vault.path)
            if vault.holders or self._vaults.get(name) is not vault:
                return  # taken up again, or shut by another, before we had the lock
            del self._vaults[name]
            vault.shut()

    def after_fork(self) -> None:
        """In a forked child: the lock may be held by a thread that does not exist here."""
        self._lock = threading.Lock()


def require_own(vault: Vault) -> None:
    """Raise TierUnusable in a forked child: LMDB's state and the threads did not come along."""
    if vault.pid != os.getpid():
        raise TierUnusable(
            f"the disk tier {vault.path} was opened before this process was forked; "
            "start the process by spawn, or open the tier only after the fork"
        )


vaults = _Vaults()
os.register_at_fork(after_in_child=vaults.after_fork)
