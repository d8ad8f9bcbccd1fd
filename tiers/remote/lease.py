"""A lease: of all processes on a directory one does its upkeep, without locks and common clocks.

PATH/upkeep/term-N     who holds term N, and what it has counted

There is one file, whose name has the term.

- **Taken** by renaming it to the next term, which one process alone can do: for the others it is
  gone. Neither that nor a beat takes space, so a full file system still has its upkeep.
- **Kept** by writing into it: the number of beats rises.
- **Lost** when others have *watched* it for `WATCH_SECONDS` of their own clock and it did not
  change: then one of them takes the next term. So hosts' clocks are never compared. A holder that
  was only stopped finds its term gone at its next beat, and holds nothing any more.

Two processes may both believe to hold it for a beat, or as long as a host caches a listing (a
minute on NFS). Both then evict what is oldest: somewhat more than is needed, and nothing wrong.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tiers.remote.directory_files import GONE, create, entries, fill, unlink

WATCH_SECONDS = 30.0
_TERM = re.compile(r"term-(\d{1,12})")
_NOTE = re.compile(rb"(\w+) (\d{1,20}) (\d{1,20}) (\d{1,20}) (\d{1,20}) ")
_NOTE_BYTES = 96
_NOBODY = b"nobody"


class Count(NamedTuple):
    """What the holder says: it has counted `round` times, and then there were `used` bytes; it
    evicts what is beyond `capacity`, 0: nothing."""

    round: int = 0
    used: int = 0
    capacity: int = 0


class Lease:
    """This process's view of a directory's lease. For one thread."""

    def __init__(self, path: str, mode: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`mode`: of the folder that is made in the directory `path`."""
        self._folder, self._mode, self._clock = f"{path}/upkeep", mode, clock
        self._owner = secrets.token_hex(8).encode()
        self._term = self._beats = 0
        self._seen: tuple[int, bytes] = (0, b"")
        self._since = clock()
        self.count = Count()
        """The last count that any holder has written."""

    @property
    def is_held(self) -> bool:
        """Whether this process held it at its last beat."""
        return self._term > 0

    def beat(self) -> bool:
        """Renew it, watch it, or take it where its holder is gone; whether this process holds it.
        Raises OSError: then it does not."""
        held, self._term = self._term, 0
        newest = self._newest()
        if newest == held > 0:
            self._write(held, self._owner)
        elif self._is_free(newest):
            self._take(newest)
        return self.is_held

    def resign(self) -> None:
        """Let others take it at once, if it is held. Raises OSError."""
        held, self._term = self._term, 0
        if held and self._newest() == held:
            self._write(held, _NOBODY)
            self._term = 0

    def _newest(self) -> int:
        """The highest term, 0 for none; files of others are removed."""
        names = [_TERM.fullmatch(entry.name) for entry in entries(self._folder)]
        terms = sorted(int(name[1]) for name in names if name)
        for term in terms[:-1]:  # made while the one was renamed
            unlink(self._file(term))
        return terms[-1] if terms else 0

    def _is_free(self, term: int) -> bool:
        note = self._read(term) if term else b""
        found = _NOTE.match(note)
        if found:
            self.count = Count(*map(int, found.groups()[2:]))
        if (term, note) != self._seen:
            self._seen, self._since = (term, note), self._clock()
        is_left = not term or (found is not None and found[1] == _NOBODY)
        return is_left or self._clock() - self._since >= WATCH_SECONDS

    def _take(self, term: int) -> None:
        try:
            if term:
                os.rename(self._file(term), self._file(term + 1))
            else:
                self._make_first()
        except (FileExistsError, FileNotFoundError):  # another was first
            return
        self._write(term + 1, self._owner)

    def _make_first(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
            os.chmod(self._folder, self._mode)
        fill(create(self._file(1)), [b" " * _NOTE_BYTES], self._mode)

    def _file(self, term: int) -> str:
        return f"{self._folder}/term-{term}"

    def _read(self, term: int) -> bytes:
        handle = self._open(term, os.O_RDONLY)
        if handle is None:
            return b""
        try:
            return os.pread(handle, _NOTE_BYTES, 0)
        finally:
            os.close(handle)

    def _write(self, term: int, owner: bytes) -> None:
        """Write who holds it; it is then held, unless its file is gone."""
        handle = self._open(term, os.O_WRONLY)
        if handle is None:
            return
        self._beats += 1
        note = b"%b %d %d %d %d " % (owner, self._beats, *self.count)
        try:
            os.pwrite(handle, note.ljust(_NOTE_BYTES - 1) + b"\n", 0)
        finally:
            os.close(handle)  # on an NFS others see it from now on
        self._term = term

    def _open(self, term: int, access: int) -> int | None:
        try:
            return os.open(self._file(term), access | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
