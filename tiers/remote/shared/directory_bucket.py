"""A bucket of files in a directory that hosts share: NFS, Lustre, CephFS, a volume of Kubernetes.

PATH/NAMESPACE/XX/REST      a pack (`packs.pack.name_of`), in one of 256 folders a namespace
PATH/NAMESPACE/XX/.tmp-*    one that is being written, or whose writer died (`upkeep`)

What is promised, and by what:

- **Whole or absent, on every host.** A pack is written under a temporary name in its own folder,
  synced and closed, and then linked to its name. Closing is what makes its bytes visible to other
  hosts of an NFS; the sync reports what could not be written while it can still be unsaid, and
  leaves no dirty page behind that would hold up the engine's host.
- **The first one stays.** `link` never replaces a name, which is atomic in the local file systems
  and in those of the network alike; `renameat2` with NOREPLACE is not: NFS refuses it. A file
  system without hard links is refused by name. If the answer to a link is lost, NFS says that the
  name is taken: the store then looks, and finds its own pack.
- **After a crash** a pack may be missing, or be damaged where the server lost what it had synced:
  either is a miss, as records prove themselves. Folders are not synced.

A pack that is read is made to look new, for who evicts by age (`packs.evictor`) or cleans up.

There is no lock, no mapped file and no clock that is compared. A call that hangs in the kernel
can't be interrupted: it keeps its thread, and the guard leaves the tier alone after `deadline`.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tiers.block import Buffer, after
from tiers.errors import TierFull, TierNotOpen, TierUnavailable, TierUnusable
from tiers.recent import RecentDict
from tiers.remote.packs.evictor import KeptBucket, Pace, Pause
from tiers.remote.shared.files import (
    FULL,
    GONE,
    TEMPORARY,
    create,
    fill,
    first,
    refusal,
    refuse_links,
    reopen,
    unless_gone,
)
from tiers.remote.shared.upkeep import DirectoryTerms, PacksAndLeftovers
from tiers.store import time_left

PIECE_BYTES = 1 << 20
"""Bytes of a pack that are read at once, and a block at least, before it is asked whether they are
waited for."""
USE_SECONDS = 60.0
"""A pack's use is recorded by each process once in so long, or half of that, as its file's time.
Simulated, in a directory that turns over in 100 to 650 seconds, hits are at most 2 points fewer
than with each use recorded, and with 600 seconds 1 to 11."""
_MOST_USES = 65536
PACE = Pace(beat=5.0, usual=Pause(10.0, 1.0), full=Pause(1.0, 0.0), deletes=1)
UNBOUNDED_PACE = PACE._replace(usual=Pause(600.0, 1.0))
"""The same where there is no capacity to keep, and only leftovers to remove."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO})
"""EIO: of a mount by rclone, and of any that fails for a while."""


class DirectoryBucket:
    """A `Bucket` over a directory, whose files are used by its group if the directory is."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TierNotOpen where the directory is missing: it is not made, so that a file system
        that is not mounted is no empty tier on this host's own disk. Raises TierUnusable."""
        self._path = str(path)
        self.mode = _mode_of(path)
        """Of the folders that are made in it."""
        self._used = RecentDict[str, None](_MOST_USES, USE_SECONDS, time.monotonic)
        """Packs whose use need not be recorded yet."""
        self.list = PacksAndLeftovers(self._path, clock).list

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        folder = f"{self._path}/{name.rpartition('/')[0]}"
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        with self._translated():
            try:
                fill(self._create(temporary), parts, self.mode)
                self._used.update({f"{self._path}/{name}": None})  # it is new
                return self._named(temporary, f"{self._path}/{name}")
            finally:
                with suppress(OSError):
                    os.unlink(temporary)

    def _named(self, temporary: str, path: str) -> bool:
        """Give a file its name; False: the name is taken. Raises OSError, TierUnusable."""
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            kind = TierUnavailable if error.errno == errno.EIO else TierUnusable
            raise kind(
                f"{self._path}: its file system makes no hard links, or fails ({error.strerror}); "
                "name a directory on NFS, Lustre, CephFS or another that makes them"
            ) from error
        return True

    def _create(self, path: str) -> int:
        fan_out = os.path.dirname(path)
        refuse_links(os.path.dirname(fan_out), fan_out)
        with unless_gone():
            return create(path)
        self._make_folders(path)
        return create(path)

    def _make_folders(self, path: str) -> None:
        """Make the two folders that a file is in. Raises TierNotOpen: the directory is gone."""
        fan_out = os.path.dirname(path)
        for folder in (os.path.dirname(fan_out), fan_out):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue
            except OSError as error:
                if error.errno in GONE and not os.path.isdir(self._path):
                    raise _missing(self._path) from error
                raise
            if self.mode != 0o700:  # the umask of this process may be narrower
                os.chmod(folder, self.mode)

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        path = f"{self._path}/{name}"
        with self._translated(), suppress(FileNotFoundError):
            for _ in range(2):
                try:
                    return self._read(path, start, into)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
                # The name may lead to another file now, or to none.
            os.stat(self._path)  # raises where the directory itself is gone
        return None

    def _read(self, path: str, start: int, into: Sequence[memoryview]) -> int:
        """Fill these views with the bytes from `start` on; how many there were. Raises OSError."""
        handle = reopen(path, os.O_RDONLY)
        try:
            done, left = 0, list(into)
            while left and (count := os.preadv(handle, first(left, PIECE_BYTES), start + done)):
                done += count
                left = after(left, count)
                if not time_left():
                    break
            if not any(self._used.known([path])):
                self._used.update({path: None})
                with suppress(OSError):  # where nothing can be written
                    os.utime(handle)
            return done
        finally:
            os.close(handle)

    def delete(self, names: Sequence[str]) -> None:
        with self._translated():
            for name in names:
                with unless_gone():
                    os.unlink(f"{self._path}/{name}")

    def describe(self) -> str:
        return self._path

    def close(self) -> None:
        """No file stays open between calls."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise refusal(error, self._path) from error
        except OSError as error:
            kind = TierFull if error.errno in FULL else TierUnavailable
            raise kind(f"{self._path}: {error.strerror or type(error).__name__}") from error


def kept_directory(path: Path, capacity: int | None) -> KeptBucket:
    """One that is kept below a capacity. Raises as `DirectoryBucket` and `KeptBucket`."""
    bucket = DirectoryBucket(path)
    terms = DirectoryTerms(str(path), bucket.mode)
    return KeptBucket(bucket, capacity, terms, UNBOUNDED_PACE if capacity is None else PACE)


def _mode_of(path: Path) -> int:
    """The mode of the folders that are made in a directory. Raises TierNotOpen, TierUnusable."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise _missing(str(path)) from None
    except OSError as error:
        raise TierNotOpen(f"{path} can't be read: {error.strerror}; see its mount") from error
    if not stat.S_ISDIR(found.st_mode):
        raise TierUnusable(f"{path} is a file; name a directory, or move the file away")
    if found.st_mode & 0o002:
        raise TierUnusable(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so others can write to it; "
            "chmod it to 0770, or to 0700, or name a directory of the tier's own"
        )
    return 0o700 | stat.S_IMODE(found.st_mode) & 0o2070


def _missing(path: str) -> TierNotOpen:
    return TierNotOpen(f"{path} is not there; mount its file system, or make the directory once")
