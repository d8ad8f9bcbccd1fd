"""Who uses the folder: one empty, locked file per process that has the tier open.

The file's name carries the machine's boot, so a file that is left over says what happened: its
lock is free and the boot is this one: that process died, the page cache survived it, and only
its reservations need care. Another boot: the machine went down with the tier open, and unless
each of its commits was synced, which the name tells too, the index can't be trusted.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tiers.disk.slab import sync_folder

OWNER_ID_BYTES = 16
_SYNCED = ".synced"
_NAME = re.compile(rf"^([0-9a-f-]{{36}})\.([0-9a-f]{{32}})({re.escape(_SYNCED)})?$")


def boot_id() -> str:
    """This boot of the machine, as the kernel names it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Census(NamedTuple):
    """Who is there: ids of the living, files of the dead; whether one died with the machine, and
    whether one that did not sync its commits did."""

    alive: frozenset[bytes]
    dead: tuple[Path, ...]
    rebooted: bool
    torn: bool


def survey(owners: Path) -> Census:
    """Look at every owner file. Only under the folder's lock, since a new one is locked late."""
    alive: set[bytes] = set()
    dead: list[Path] = []
    rebooted = torn = False
    for file in owners.iterdir():
        name = _NAME.match(file.name)
        if name is None:
            continue
        if _is_locked(file):
            alive.add(bytes.fromhex(name[2]))
        else:
            dead.append(file)
            rebooted |= name[1] != boot_id()
            torn |= name[1] != boot_id() and not name[3]
    return Census(frozenset(alive), tuple(dead), rebooted, torn)


def _is_locked(file: Path) -> bool:
    try:
        handle = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # a clean close removes its file without the folder's lock
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class Owner:
    """This process's own file. The kernel frees its lock only after the last thread is gone,
    so no write of a dead owner is still under way."""

    def __init__(self, owners: Path, synced: bool) -> None:
        self.id = secrets.token_bytes(OWNER_ID_BYTES)
        self._file = owners / f"{boot_id()}.{self.id.hex()}{_SYNCED if synced else ''}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(self._file, flags, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A power cut must not lose the name while it keeps index pages written after it.
        sync_folder(owners)

    def leave(self, clean: bool) -> None:
        """Free the lock; the file goes only if nothing is left to repair."""
        # A name that a read-only file system keeps says that we died: a look at what we reserved.
        with suppress(OSError):
            if clean:
                self._file.unlink(missing_ok=True)
        os.close(self._handle)
