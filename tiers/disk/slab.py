"""Slab files: fixed slots of one size each, read and written straight from the caller's memory.

A slot starts with a page of its own for the record's header, the payload follows: whole pages
are what direct I/O asks for, and what the page cache copies fastest. A slot that holds a block has
disk space behind it; a free one is a hole, so that a file takes no more space than its blocks do.

Where the tier fits into spare memory, the page cache serves it at the speed of memory. Where it
does not, the cache only costs: memory for blocks that are evicted before they are asked for, and
processor time to reclaim it. Measured, with 4 GiB of blocks in 1.5 GiB of memory: replacing 2.8
against 2.3 GB/s, random loads 1.7 against 0.9 GB/s, at a third of the processor time.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

from spec.fields import format_size
from tiers.block import HEADER_BYTES, Checksum, address_of, after, copy, digest
from tiers.concurrency.file_locks import opened
from tiers.errors import RecordError, TierUnusable
from tiers.host.scratch import Scratch
from tiers.host.spare_memory import spare_memory

PAGE = 4096
"""Slots and payloads start at multiples of this. Direct I/O needs it of offsets, lengths and
addresses to work on every device."""

_PIECE = 512 << 10
"""Bytes that are copied from the page cache before they are checksummed: few enough to be in a
core's own cache still, where a checksum is four times as fast as from memory."""

RUN = 8 << 20
"""Bytes of slots in a row that are written or read by one call of the system. After each call a
thread waits for the interpreter's lock, longer than a small block takes where an engine's thread
wants it too; and a disk moves 4 MiB in one piece twice as fast as 64 KiB each by four threads."""
SMALL = (256 << 10) + PAGE
"""Bytes of a slot that is moved so, at most."""
_MOST = 64

_NAME = re.compile(r"^slab-([0-9]+)\.dat$")
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
_libc = ctypes.CDLL(None, use_errno=True)

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The error numbers that mean that a file can't grow."""

_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

Io = Literal["auto", "direct", "buffered"]
Durability = Literal["none", "batch", "sync"]


class Access(NamedTuple):
    """How the operator wants a folder to be read and written."""

    io: Io = "auto"
    durability: Durability = "none"

    @property
    def synced(self) -> bool:
        """Whether each commit of the index reaches the device before the next one does."""
        return self.durability != "none"


DEFAULT_ACCESS = Access()


def slot_bytes(payload_bytes: int) -> int:
    """Return the bytes of a slot for a payload of this length, with the header's page."""
    return PAGE - -payload_bytes // PAGE * PAGE


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the device. Raises OSError."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as handle:
        os.fsync(handle)


def punch(handle: int, offset: int, length: int) -> None:
    """Give back the disk space of a range, which reads as zeros from now on. Raises OSError."""
    _fallocate(handle, _PUNCH_HOLE, offset, length)


def allocate_behind(handle: int, least: int, most: int) -> None:
    """Allocate disk space behind the end of a file, as much as it is long, within these bytes. It
    stays as long as it is. Raises OSError."""
    length = os.fstat(handle).st_size
    _fallocate(handle, 0, length, min(max(least, length), most))


def _fallocate(handle: int, mode: int, offset: int, length: int) -> None:
    where = ctypes.c_int64(offset), ctypes.c_int64(length)
    while _libc.fallocate(handle, mode | _KEEP_SIZE, *where) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


class Slab:
    """One file of slots. Every method may raise OSError; threads may use it at once.

    With `direct`, payloads bypass the page cache (O_DIRECT). Page-aligned memory, such as the host
    pool's slots, needs no copy.
    """

    def __init__(self, path: Path, size: int, direct: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._handle = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
        self._size = size
        self._direct = direct
        self._scratch = Scratch(size)
        self._heads = Scratch(PAGE * run_slots(size))

    def write(self, number: int, headers: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        """Fill slots in a row from these; where they are several, payloads are whole pages."""
        offset = number * self._size
        if self._direct and not all(map(_on_pages, payloads)):
            for place, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
                with self._scratch.borrow() as slot:
                    slot[: len(header)] = header
                    copy(slot[PAGE : PAGE + len(payload)], payload)
                    self._write(offset + place * self._size, [slot])
            return
        with self._heads.borrow() as heads:
            pages = _pages(heads, len(headers))
            for page, header in zip(pages, headers, strict=True):
                page[: len(header)] = header
            self._write(offset, [*chain.from_iterable(zip(pages, payloads, strict=True))])

    def read(self, number: int, payloads: Sequence[memoryview]) -> list[tuple[bytes, bytes]]:
        """Fill the payloads from slots in a row; return the header of each and the payload's
        checksum. Where they are several, they are whole pages. Raises RecordError if the file is
        too short."""
        offset = number * self._size
        if len(payloads) == 1 and not self._direct:
            return [self._read_cached(offset, payloads[0])]
        if self._direct and not all(map(_on_pages, payloads)):
            starts = range(offset, offset + len(payloads) * self._size, self._size)
            return list(map(self._read_copied, starts, payloads))
        with self._heads.borrow() as heads:
            pages = _pages(heads, len(payloads))
            parts = [*chain.from_iterable(zip(pages, payloads, strict=True))]
            needed = sum(map(len, parts))
            if not self._direct:  # or the device would be asked for one piece after the other
                os.posix_fadvise(self._handle, offset, needed, os.POSIX_FADV_WILLNEED)
            self._read(offset, parts, needed)
            return [
                (bytes(page[:HEADER_BYTES]), digest(payload))
                for page, payload in zip(pages, payloads, strict=True)
            ]

    def _read_copied(self, offset: int, payload: memoryview) -> tuple[bytes, bytes]:
        with self._scratch.borrow() as slot:
            self._read(offset, [slot], PAGE + len(payload))
            copy(payload, slot[PAGE : PAGE + len(payload)])
            return bytes(slot[:HEADER_BYTES]), digest(payload)

    def header(self, number: int) -> bytes:
        """The header of a slot. Raises RecordError if the file is too short."""
        with self._scratch.borrow() as slot:
            self._read(number * self._size, [slot[:PAGE]], PAGE)
            return bytes(slot[:HEADER_BYTES])

    def _read_cached(self, offset: int, payload: memoryview) -> tuple[bytes, bytes]:
        head, checksum = bytearray(PAGE), Checksum()
        parts = [memoryview(head)]
        for start in range(0, len(payload), _PIECE):
            piece = payload[start : start + _PIECE]
            parts.append(piece)
            needed = sum(map(len, parts))
            self._read(offset, parts, needed)
            checksum.update(piece)
            offset += needed
            parts = []
        return bytes(head[:HEADER_BYTES]), checksum.digest()

    def _write(self, offset: int, parts: list[memoryview]) -> None:
        while parts:
            done = os.pwritev(self._handle, parts, offset)
            offset, parts = offset + done, after(parts, done)

    def _read(self, offset: int, parts: list[memoryview], needed: int) -> None:
        while needed > 0:
            done = os.preadv(self._handle, parts, offset)
            # A direct read stops inside a page only at the end of the file.
            if done == 0 or (self._direct and done % PAGE and done < needed):
                raise RecordError("the slab file ends inside the record")
            offset, needed, parts = offset + done, needed - done, after(parts, done)

    def allocate(self, number: int, count: int = 1) -> None:
        """Allocate disk space for slots, so that a full disk shows before they are written."""
        os.posix_fallocate(self._handle, number * self._size, count * self._size)

    def punch(self, numbers: Iterable[int]) -> None:
        """Give back the disk space of these slots."""
        for _, group in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0]):
            run = [number for _, number in group]
            punch(self._handle, run[0] * self._size, len(run) * self._size)

    def free_bytes(self) -> int:
        found = os.fstatvfs(self._handle)
        return found.f_bavail * found.f_frsize

    def slots(self) -> int:
        return os.fstat(self._handle).st_size // self._size

    def truncate(self, count: int) -> None:
        """Cut the file after `count` slots; a shorter file stays as it is."""
        if os.fstat(self._handle).st_size > count * self._size:
            os.ftruncate(self._handle, count * self._size)

    def sync(self) -> None:
        os.fdatasync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


def run_slots(size: int) -> int:
    """How many slots of this size, in a row, are written or read by one call at most."""
    return min(_MOST, RUN // size) if size <= SMALL else 1


def _pages(memory: memoryview, count: int) -> list[memoryview]:
    return [memory[start : start + PAGE] for start in range(0, count * PAGE, PAGE)]


def _on_pages(payload: memoryview) -> bool:
    return bool(payload) and len(payload) % PAGE == 0 and address_of(payload) % PAGE == 0


class Slabs:
    """The slab files of a folder, one per slot size, each opened when it is first used."""

    def __init__(self, folder: Path, direct: bool = False) -> None:
        # By its handle: slabs of a folder that came to lie at its path are other processes'.
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._folder = Path(f"/proc/self/fd/{self._handle}")
        self.is_direct = direct
        self._open: dict[int, Slab] = {}
        self._lock = threading.Lock()

    def __getitem__(self, size: int) -> Slab:
        # Two threads that meet a size first would otherwise open it twice and lose one handle.
        with self._lock:
            slab = self._open.get(size)
            if slab is None:
                path = self._folder / f"slab-{size}.dat"
                fresh = not path.exists()
                slab = self._open[size] = Slab(path, size, self.is_direct)
                if fresh:
                    sync_folder(self._folder)
            return slab

    def on_disk(self) -> set[int]:
        names = (_NAME.match(file.name) for file in self._folder.iterdir())
        return {int(name[1]) for name in names if name}

    def sync(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            self[size].sync()

    def punch(self, slots: Iterable[tuple[int, int]]) -> None:
        """Give back the disk space of these slots: sizes and numbers."""
        for size, some in groupby(sorted(slots), key=itemgetter(0)):
            self[size].punch(number for _, number in some)

    def close(self) -> None:
        with self._lock:
            for slab in self._open.values():
                slab.close()
            self._open.clear()
        os.close(self._handle)


def choose_direct(path: Path, probe: Path, io: Io, capacity: int | None) -> tuple[bool, str]:
    """Say whether to open slabs with O_DIRECT, and what `auto` chose and why. `probe`: a file
    in the folder to overwrite. `capacity` None: a tool reads all of it, so that it would drive
    engines' blocks out of the page cache, and see copies there. Raises OSError, and TierUnusable if
    `io` is `direct` and the file system at `path` has no direct I/O."""
    if io == "buffered":
        return False, ""
    possible = supports_direct(probe)
    if io == "direct":
        if not possible:
            raise TierUnusable(
                f"{path} is on a file system without direct I/O; set io to auto or buffered"
            )
        return True, ""
    if capacity is None:
        return possible, ""
    memory = spare_memory()
    fits = capacity <= memory // 2
    why = f"{format_size(capacity)} of capacity, {format_size(memory)} of memory to spare"
    if not fits and not possible:
        why += ", and no direct I/O on this file system"
    direct = possible and not fits
    return direct, f"io is {'direct' if direct else 'buffered'}: {why}"


def supports_direct(probe: Path) -> bool:
    """Say whether the file system of `probe` has direct I/O, and of space too, which the C library
    writes where nothing can allocate it (ext2, ext3); empties the file. Raises OSError."""
    try:
        with opened(probe, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW) as handle:
            try:
                os.posix_fallocate(handle, 0, PAGE)
                os.pwrite(handle, mmap.mmap(-1, PAGE), 0)
            finally:
                os.ftruncate(handle, 0)
    except OSError as error:
        # A full disk refused the space, not the direct write.
        if error.errno not in NO_SPACE | _NO_DIRECT:
            raise
        return error.errno in NO_SPACE
    return True
