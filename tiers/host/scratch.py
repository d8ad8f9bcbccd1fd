"""Scratch: memory on whole pages for threads that come and go."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Scratch:
    """Memory of `size` bytes for each thread at work, kept for the next. Thread-safe; the system
    provides no more pages of it than are written to."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: deque[mmap.mmap] = deque()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Memory for the body alone, of any content."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = mmap.mmap(-1, self._size)
        try:
            yield memoryview(memory)
        finally:
            self._spare.append(memory)
