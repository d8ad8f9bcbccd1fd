"""A bucket of files in a directory that hosts share: NFS, Lustre, CephFS, a volume of Kubernetes.

PATH/NAMESPACE/XX/REST      a pack (`packs.pack.name_of`), in one of 256 folders a namespace
PATH/NAMESPACE/XX/.tmp-*    one that is being written, or whose writer died

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

There is no lock, no mapped file and no clock that is compared. A call that hangs in the kernel
can't be interrupted: it keeps its thread, and the guard leaves the tier alone after `deadline`.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tiers.block import Buffer
from tiers.errors import TierFull, TierNotOpen, TierUnavailable, TierUnusable
from tiers.remote.packs.bucket import Listed
from tiers.remote.packs.pack import key_of

TEMPORARY = ".tmp-"
_LISTED_AT_ONCE = 1000
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""ESTALE: another host removed what this one remembers."""


class DirectoryBucket:
    """A `Bucket` over a directory, whose files are used by its group if the directory is."""

    def __init__(self, path: Path) -> None:
        """Raises TierNotOpen where the directory is missing: it is not made, so that a file system
        that is not mounted is no empty tier on this host's own disk. Raises TierUnusable."""
        self._path = str(path)
        self._mode = _mode_of(path)

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        folder = f"{self._path}/{name.rpartition('/')[0]}"
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        with self._translated():
            try:
                self._write(temporary, parts)
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
            raise TierUnusable(
                f"{self._path}: its file system makes no hard links ({error.strerror}); name a "
                "directory on NFS, Lustre, CephFS or another that does"
            ) from error
        return True

    def _write(self, path: str, parts: Sequence[Buffer]) -> None:
        handle = self._create(path)
        try:
            if self._mode & 0o070:
                os.fchmod(handle, self._mode & 0o660)
            left = [memoryview(part) for part in parts]
            while left:
                left = _after(left, os.writev(handle, left))
            os.fsync(handle)
        finally:
            os.close(handle)

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        self._make_folders(path)
        return os.open(path, flags, 0o600)

    def _make_folders(self, path: str) -> None:
        """Make the two folders that a file is in. Raises TierNotOpen: the directory is gone."""
        fan_out = os.path.dirname(path)
        for folder in (os.path.dirname(fan_out), fan_out):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue
            except OSError as error:
                if error.errno in _GONE and not os.path.isdir(self._path):
                    raise _missing(self._path) from error
                raise
            if self._mode != 0o700:  # the umask of this process may be narrower
                os.chmod(folder, self._mode)

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        path = f"{self._path}/{name}"
        with self._translated():
            try:
                return _read(path, start, into)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            with suppress(FileNotFoundError):  # the name may lead to another file now, or to none
                return _read(path, start, into)
        return None

    def delete(self, names: Sequence[str]) -> None:
        with self._translated():
            for name in names:
                _unlink(f"{self._path}/{name}")

    def list(self, prefix: str) -> Iterator[Sequence[Listed]]:
        with self._translated():
            found: list[Listed] = []
            for folder in self._folders(prefix):
                for entry in _entries(f"{self._path}/{folder}"):
                    name = f"{folder}/{entry.name}"
                    if key_of(name) is None or (status := _status(entry)) is None:
                        continue
                    found.append(Listed(name, status.st_size, status.st_mtime))
                    if len(found) == _LISTED_AT_ONCE:
                        yield found
                        found = []
            if found:
                yield found

    def _folders(self, prefix: str) -> Iterator[str]:
        """The folders of packs whose names begin with `prefix`, from the directory on."""
        space, _, fan_out = prefix.strip("/").partition("/")
        if fan_out:
            yield f"{space}/{fan_out}"
            return
        for one in [space] if space else [e.name for e in _entries(self._path) if _is_folder(e)]:
            for entry in _entries(f"{self._path}/{one}"):
                if _is_folder(entry):
                    yield f"{one}/{entry.name}"

    def describe(self) -> str:
        return self._path

    def close(self) -> None:
        """No file stays open between calls."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = TierFull if error.errno in _FULL else TierUnavailable
            raise kind(f"{self._path}: {error.strerror or type(error).__name__}") from error


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


def _read(path: str, start: int, into: Sequence[memoryview]) -> int:
    """Fill these views with the bytes from `start` on; how many there were. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        done, left = 0, list(into)
        while left and (count := os.preadv(handle, left, start + done)):
            done += count
            left = _after(left, count)
        return done
    finally:
        os.close(handle)


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of these behind their first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What lies in a folder; nothing, if it is gone. Raises OSError."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Facts of a file; None: it is gone, or no file. Raises OSError."""
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return found if stat.S_ISREG(found.st_mode) else None
