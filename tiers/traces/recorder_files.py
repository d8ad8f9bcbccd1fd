"""The folder of a recording: its key, which files fit into it, and how a file is written."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tiers.concurrency.file_locks import acquire, release, try_lock
from tiers.errors import RecordingError

KEY_BYTES = 32
_KEY = "kvtiers-trace.key"
_DRAFT = "kvtiers-trace.key.draft"
_LOCK = "kvtiers-trace.lock"
_FILE = re.compile(r"kvtiers-trace-([0-9]{13})-[A-Za-z0-9._-]{1,100}\.jsonl\.zst")
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
WRITERS = 16
"""A file is at most this part of `max`, so that the oldest can go without losing much."""
LOCK_SECONDS = 1.0


class _Found(NamedTuple):
    """A file of a recording that nobody writes any more."""

    started: int
    name: str
    size: int


class RecordFolder:
    """One writer's view of the folder, by its descriptor: what is put in its place later is not
    written to. Used by one thread; every method may raise OSError and RecordingError."""

    def __init__(
        self, path: Path, max_bytes: int, keep: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`keep`: seconds. `clock`: Unix time."""
        self.path = path
        self.file_bytes = max_bytes // WRITERS
        self._max_bytes = max_bytes
        self._keep = keep
        self._clock = clock
        self._folder = -1

    def open(self) -> bytes:
        """Make the folder or check the one that exists, and return its key."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._folder = os.open(self.path, flags)
        except OSError as error:
            raise RecordingError(
                f"{self.path} is no folder, or a symbolic link ({error.strerror}); name a folder"
            ) from error
        self._check()
        with self._locked():
            return self._key()

    def close(self) -> None:
        """Let the folder go."""
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    def begin(self, writer: str) -> tuple[str, int]:
        """Make room for a file and create it; its name, and its descriptor, which is locked.

        Files of this folder that are too old go, and the oldest of the others until a file of
        `file_bytes` fits. Raises RecordingError where those that are being written leave no room.
        """
        with self._locked():
            self._make_room()
            started = int(self._clock() * 1000)
            while True:
                name = f"kvtiers-trace-{started:013}-{writer}.jsonl.zst"
                with suppress(FileExistsError):
                    file = os.open(name, _NEW | os.O_WRONLY, 0o600, dir_fd=self._folder)
                    try_lock(file)
                    return name, file
                started += 1

    def tidy(self) -> None:
        """Delete files that are too old."""
        with self._locked():
            for file in self._ended()[0]:
                if self._is_old(file):
                    os.unlink(file.name, dir_fd=self._folder)

    def remove(self, name: str) -> None:
        """Delete a file that this writer began."""
        os.unlink(name, dir_fd=self._folder)

    def _check(self) -> None:
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid():
            raise RecordingError(
                f"{self.path} belongs to user {found.st_uid}, this process runs as "
                f"{os.geteuid()}; give the folder to that user, or name another"
            )
        if found.st_mode & 0o022:
            raise RecordingError(
                f"{self.path} has mode {found.st_mode & 0o7777:04o}, so others can write to it; "
                "chmod it to 0700, or name a folder of the recording's own"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | _OLD
        lock = os.open(_LOCK, flags, 0o600, dir_fd=self._folder)
        try:
            if not acquire(lock, LOCK_SECONDS):
                raise RecordingError(
                    f"{self.path}: another process holds {_LOCK} "
                    f"(fuser {self.path / _LOCK} names it)"
                )
            yield
        finally:
            release(lock)

    def _key(self) -> bytes:
        """The key, made by whoever comes first. Only under the lock."""
        try:
            return self._read_key()
        except FileNotFoundError:
            pass
        with suppress(FileNotFoundError):  # of a writer that died here
            os.unlink(_DRAFT, dir_fd=self._folder)
        key = secrets.token_bytes(KEY_BYTES)
        draft = os.open(_DRAFT, _NEW | os.O_WRONLY, 0o600, dir_fd=self._folder)
        try:
            os.write(draft, key.hex().encode() + b"\n")
            os.fsync(draft)
        finally:
            os.close(draft)
        os.rename(_DRAFT, _KEY, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        return self._read_key()

    def _read_key(self) -> bytes:
        file = os.open(_KEY, os.O_RDONLY | _OLD, dir_fd=self._folder)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise RecordingError(f"{self.path / _KEY} is no file of this user's; move it away")
            if found.st_mode & 0o077:
                raise RecordingError(
                    f"{self.path / _KEY} has mode {found.st_mode & 0o7777:04o}, so others can read "
                    "it; chmod it to 0600, or remove it, and ids change"
                )
            text = os.read(file, 4 * KEY_BYTES)
        finally:
            os.close(file)
        try:
            key = bytes.fromhex(text.decode())
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise RecordingError(
                f"{self.path / _KEY} is damaged: it has no {2 * KEY_BYTES} hexadecimal digits; "
                "restore it, or remove it, and ids change"
            )
        return key

    def _make_room(self) -> None:
        """Delete until a file fits. Only under the lock, so that two writers never take the same
        room."""
        ended, taken = self._ended()
        left = [file for file in ended if not self._is_old(file)]
        while left and taken + sum(file.size for file in left) + self.file_bytes > self._max_bytes:
            left.pop(0)
        for file in set(ended) - set(left):
            os.unlink(file.name, dir_fd=self._folder)
        if taken + self.file_bytes > self._max_bytes:
            raise RecordingError(
                f"{self.path}: others write {taken // self.file_bytes} files there, and record.max "
                f"has room for {WRITERS}; raise it, or name another folder"
            )

    def _is_old(self, file: _Found) -> bool:
        return file.started < (self._clock() - self._keep) * 1000

    def _ended(self) -> tuple[list[_Found], int]:
        """Files that nobody writes, the oldest first, and the bytes that the others may take."""
        ended = []
        taken = 0
        for name in os.listdir(self._folder):
            match = _FILE.fullmatch(name)
            if match is None:
                continue
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    continue
                if self._is_being_written(name):
                    taken += max(found.st_size, self.file_bytes)
                else:
                    ended.append(_Found(int(match[1]), name, found.st_size))
        return sorted(ended), taken

    def _is_being_written(self, name: str) -> bool:
        file = os.open(name, os.O_RDWR | _OLD, dir_fd=self._folder)
        try:
            return not try_lock(file)
        finally:
            release(file)


_LEVEL = 1
"""Ids are random numbers: level 3 is six times slower and its files are no smaller, measured on a
public trace of conversations in blocks of 16 tokens."""
ROTATIONS = 8
"""A file is written for this part of `keep` at most: it is deleted whole, by its first request."""


class RecordedFiles:
    """Appends to the current file of one writer, each time a whole zstd frame, so that what a
    crash leaves can be read. Used by one thread."""

    def __init__(
        self,
        folder: RecordFolder,
        writer: str,
        header: Callable[[], bytes],
        keep: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`header`: the first line of a file. `keep`: seconds."""
        from zstandard import ZstdCompressor

        self._folder = folder
        self._writer = writer
        self._header = header
        self._now = now
        self._seconds = keep / ROTATIONS
        self._compress = ZstdCompressor(level=_LEVEL).compress
        self._file = -1
        self._name = ""
        self._size = 0
        self._ends = 0.0

    def append(self, lines: bytes) -> None:
        """Write lines, each with its newline: all of them or none.

        Raises OSError and RecordingError; the next call begins another file.
        """
        frame = self._compress(lines)
        if self._file >= 0 and (
            self._size + len(frame) > self._folder.file_bytes or self._now() >= self._ends
        ):
            self.end()
        if self._file < 0:
            self._begin()
        if self._size + len(frame) > self._folder.file_bytes:
            raise RecordingError(
                f"{self._folder.path}: {len(frame)} bytes of lines are over a file's "
                f"{self._folder.file_bytes}; raise record.max"
            )
        self._write(frame)

    def rotate(self) -> None:
        """End the current file if its time is over, and delete files that are too old."""
        if self._file >= 0 and self._now() >= self._ends:
            self.end()
        self._folder.tidy()

    def end(self) -> None:
        """End the current file."""
        file, self._file = self._file, -1
        if file >= 0:
            release(file)

    def _begin(self) -> None:
        self._name, self._file = self._folder.begin(self._writer)
        self._size = 0
        self._ends = self._now() + self._seconds
        self._write(self._compress(self._header()))

    def _write(self, frame: bytes) -> None:
        """Write a frame, or leave the file as it was: what follows half a frame can't be read."""
        try:
            rest = memoryview(frame)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            with suppress(OSError):
                if not self._size:
                    self._folder.remove(self._name)
            with suppress(OSError):
                self.end()
            raise
        self._size += len(frame)
