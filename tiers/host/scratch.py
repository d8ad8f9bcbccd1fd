"""Scratch: page-aligned memory that threads borrow for a while."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HUGE = 2 << 20
"""Bytes of a huge page, to whose multiples the memory of large scratches is aligned."""
LARGE = 256 << 10
"""From this size on memory is taken as huge pages: a virtual disk may serve each piece of direct
I/O that is contiguous in memory as a request of its own, pages of 4 KiB at a fifth of its speed."""


class Scratch:
    """Lends memory of `size` bytes, page-aligned, and keeps what comes back for the next borrower.
    Thread-safe. The system provides only the pages, or huge pages, that are written to."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: deque[memoryview] = deque()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lend memory to the body alone; its content is undefined."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = _memory(self._size)
        try:
            yield memory
        finally:
            self._spare.append(memory)


def _memory(size: int) -> memoryview:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size < LARGE:
        return memoryview(mmap.mmap(-1, size, flags))
    whole = mmap.mmap(-1, -(-size // HUGE) * HUGE + HUGE, flags)
    with suppress(OSError):  # a kernel without huge pages
        whole.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % HUGE
    return memoryview(whole)[start : start + size]
