"""Who has the folder open: one locked file for each process.

Its name has the process, its host, the host's boot and whether commits were synced; its text has
the inode of the folder's lock, and of what sysfs has of the mount (of ext4, XFS and F2FS), and what
a later version puts behind. A file that was left over shows what happened:

- Its lock is free, boot and mount are these: the process died and the page cache survived. Only its
  reserved slots need repair. Another lock: the folder was copied while the process wrote to it.
- Another boot of this host, or another mount: the machine or the file system went down with the
  tier open. The index can be trusted only if each commit was synced.
- Another host: it may have the folder open now, since its locks may not reach us.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tiers.concurrency.file_locks import opened, release, try_lock
from tiers.disk.slab import sync_folder
from tiers.paths import found_at

OWNER_ID_BYTES = 16
_MACHINE = Path("/etc/machine-id")
_MOUNTED = Path("/sys/fs")
"""Of kinds of file systems; a kind's folder has one for each that is mounted, by its device, with
an inode that none had before."""
_NAMELESS = "-"
_NAME = re.compile(
    r"^(?P<boot>[0-9a-f-]{36})\.(?P<id>[0-9a-f]{32})\.(?P<machine>[0-9a-f]{32}|-)"
    r"\.(?P<pid>[0-9]{1,10})\.(?P<host>[A-Za-z0-9_-]{1,63})(?P<synced>\.synced)?$"
)


class Host(NamedTuple):
    """A machine from boot to shutdown: the kernel's id of this boot, the installation's machine id
    (`-` if it has none, as in most containers), and the host's name."""

    boot: str
    machine: str
    name: str


def this_host() -> Host:
    """Return this process's host. Containers of one host have the same boot."""
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
    """The owners of a folder. `alive`: ids; `dead`: files. `cut`: of one what was not synced may be
    lost. `torn`: why the index can't be trusted; empty: it can. `refusal`: why we must not open."""

    alive: frozenset[bytes]
    dead: tuple[Path, ...]
    cut: bool
    torn: str
    refusal: str | None


def scan_owners(owners: Path, one_host: bool) -> Owners:
    """Read all owner files. Only under the folder's lock: a new file is locked after it is made.

    `one_host`: two hosts can't have the folder's file system mounted at once, so an owner of
    another boot is dead, whatever its machine. Raises OSError.
    """
    us, (lock, mount) = this_host(), [*_mark(owners), b"", b""][:2]
    alive: set[bytes] = set()
    dead: list[Path] = []
    cut, torn, refusal = False, "", None
    try:
        files = list(owners.iterdir())
    except FileNotFoundError:  # a copy of a closed tier may leave out a folder with nothing in it
        files = []
    for file in files:
        name = _NAME.match(file.name)
        if name is None:
            continue
        (locked, text), other_boot = _look(file), name["boot"] != us.boot
        is_ours = one_host or name["machine"] == us.machine != _NAMELESS
        if other_boot and (locked or not is_ours):
            refusal = _of_stranger(file, name["host"], locked)
        if locked:
            alive.add(bytes.fromhex(name["id"]))
            if name["pid"] == str(os.getpid()):
                refusal = refusal or _of_twin(file)
        else:
            dead.append(file)
            lock_then, mount_then = [*text.split(b" "), b""][:2]
            unmounted = b"" not in (mount, mount_then) and mount != mount_then
            cut |= other_boot or unmounted
            if lock_then not in (b"", lock):
                torn = "it was copied while it was in use"
            elif (other_boot or unmounted) and not name["synced"]:
                went = "the machine went down" if other_boot else "its file system was unmounted"
                torn = torn or f"{went} while it was in use"
    return Owners(frozenset(alive), tuple(dead), cut, torn, refusal)


def _mark(owners: Path) -> list[bytes]:
    """What a copy of the folder has another of, the inode of its lock; and behind it what another
    mount has another of. Each if there is one."""
    if (lock := found_at(owners.parent / "lock")) is None:
        return []
    number = f"{os.major(lock.st_dev)}:{os.minor(lock.st_dev)}"
    device = os.path.basename(os.path.realpath(f"/sys/dev/block/{number}"))
    mounts = [place.stat() for place in _MOUNTED.glob(f"*/{device}")]
    return [b"%d" % found.st_ino for found in (lock, *mounts)]


def _of_stranger(file: Path, host: str, locked: bool) -> str:
    folder = file.parent.parent
    if locked:
        return f"{folder} is in use on host {host!r}; give each host a folder of its own"
    return (
        f"{folder} was not closed by host {host!r}, which may have it open; give each host a "
        f"folder of its own, or, if that host is gone, empty this one ({file.name} is its mark)"
    )


def _of_twin(file: Path) -> str:
    """LMDB distinguishes readers by process id, which processes of two containers may share."""
    return (
        f"{file.parent.parent} is in use by a process of another container that has the same "
        f"number as this one, {os.getpid()}; give each container a path of its own, or let them "
        "share process numbers (docker run --pid=host; hostPID or shareProcessNamespace in "
        "Kubernetes)"
    )


def _look(file: Path) -> tuple[bool, bytes]:
    """Whether an owner's file is locked, and its text."""
    try:
        with opened(file, os.O_RDWR | os.O_NOFOLLOW) as handle:
            return not try_lock(handle), os.read(handle, 64)
    except FileNotFoundError:  # a clean close removes its file without the folder's lock
        return False, b""


class Owner:
    """This process's own file. The kernel frees its lock only after the last thread has ended, so
    no write of a dead owner is in flight."""

    def __init__(self, owners: Path, synced: bool) -> None:
        self.id = secrets.token_bytes(OWNER_ID_BYTES)
        us = this_host()
        name = f"{us.boot}.{self.id.hex()}.{us.machine}.{os.getpid()}.{us.name}"
        self.file = owners / (f"{name}.synced" if synced else name)
        self._handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try_lock(self._handle)
            with suppress(OSError):  # on a full disk a copy goes unseen
                os.write(self._handle, b" ".join(_mark(owners)))
                os.fsync(self._handle)
            # Otherwise a power cut could lose the name but keep index pages written after it.
            sync_folder(owners)
        except BaseException:
            # A handle that nobody knows would stay locked: an owner that lives until we end.
            self.leave(clean=True)
            raise

    def leave(self, clean: bool) -> None:
        """Free the lock, and remove the file if nothing is left to repair (`clean`)."""
        # If a read-only file system keeps the file, the next process repairs in vain.
        with suppress(OSError):
            if clean:
                self.file.unlink(missing_ok=True)
        release(self._handle)
