"""Slab files: fixed slots of one size each, read and written straight from the caller's memory.

A slot starts with the record's header, the payload follows. A slot that holds a block has disk
space behind it; a free one is a hole, so that a file takes no more space than its blocks do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from tiers.block import HEADER_BYTES

SLOT_ALIGNMENT = 4096
"""Slots start at multiples of this and are as long: whole pages, and what direct I/O asks for."""

_NAME = re.compile(r"^slab-([0-9]+)\.dat$")
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
_libc = ctypes.CDLL(None, use_errno=True)


def slot_bytes(payload_bytes: int) -> int:
    """Bytes of the slot that holds a payload of this length, its header included."""
    return -(-(HEADER_BYTES + payload_bytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def punch(handle: int, offset: int, length: int) -> None:
    """Give a range's disk space back; it reads as zeros from now on. Raises OSError."""
    try:
        fallocate = _libc.fallocate
    except AttributeError as error:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
    where = ctypes.c_int64(offset), ctypes.c_int64(length)
    while fallocate(handle, _PUNCH_HOLE | _KEEP_SIZE, *where) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


class Slab:
    """One file of slots. Every method may raise OSError; threads may use it at once."""

    def __init__(self, path: Path, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle = os.open(path, flags, 0o600)
        self._size = size

    def write(self, number: int, header: bytes, payload: memoryview) -> None:
        """Write a record into a slot, from the caller's memory."""
        parts = [memoryview(header), payload]
        offset = number * self._size
        while parts:
            done = os.pwritev(self._handle, parts, offset)
            offset += done
            parts = _after(parts, done)

    def read(self, number: int, header: bytearray, payload: memoryview) -> int:
        """Fill header and payload from a slot; the bytes read, fewer where the file ends."""
        parts = [memoryview(header), payload]
        start = offset = number * self._size
        while parts:
            done = os.preadv(self._handle, parts, offset)
            if done == 0:
                break
            offset += done
            parts = _after(parts, done)
        return offset - start

    def allocate(self, number: int) -> None:
        """Put disk space behind a slot, so that a full disk is found before anything is lost."""
        os.posix_fallocate(self._handle, number * self._size, self._size)

    def punch(self, numbers: Iterable[int]) -> None:
        """Take the disk space from slots."""
        for first, count in _runs(numbers):
            punch(self._handle, first * self._size, count * self._size)

    def room(self) -> int:
        """Bytes that the file system has left for us."""
        found = os.fstatvfs(self._handle)
        return found.f_bavail * found.f_frsize

    def slots(self) -> int:
        """How many whole slots the file is long."""
        return os.fstat(self._handle).st_size // self._size

    def truncate(self, count: int) -> None:
        """Cut the file after so many slots; a shorter file stays as it is."""
        if os.fstat(self._handle).st_size > count * self._size:
            os.ftruncate(self._handle, count * self._size)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts once `done` bytes of them are through."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


def _runs(numbers: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Neighbouring numbers as (first, count)."""
    first = count = 0
    for number in sorted(numbers):
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


class Slabs:
    """The slab files of a folder, one per slot size, each opened when it is first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, Slab] = {}
        self._lock = threading.Lock()

    def __getitem__(self, size: int) -> Slab:
        # Two threads that meet a size first would otherwise open it twice and lose one handle.
        with self._lock:
            slab = self._open.get(size)
            if slab is None:
                slab = self._open[size] = Slab(self._folder / f"slab-{size}.dat", size)
            return slab

    def on_disk(self) -> set[int]:
        """Slot sizes that have a file."""
        names = (_NAME.match(file.name) for file in self._folder.iterdir())
        return {int(name[1]) for name in names if name}

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for slab in self._open.values():
                slab.close()
            self._open.clear()
