"""The tier's folder: its requirements, its files, and the lock held to open it.

PATH/                 0700 when we make it, everything in it 0600
  index.mdb           LMDB: which key is in which slot
  index.mdb-lock
  index.seal          its digest, while no process has it open (see `clean_close`)
  slab-<bytes>.dat    slots of that many bytes
  owners/             one locked file per process that has the tier open (see `owner`)
  lock                held briefly, while a process opens or closes the tier
  namespaces/         notes of the namespaces that blocks are of (`tiers/records.py`)
  events/             what engines announced of it (`tiers/connector/scheduler/inventory/`)
  *.gone              wiped files that are yet to be removed

LMDB maps its index as memory and locks it for the processes of one kernel. Where several hosts
mount one file system, each has its own pages and, often, its own locks: the index tears, and a
process that reads a page of it dies. So the folder's file system must be of one host.

LMDB writes its lock file as memory. A file system that copies what is written needs space for that,
and where it is full, the kernel kills who writes (SIGBUS). Btrfs writes in place what is marked so,
since Linux 6.16 such memory, too; it then computes no checksums, as records have their own.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tiers.concurrency.file_locks import acquire, opened, release
from tiers.disk.index.index import Damaged
from tiers.disk.slab import punch
from tiers.errors import TierNotOpen, TierUnusable
from tiers.paths import foreign, found_at, mount_of

logger = logging.getLogger(__name__)

MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems whose files take memory, and are lost when the machine goes down."""

ONE_HOST = MEMORY | {
    *("btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "reiserfs", "rootfs", "xfs", "zfs")
}
"""File systems that two hosts can't have mounted at once."""

_SHARED = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|gfs2?|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs"
    r"|pvfs2|smb[23]|smbfs|vboxsf|virtiofs|vmhgfs|weka(fs)?|fuse(\..*)?"
)
_FUSE_OF_THIS_HOST = frozenset({"fuse.fuse-overlayfs"})
_COPYING = frozenset({"bcachefs", "nilfs2"})
_IN_PLACE_SINCE = (6, 16)
_GET_FLAGS, _SET_FLAGS, _COMPRESSED, _NOCOW = 0x80086601, 0x40086602, 0x4, 0x800000
"""Of `linux/fs.h`: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_COMPR_FL, FS_NOCOW_FL."""


def require_suitable(path: Path, kind: str) -> None:
    """Raise TierUnusable for a file system that other hosts may share, or that kills processes
    where it is full."""
    if _SHARED.fullmatch(kind) and kind not in _FUSE_OF_THIS_HOST:
        raise TierUnusable(
            f"{path} is on a file system of type {kind}, which other hosts may share or which "
            "does not keep a file that is mapped as memory: the tier's index would tear; name a "
            "folder on a disk of this host (ext4, XFS, Btrfs), and share blocks between hosts by "
            "a tier of type redis"
        )
    linux = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if kind in _COPYING or (kind == "btrfs" and linux < _IN_PLACE_SINCE):
        raise TierUnusable(
            f"{path} is on {kind}, which kills processes that have the tier's index open where it "
            "is full; name a folder on ext4 or XFS, or on Btrfs with Linux 6.16"
        )


def write_in_place(path: Path) -> bool:
    """Mark a folder, so that files that are made in it are written in place where their file system
    would copy them; whether this folder or file is marked. False also where nothing can be."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as handle:
            flags = struct.unpack("L", fcntl.ioctl(handle, _GET_FLAGS, bytes(8)))[0]
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                flags = flags & ~_COMPRESSED | _NOCOW
                fcntl.ioctl(handle, _SET_FLAGS, struct.pack("L", flags))
            return bool(flags & _NOCOW)
    except OSError:
        return False


LOCK_SECONDS = 1.0
"""Limit for a wait for another process. Nobody holds the folder's lock that long, unless it is
stopped or its disk hangs."""

_GONE = ".gone"


class Folder:
    """Names and state of one tier's folder."""

    def __init__(self, path: Path, keeps: bool = False) -> None:
        """`keeps`: it is opened to look at: what an engine would wipe stays, and is refused."""
        self.path = path
        self._keeps = keeps
        self.namespaces = path / "namespaces"
        self.index = path / "index.mdb"
        self.digest = path / "index.seal"
        self.owners = path / "owners"
        self.index_lock = path / "index.mdb-lock"
        self.lock = path / "lock"
        self.kind = ""  # of its file system, as `prepare` and `examine` find it

    def prepare(self) -> None:
        """Make the folder, or check the one that exists. Raises TierUnusable and TierNotOpen."""
        self.kind = kind = mount_of(self.path).kind
        require_suitable(self.path, kind)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(self.path):
                self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise TierNotOpen(
                f"{self.path}: the folder can't be made: {error.strerror}; "
                "name a folder on a writable file system"
            ) from error
        self.check()
        is_marked, place = write_in_place(self.path), self.path
        if os.path.lexists(self.index_lock):
            is_marked, place = write_in_place(self.index_lock), self.index_lock
        if kind == "btrfs" and not is_marked:
            raise TierUnusable(
                f"{place} is not marked to be written in place (chattr +C); remove it while no "
                "engine has the tier open, or name another folder"
            )
        try:
            self.owners.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def check(self) -> None:
        """Raise TierUnusable or TierNotOpen for a folder that is not as it should be."""
        try:
            found = self.path.lstat()
        except OSError as error:
            raise self._unwritable(error) from error
        if stat.S_ISLNK(found.st_mode):
            raise TierUnusable(f"{self.path} is a symbolic link; name the folder it points to")
        if not stat.S_ISDIR(found.st_mode):
            raise TierUnusable(f"{self.path} is a file; name a folder, or move the file away")
        if why := foreign(found):
            raise TierUnusable(f"{self.path} {why}")
        for socket in self.path.glob("*.sock"):
            raise TierUnusable(
                f"{socket} is an engine's, which listens there or was killed; remove it in that "
                "case, else name a folder of the tier's own"
            )
        # We would write wherever a planted link points.
        for file in self._files():
            try:
                found = file.lstat()
            except FileNotFoundError:  # another process has just opened or closed the tier
                continue
            if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
                raise TierUnusable(
                    f"{file} is a symbolic link or belongs to another user; remove it"
                )
            if found.st_mode & 0o077:
                raise TierUnusable(
                    f"{file} has mode {found.st_mode & 0o7777:04o}, so others can use it; "
                    f"chmod it to {found.st_mode & 0o700:04o}"
                )

    def _files(self) -> list[Path]:
        digest = (self.digest, self.digest.with_suffix(".draft"))
        fixed = (self.index, self.index_lock, *digest, self.owners, self.lock)
        return [f for f in (*fixed, *self.path.glob("slab-*.dat")) if os.path.lexists(f)]

    def shared_files(self) -> list[Path]:
        """The files that all processes share that have the folder open."""
        return [self.index, self.index_lock, self.lock, *self.path.glob("slab-*.dat")]

    def cut_slabs(self, lengths: Mapping[int, int], may_be: bool) -> list[int]:
        """Slot sizes whose file is shorter, or gone. Raises Damaged where none `may_be`."""
        found = {size: found_at(self.path / f"slab-{size}.dat") for size in lengths}
        cut = [at for at, it in found.items() if not it or it.st_size // at < lengths[at]]
        if cut and not may_be:
            raise Damaged(f"slab files of slot sizes {cut} are cut or gone")
        return cut

    def _unwritable(self, error: OSError) -> TierNotOpen:
        return TierNotOpen(
            f"{self.path} can't be written: {error.strerror}; "
            "make it writable for this user, or name another folder"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, to scan the owners and join or leave them; do no work in it that
        grows with the tier. Raises TierNotOpen if the lock can't be had in time, TierUnusable if
        the file system can't punch holes."""
        try:
            lock = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._require_holes(lock)
            if not acquire(lock, LOCK_SECONDS):
                raise TierNotOpen(
                    f"{self.path}: another process has been opening or closing the tier for "
                    f"{LOCK_SECONDS:.0f} s (fuser {self.lock} names it)"
                )
            yield
        finally:
            release(lock)

    def _require_holes(self, lock: int) -> None:
        try:
            punch(lock, 0, 4096)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise self._unwritable(error) from error
            raise TierUnusable(
                f"{self.path} is on a file system that can't punch holes, so the space of "
                "evicted blocks could not be given back; use ext4, XFS, Btrfs or tmpfs"
            ) from error

    def wipe(self, why: str) -> None:
        """Rename index and slabs away, for `remove_gone`; only under the lock, when no process has
        them open. Raises TierUnusable if the folder `keeps` what it has."""
        if self._keeps:
            raise TierUnusable(f"{self.path}: {why}; the next engine that opens it empties it")
        logger.warning("disk tier %s starts empty: %s", self.path, why)
        mark = secrets.token_hex(4)
        for file in self._files():
            if file not in (self.owners, self.lock):
                file.rename(file.with_name(f"{file.name}.{mark}{_GONE}"))

    def remove_gone(self) -> None:
        """Remove wiped files, also those of a process that died before it could. Raises OSError."""
        for file in self.path.glob(f"*{_GONE}"):
            file.unlink(missing_ok=True)
