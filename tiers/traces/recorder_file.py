"""RecordedFiles: lines of requests, a zstd frame at a time, in files that rotate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from tiers.concurrency.file_locks import release
from tiers.errors import RecordingError
from tiers.traces.recorder_folder import RecordFolder

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

    def leave(self) -> None:
        """Close the current file, which another process goes on writing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

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
