"""Files of a directory that hosts share, which any of them may remove at any moment."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiers.block import NAMESPACE_BYTES, Buffer, after
from tiers.errors import TierRefused, TierUnavailable

TEMPORARY = ".tmp-"
"""What the name of a file begins with that is being written."""
NAMESPACE, FAN_OUT = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}"), re.compile("[0-9a-f]{2}")
"""The names of the folders of packs."""
GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""ESTALE: another host removed what this one remembers."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def create(path: str) -> int:
    """Make a file that is not there yet. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def reopen(path: str, access: int) -> int:
    """Open a file that was there, and wait for no other end of a pipe in its place. Raises
    OSError."""
    access |= os.O_NOFOLLOW
    try:
        return os.open(path, access | os.O_NONBLOCK)
    except BlockingIOError:  # an NFS server here has given it to a host, and asks for it back
        return os.open(path, access)


def refuse_links(*folders: str) -> None:
    """Raise TierUnavailable if one is a link: whoever made it would choose where we write."""
    for folder in folders:
        if os.path.islink(folder):
            raise TierUnavailable(f"{folder} is a link, which may lead anywhere: remove it")


def fill(handle: int, parts: Sequence[Buffer], mode: int) -> None:
    """Write, sync and close a new file, for the group too if the `mode` of its folder has it. Its
    bytes are then in the file system, as every host sees it. Raises OSError."""
    try:
        if mode & 0o070:
            os.fchmod(handle, mode & 0o660)
        left = [memoryview(part) for part in parts]
        while left:
            left = after(left, os.writev(handle, left))
        os.fsync(handle)
    finally:
        os.close(handle)


def first(views: Sequence[memoryview], most: int) -> Sequence[memoryview]:
    """The first of these, of `most` bytes together or a little more."""
    total = 0
    for number, view in enumerate(views):
        if total >= most:
            return views[:number]
        total += len(view)
    return views


@contextmanager
def unless_gone() -> Iterator[None]:
    """Go on where another host removed what is needed within. Raises other errors."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise


def files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """The names of a folder's files, and facts of each. Raises OSError."""
    for entry in entries(folder):
        found = None
        with unless_gone():
            found = entry.stat(follow_symlinks=False)
        if found and stat.S_ISREG(found.st_mode):
            yield entry.name, found


def folders(path: str, name: re.Pattern[str]) -> Iterator[str]:
    """The folders in `path` with such a name. Raises OSError."""
    for entry in entries(path):
        if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield entry.name


def refusal(error: PermissionError, path: str) -> TierRefused:
    """What the user of this process may not do; `path`: where the error names no file."""
    return TierRefused(f"{error.filename or path}: {error.strerror or 'Permission denied'}")


def entries(folder: str) -> list[os.DirEntry[str]]:
    """What lies in a folder; nothing, if it is gone. Raises OSError."""
    with unless_gone(), os.scandir(folder) as found:
        return list(found)
    return []
