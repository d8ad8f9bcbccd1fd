"""What one process has open of a tier's folder, shared by every store on it (see `vaults`)."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat

from tiers.concurrency.executors import io_executor
from tiers.disk import room, seal
from tiers.disk.access import Access
from tiers.disk.edit import FIRST, Edit
from tiers.disk.failures import Damaged, translated
from tiers.disk.folder import Folder
from tiers.disk.index import Index
from tiers.disk.owner import Census, Owner, survey
from tiers.disk.presence import Presence
from tiers.disk.rows import Entry, Slot
from tiers.disk.slab import Slabs, sync_folder
from tiers.disk.upkeep import Upkeep
from tiers.errors import TierError, TierUnavailable, TierUnusable

THREADS = 4
"""Reads and writes under way at once; 4 to 8 were fastest cold, and warm no slower than one."""

_MAX_USES = 1 << 16
"""Uses remembered until they are written down; beyond it the oldest are forgotten."""

USES_AT_ONCE = 512
"""Blocks whose uses one edit writes down, in 2 ms: all processes wait for it."""

_USES_READ_AT_ONCE = 8 * USES_AT_ONCE

_SEALED_TRIES = 3

logger = logging.getLogger(__name__)


class Vault:
    """An open folder: index, slabs, this process's owner file, and the I/O threads."""

    def __init__(
        self,
        folder: Folder,
        index: Index,
        slabs: Slabs,
        owner: Owner,
        access: Access,
        let_go: Callable[[Vault], None],
    ) -> None:
        """`let_go`: takes one holder from the count, and shuts the vault if it was the last."""
        self.path = folder.path
        self._folder = folder
        self.access = access
        self.index = index
        self.slabs = slabs
        self.pid = os.getpid()
        self.threads = io_executor(THREADS, "disk")
        self.presence = Presence(index, self.threads.submit)
        self.upkeep = Upkeep(
            self.path,
            self.in_use,
            (self._write_uses, self._clear_readers, self._shrink, self._sweep),
        )
        self._owner = owner
        self._let_go = let_go
        self._swept: Slot | None = None
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
            self._let_go(self)

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
        """Remember a use of these keys, the first the most recent, for the next edits.

        Without a lock or I/O: a deque takes the keys in one step.
        """
        self._uses.extend(reversed(keys))

    @contextmanager
    def edit(self) -> Iterator[Edit]:
        """One write transaction, which first catches up with what is only in memory."""
        strays: list[Slot] = []
        try:
            with self.index.edit(self._owner.id) as edit:
                # Only here, where no other thread of ours takes of them: it has no edit.
                strays = [self._strays.popleft() for _ in repeat(None, len(self._strays))]
                for key in self._next_uses():
                    edit.renew(key)
                for slot in filter(edit.is_mine, strays):
                    room.give_back(edit, self.slabs, slot)
                yield edit
        except BaseException:
            self._strays.extend(strays)
            raise

    def _next_uses(self) -> list[bytes]:
        """Take the uses of some blocks, those of longest ago; each block once, as last used."""
        uses: dict[bytes, None] = {}
        for _ in repeat(None, min(len(self._uses), _USES_READ_AT_ONCE)):
            key = self._uses.popleft()
            uses.pop(key, None)
            uses[key] = None
            if len(uses) == USES_AT_ONCE:
                break
        return list(uses)

    def _write_uses(self) -> bool:
        if self._uses:
            with self.edit():
                pass
        return bool(self._uses)

    def _clear_readers(self) -> bool:
        self.index.clear_readers()
        return False

    def _shrink(self) -> bool:
        usage = self.index.usage()
        if usage.capacity is None or usage.used <= usage.capacity:
            return False
        with self.edit() as edit:
            return room.shrink(edit, self.slabs)

    def _sweep(self) -> bool:
        if self._swept is not None:
            with self.edit() as edit:
                self._swept = room.sweep(edit, self.slabs, self._swept)
        return self._swept is not None

    def resize(self, capacity: int) -> None:
        """Set the capacity that every process on the folder keeps to from now on. What is beyond
        it goes in steps, of which this is the first."""
        with self.edit() as edit:
            edit.capacity = capacity
            room.shrink(edit, self.slabs)

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

    def take_stock(self, census: Census) -> list[tuple[Slot, bytes]]:
        """Slots that the dead had reserved, and whose they were. Raises Damaged where slab files
        are shorter than they were. Only under the folder's lock, with a census of then."""
        with self.edit() as edit:
            cut = [] if census.alive else room.missing(edit, self.slabs)
            if cut and census.rebooted:
                room.lengthen(edit, self.slabs, cut)
            elif cut:
                raise Damaged(f"{self.path}: slab files of slot sizes {cut} are cut or gone")
            living = census.alive | {self._owner.id}
            return [one for one in edit.reservations().items() if one[1] not in living]

    def begin(self, census: Census, orphans: Sequence[tuple[Slot, bytes]], capacity: int) -> None:
        """Free what the dead left behind, in steps and without the folder's lock: the dead stay
        dead, and a slot that another process has freed meanwhile is theirs no more."""
        if self.access.synced:
            # What a process of another durability left unsynced when it died counts as ours now.
            self.index.sync()
            sync_folder(self.path)
        freed = 0
        for start in range(0, len(orphans), room.AT_ONCE):
            with self.edit() as edit:
                freed += room.reclaim(edit, self.slabs, orphans[start : start + room.AT_ONCE])
        if freed:
            logger.info("disk tier %s: freed %d slots of dead processes", self.path, freed)
        for file in census.dead:
            file.unlink(missing_ok=True)
        if census.dead or not census.alive:
            with self.edit() as edit:
                room.trim(edit, self.slabs)
            self._swept = FIRST
            self._sweep()
        self.resize(capacity)
        self.upkeep.start()

    def abandon(self) -> None:
        """Close what could not be begun; the owner file stays."""
        self.threads.shutdown()
        self.index.close()
        self.slabs.close()
        self._owner.leave(clean=False)

    def shut(self) -> None:
        """Sync and close; the owner file of a folder that could not be synced stays.

        Payloads are not synced: each record proves itself when it is read.
        """
        self.upkeep.stop()
        clean = False
        try:
            with self.translated():
                while self._write_uses():
                    pass
                with self.edit():  # for strays
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
        """Give up ownership; the last one out seals the index.

        Its digest takes a while, without the folder's lock: whoever comes in meanwhile finds us
        there, and no seal. If they are gone again, it is made once more.
        """
        try:
            with translated(self.path):
                if clean and self._seal():
                    return
        except TierError as error:
            logger.info("disk tier %s: closed without a seal: %s", self.path, error)
        self._owner.leave(clean)

    def _seal(self) -> bool:
        """Seal the index and leave, if nobody else is there; whether we have left."""
        index, mark = self._folder.index, self._folder.seal
        digest, then = b"", None
        for _ in range(_SEALED_TRIES):
            with self._folder.locked():
                if survey(self._folder.owners, self._folder.one_host).alive != {self._owner.id}:
                    break
                now = seal.state(index, mark)
                if now == then:
                    seal.put(mark, digest)
                    self._owner.leave(clean=True)
                    return True
                then = now
            digest = seal.digest(index)
        return False


def require_own(vault: Vault) -> None:
    """Raise TierUnusable in a forked child: LMDB's state and the threads did not come along."""
    if vault.pid != os.getpid():
        raise TierUnusable(
            f"the disk tier {vault.path} was opened before this process was forked; "
            "start the process by spawn, or open the tier only after the fork"
        )
