"""Scratch: page-aligned memory that threads borrow for a while."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Scratch:
    """Lends memory of `size` bytes, page-aligned, and keeps what comes back for the next borrower.
    Thread-safe. The system provides only the pages that are written to."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: deque[mmap.mmap] = deque()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lend memory to the body alone; its content is undefined."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = mmap.mmap(-1, self._size)
        try:
            yield memoryview(memory)
        finally:
            self._spare.append(memory)
