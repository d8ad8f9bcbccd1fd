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

from tiers.concurrency.file_locks import acquire, opened, release, try_lock
from tiers.errors import RecordingError
from tiers.paths import foreign

KEY_BYTES = 32
_KEY = "kvtiers-trace.key"
_DRAFT = "kvtiers-trace.key.draft"
_LOCK = "kvtiers-trace.lock"
_FILE = re.compile(r"kvtiers-trace-([0-9]{13})-[A-Za-z0-9._-]{1,100}\.jsonl\.zst")
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_OLD = os.O_NOFOLLOW | os.O_NONBLOCK
WRITERS = 16
"""A file is at most this part of `max`, so that deleting the oldest loses little."""
LOCK_SECONDS = 1.0
_LEVEL = 1
"""Ids are random numbers: level 3 is six times slower and its files are no smaller, measured on a
public trace of conversations in blocks of 16 tokens."""
ROTATIONS = 8
"""A file is written for this part of `keep` at most: it is deleted whole, by its first request."""


class _Found(NamedTuple):
    """A file of a recording that nobody writes any more."""

    started: int
    name: str
    size: int


class RecordFolder:
    """One writer's view of the folder, by its descriptor: it does not write to another folder that
    takes its place later. It appends to the writer's current file, each time a whole zstd frame, so
    that a file can be read after a crash. Used by one thread; every method may raise OSError and
    RecordingError."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        keep: float,
        writer: str = "",
        header: Callable[[], bytes] = bytes,
    ) -> None:
        """`keep`: seconds. `header`: the first line of a file."""
        self.path = path
        self._file_bytes = max_bytes // WRITERS
        self._max_bytes = max_bytes
        self._keep = keep
        self._writer = writer
        self._header = header
        self._folder = self._file = -1
        self._name = ""
        self._size = 0
        self._ends = 0.0

    def open(self) -> bytes:
        """Make the folder or check the one that exists, and return its key."""
        from zstandard import ZstdCompressor

        self._compress = ZstdCompressor(level=_LEVEL).compress
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        try:
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise RecordingError(
                f"{self.path} is no folder, or a symbolic link ({error.strerror}); name a folder"
            ) from error
        if why := foreign(os.fstat(self._folder)):
            raise RecordingError(f"{self.path} {why}")
        with self._locked():
            return self._key()

    def close(self) -> None:
        try:
            self.end()
        finally:
            folder, self._folder = self._folder, -1
            if folder >= 0:
                os.close(folder)

    def append(self, lines: bytes) -> None:
        """Write lines, each with its newline: all of them or none; after an error the next call
        begins another file."""
        frame = self._compress(lines)
        is_full = self._size + len(frame) > self._file_bytes
        if is_full or time.monotonic() >= self._ends:
            self.end()
        if self._file < 0:
            self._begin()
        if self._size + len(frame) > self._file_bytes:
            raise RecordingError(
                f"{self.path}: {len(frame)} bytes of lines are over a file's "
                f"{self._file_bytes}; raise record.max"
            )
        self._write(frame)

    def rotate(self) -> None:
        """End the current file if its time is over, and delete files that are too old."""
        if time.monotonic() >= self._ends:
            self.end()
        with self._locked():
            for file in self._ended()[0]:
                if self._is_old(file):
                    os.unlink(file.name, dir_fd=self._folder)

    def end(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            release(file)

    def _begin(self) -> None:
        """Make room for a file and create it, locked.

        Files of this folder that are too old are deleted, and the oldest of the others until a file
        of `_file_bytes` fits. Raises RecordingError where those in use leave no room.
        """
        with self._locked():
            self._make_room()
            started = int(time.time() * 1000)
            while self._file < 0:
                self._name = f"kvtiers-trace-{started:013}-{self._writer}.jsonl.zst"
                with suppress(FileExistsError):
                    flags = _NEW | os.O_WRONLY
                    self._file = os.open(self._name, flags, 0o600, dir_fd=self._folder)
                    try_lock(self._file)
                started += 1
        self._size = 0
        self._ends = time.monotonic() + self._keep / ROTATIONS
        self._write(self._compress(self._header()))

    def _write(self, frame: bytes) -> None:
        """Write a frame, or leave the file as it was: nothing behind half a frame can be read."""
        try:
            rest = memoryview(frame)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            with suppress(OSError):
                if not self._size:
                    os.unlink(self._name, dir_fd=self._folder)
            with suppress(OSError):
                self.end()
            raise
        self._size += len(frame)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with opened(_LOCK, os.O_RDWR | os.O_CREAT | _OLD, self._folder) as lock:
            if not acquire(lock, LOCK_SECONDS):
                raise RecordingError(
                    f"{self.path}: another process holds {_LOCK} "
                    f"(fuser {self.path / _LOCK} names it)"
                )
            yield

    def _key(self) -> bytes:
        """The key, made by whoever comes first. Only under the lock."""
        with suppress(FileNotFoundError):
            return self._read_key()
        with suppress(FileNotFoundError):  # of a writer that died here
            os.unlink(_DRAFT, dir_fd=self._folder)
        key = secrets.token_bytes(KEY_BYTES)
        with opened(_DRAFT, _NEW | os.O_WRONLY, self._folder) as draft:
            os.write(draft, key.hex().encode() + b"\n")
            os.fsync(draft)
        os.rename(_DRAFT, _KEY, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        return self._read_key()

    def _read_key(self) -> bytes:
        with opened(_KEY, os.O_RDONLY | _OLD, self._folder) as file:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise RecordingError(f"{self.path / _KEY} is no file of this user's; move it away")
            if found.st_mode & 0o077:
                raise RecordingError(
                    f"{self.path / _KEY} has mode {found.st_mode & 0o7777:04o}, so others can read "
                    "it; chmod it to 0600, or remove it, and ids change"
                )
            text = os.read(file, 4 * KEY_BYTES)
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
        while left and taken + sum(file.size for file in left) + self._file_bytes > self._max_bytes:
            left.pop(0)
        for file in set(ended) - set(left):
            os.unlink(file.name, dir_fd=self._folder)
        if taken + self._file_bytes > self._max_bytes:
            raise RecordingError(
                f"{self.path}: others write {taken // self._file_bytes} files there, and "
                f"record.max has room for {WRITERS}; raise it, or name another folder"
            )

    def _is_old(self, file: _Found) -> bool:
        return file.started < (time.time() - self._keep) * 1000

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
                with opened(name, os.O_RDWR | _OLD, self._folder) as file:
                    if try_lock(file):
                        ended.append(_Found(int(match[1]), name, found.st_size))
                    else:  # it is being written
                        taken += max(found.st_size, self._file_bytes)
        return sorted(ended), taken
