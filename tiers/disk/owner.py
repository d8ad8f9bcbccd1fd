"""Who uses the folder: one empty, locked file per process that has the tier open.

The file's name tells the process, its host and the host's boot, so a file that is left over says
what happened. Its lock is free and the boot is this one: that process died, the page cache survived
it, and only its reservations need care. Another boot of this host: the machine went down with the
tier open, and unless each of its commits was synced, which the name tells too, the index can't be
trusted. Another host: it may have the folder open now, its locks being none of ours.
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
_MACHINE = Path("/etc/machine-id")
_NAMELESS = "-"
_NAME = re.compile(
    r"^(?P<boot>[0-9a-f-]{36})\.(?P<id>[0-9a-f]{32})"
    r"(?:\.(?P<machine>[0-9a-f]{32}|-)\.(?P<pid>[0-9]{1,10})\.(?P<host>[A-Za-z0-9_-]{1,63}))?"
    r"(?P<synced>\.synced)?$"
)


class Host(NamedTuple):
    """A machine, as long as it runs: the kernel's name for this boot, the installation's own name
    for the machine (`-` where it has none, as in most containers), and what people call it."""

    boot: str
    machine: str
    name: str


def this_host() -> Host:
    """The host that we are on. Containers of one host have one boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        machine = _MACHINE.read_text().strip()
    except OSError:
        machine = ""
    if not re.fullmatch("[0-9a-f]{32}", machine):
        machine = _NAMELESS
    name = re.sub("[^A-Za-z0-9_-]", "-", os.uname().nodename)[:63]
    return Host(boot, machine, name or _NAMELESS)


class Owners(NamedTuple):
    """Who is there: ids of the living, files of the dead; whether one died with the machine, and
    whether one that did not sync its commits did; why we may not come in, if so."""

    alive: frozenset[bytes]
    dead: tuple[Path, ...]
    rebooted: bool
    unsynced_crash: bool
    refusal: str | None


def scan_owners(owners: Path, one_host: bool) -> Owners:
    """Look at every owner file. Only under the folder's lock, since a new one is locked late.

    `one_host`: two hosts can't have the folder's file system mounted at once, so that an owner of
    another boot is dead, whatever machine that was. Raises OSError.
    """
    us = this_host()
    alive: set[bytes] = set()
    dead: list[Path] = []
    rebooted = unsynced_crash = False
    refusal = None
    for file in owners.iterdir():
        name = _NAME.match(file.name)
        if name is None:
            continue
        locked, other_boot = _is_locked(file), name["boot"] != us.boot
        if other_boot and (locked or not (one_host or _is_of(us, name))):
            refusal = _of_stranger(file, name["host"], locked)
        if locked:
            alive.add(bytes.fromhex(name["id"]))
            if name["pid"] == str(os.getpid()):
                refusal = refusal or _of_twin(file)
        else:
            dead.append(file)
            rebooted |= other_boot
            unsynced_crash |= other_boot and not name["synced"]
    return Owners(frozenset(alive), tuple(dead), rebooted, unsynced_crash, refusal)


def _is_of(us: Host, name: re.Match[str]) -> bool:
    # A name without a machine is of a version that did not tell.
    return name["machine"] is None or name["machine"] == us.machine != _NAMELESS


def _of_stranger(file: Path, host: str | None, locked: bool) -> str:
    folder = file.parent.parent
    if locked:
        return f"{folder} is in use on host {host!r}; give each host a folder of its own"
    return (
        f"{folder} was not closed by host {host!r}, which may have it open; give each host a "
        f"folder of its own, or, if that host is gone, empty this one ({file.name} is its mark)"
    )


def _of_twin(file: Path) -> str:
    """LMDB knows readers by their process number, which processes of two containers may share."""
    return (
        f"{file.parent.parent} is in use by a process of another container that has the same "
        f"number as this one, {os.getpid()}; give each container a path of its own, or let them "
        "share process numbers (docker run --pid=host; hostPID or shareProcessNamespace in "
        "Kubernetes)"
    )


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
        us = this_host()
        name = f"{us.boot}.{self.id.hex()}.{us.machine}.{os.getpid()}.{us.name}"
        self._file = owners / (f"{name}.synced" if synced else name)
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
