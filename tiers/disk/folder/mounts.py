"""On what kind of file system a folder lies, and whether the tier may use it.

LMDB maps its index as memory and locks it for the processes of one kernel. Where several hosts
mount one file system, each has its own pages and, often, its own locks: the index tears, and a
process that reads a page of it dies.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tiers.errors import TierUnusable

_MOUNTS = Path("/proc/self/mountinfo")
_MOUNT_OF_HANDLE = re.compile(r"^mnt_id:\s*([0-9]+)$", re.M)

MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems whose files take memory, and are lost when the machine goes down."""

ONE_HOST = MEMORY | {
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "reiserfs"),
    *("rootfs", "xfs", "zfs"),
}
"""File systems that two hosts can't have mounted at once."""

_SHARED = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|gfs2?|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs"
    r"|pvfs2|smb[23]|smbfs|vboxsf|virtiofs|vmhgfs|weka(fs)?|fuse(\..*)?"
)
_FUSE_OF_THIS_HOST = frozenset({"fuse.fuse-overlayfs"})


def file_system(path: Path) -> str:
    """Return the kernel's name of the file system at a path, or at its nearest existing parent; ""
    if unknown."""
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    try:
        # The dot makes the kernel mount an automount.
        handle = os.open(f"{there}/." if there.is_dir() else there, os.O_PATH | os.O_CLOEXEC)
        try:
            found = _MOUNT_OF_HANDLE.search(Path(f"/proc/self/fdinfo/{handle}").read_text())
        finally:
            os.close(handle)
        return _kind(_MOUNTS.read_text(errors="replace"), found[1]) if found else ""
    except OSError:
        return ""


def _kind(mounts: str, mount: str) -> str:
    for line in mounts.splitlines():
        mine, _, theirs = line.partition(" - ")
        if mine.split(" ", 1)[0] == mount:
            return theirs.split(" ", 1)[0]
    return ""


def require_suitable(path: Path, kind: str) -> None:
    """Raise TierUnusable for a file system that other hosts may share."""
    if _SHARED.fullmatch(kind) and kind not in _FUSE_OF_THIS_HOST:
        raise TierUnusable(
            f"{path} is on a file system of type {kind}, which other hosts may share or which "
            "does not keep a file that is mapped as memory: the tier's index would tear; name a "
            "folder on a disk of this host (ext4, XFS, Btrfs), and share blocks between hosts by "
            "a tier of type redis"
        )
