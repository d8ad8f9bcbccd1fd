"""What the upkeep of a shared directory has of its own: its lease's files, and what is left there.

A file under a temporary name, or an empty folder, goes once the holder has watched it unchanged
for `TEMPORARY_SECONDS` of its own clock.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from tiers.errors import TierRefused
from tiers.remote.packs.bucket import Listed
from tiers.remote.packs.lease import FOLDER, NOTE_BYTES, name_of, terms_of
from tiers.remote.packs.pack import key_of
from tiers.remote.shared.files import (
    FAN_OUT,
    FULL,
    NAMESPACE,
    TEMPORARY,
    create,
    entries,
    files,
    fill,
    folders,
    refusal,
    refuse_links,
    reopen,
    unless_gone,
)

TEMPORARY_SECONDS = 600.0
_LISTED_AT_ONCE = 1000

T = TypeVar("T")


class DirectoryTerms:
    """The `Terms` of a directory: PATH/upkeep/term-N.

    There is one file, which is renamed to the next term: for all but one process it is gone then.
    Neither that nor a beat takes space, so a full file system still has its upkeep. Where it can't
    write at all (CephFS, and what copies on write), a beat is the file's time alone.
    """

    def __init__(self, path: str, mode: int) -> None:
        """`mode`: of the folder that is made in the directory `path`."""
        self._path, self._folder, self._mode = path, f"{path}/{FOLDER}", mode
        self._unwritten: tuple[int, bytes] = (0, b"")
        """The term whose note had no room, and that note."""

    def newest(self) -> int:
        terms = terms_of(entry.name for entry in entries(self._folder))
        for term in terms[:-1]:  # made while the one was renamed
            with unless_gone():
                os.unlink(self._file(term))
        return terms[-1] if terms else 0

    def take(self, term: int, note: bytes) -> bool:
        try:
            if term:
                os.rename(self._file(term), self._file(term + 1))
            else:
                with suppress(FileExistsError):
                    os.mkdir(self._folder, 0o700)
                    os.chmod(self._folder, self._mode)
                fill(create(self._file(1)), [b" " * NOTE_BYTES], self._mode)
        except (FileExistsError, FileNotFoundError):  # another was first
            return False
        return self.write(term + 1, note)

    def read(self, term: int) -> bytes:
        handle = self._open(term, os.O_RDONLY)
        if handle is None:
            return b""
        try:
            note = os.pread(handle, NOTE_BYTES, 0)
            if term == self._unwritten[0]:
                note = self._unwritten[1]
            return note and note + b"%d" % os.fstat(handle).st_mtime_ns
        finally:
            os.close(handle)

    def write(self, term: int, note: bytes) -> bool:
        handle = self._open(term, os.O_WRONLY)
        if handle is None:
            return False
        self._unwritten = (0, b"")
        try:
            try:
                os.pwrite(handle, note, 0)
            finally:
                os.close(handle)  # on an NFS others see it from now on
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._unwritten = term, note
            os.utime(self._file(term))
        return True

    def _open(self, term: int, access: int) -> int | None:
        with unless_gone():
            return reopen(self._file(term), access)
        return None

    def _file(self, term: int) -> str:
        refuse_links(self._folder)
        return f"{self._path}/{name_of(term)}"


class PacksAndLeftovers:
    """Lists a directory, for one thread."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._before: dict[str, tuple[int, int, float]] = {}
        self._watched: dict[str, tuple[int, int, float]] = {}
        """What is left there: its size, when it changed, and since when it is watched; of the last
        listing, and of this one."""

    def list(self, refused: Callable[[TierRefused], None]) -> Iterator[Sequence[Listed]]:
        """See `Bucket`. Raises OSError."""
        self._watched = {}
        for space in folders(self._path, NAMESPACE):
            is_empty = True
            for inner in self._allowed(folders(f"{self._path}/{space}", FAN_OUT), refused):
                is_empty = False
                yield from self._list(f"{space}/{inner}", refused)
            if is_empty:  # each reset leaves one, and each takes time
                self._watch_folder(f"{self._path}/{space}")
                yield ()
        self._before = self._watched

    def _list(
        self, folder: str, refused: Callable[[TierRefused], None]
    ) -> Iterator[Sequence[Listed]]:
        """The packs of one folder, and an empty piece at least."""
        packs: list[Listed] = []
        is_empty = True
        for file, found in self._allowed(files(f"{self._path}/{folder}"), refused):
            is_empty = False
            name = f"{folder}/{file}"
            if file.startswith(TEMPORARY):
                try:
                    self._watch(f"{self._path}/{name}", found)
                except PermissionError as error:
                    refused(refusal(error, self._path))
            elif key_of(name) is not None:
                packs.append(Listed(name, found.st_size, found.st_mtime))
            if len(packs) == _LISTED_AT_ONCE:
                yield packs
                packs = []
        if is_empty:
            self._watch_folder(f"{self._path}/{folder}")
        yield packs

    def _watch_folder(self, path: str) -> None:
        with suppress(OSError):  # somebody puts into it, or has removed it
            self._watch(path, os.stat(path))

    def _watch(self, path: str, found: os.stat_result) -> None:
        """Remove it, if it was watched long enough. Raises OSError."""
        size, changed, since = self._before.get(path, (0, 0, 0.0))
        now = self._clock()
        if (size, changed) != (found.st_size, found.st_mtime_ns):
            since = now
        if now - since < TEMPORARY_SECONDS:
            self._watched[path] = found.st_size, found.st_mtime_ns, since
        elif stat.S_ISDIR(found.st_mode):
            os.rmdir(path)
        else:
            with unless_gone():
                os.unlink(path)

    def _allowed(self, some: Iterator[T], refused: Callable[[TierRefused], None]) -> Iterator[T]:
        """These, up to a folder that this process's user may not read."""
        try:
            yield from some
        except PermissionError as error:
            refused(refusal(error, self._path))
