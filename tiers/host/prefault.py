"""Prefault: makes the system provide pages of memory before they are used."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spec.fields import format_size
from tiers.concurrency.executors import widen_affinity

logger = logging.getLogger(__name__)

AHEAD = 256 << 20
"""Bytes to provide beyond those in use: a third of a second's work, and all that is wasted on a
pool that is never filled."""

_STEP = 4 << 20
STEP = 1 << 30
"""Bytes provided between two checks of the memory left."""
PIECE = 64 << 20
PROVIDERS = 4
SAY_SECONDS = 5.0
MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python has no name for it."""


class PinningLog:
    """Says how far pinning is: its begin, each five seconds and its end, from 1 GiB on."""

    def __init__(self, length: int, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: a clock, in seconds."""
        self._length = length
        self._now = now
        self._speaks = length >= STEP
        self._began = self._said = now()
        if self._speaks:
            logger.info("pinning %s of host memory", format_size(length))

    def reached(self, done: int, what: str) -> None:
        """So many bytes are provided, or pinned."""
        if self._speaks and self._now() - self._said >= SAY_SECONDS:
            self._said = self._now()
            sizes = format_size(done), format_size(self._length)
            logger.info("pinning host memory: %s of %s are %s", *sizes, what)

    def ended(self) -> None:
        """All is pinned."""
        if self._speaks:
            logger.info("pinning host memory: done after %.1f s", self._now() - self._began)


def provide(address: int, length: int, check: Callable[[int], None], log: PinningLog) -> None:
    """Make the system provide all pages of a fresh range, on several threads, in steps.

    Registering memory with CUDA would do it on one thread, for a minute without a log line.
    `check(size)` is called before each step and may raise.
    """
    with ThreadPoolExecutor(PROVIDERS, "kvtiers-provide") as pool:
        for start in range(0, length, STEP):
            size = min(STEP, length - start)
            check(size)
            pieces = range(start, start + size, PIECE)
            list(pool.map(lambda at: _populate(address + at, min(PIECE, length - at)), pieces))
            log.reached(start + size, "provided")


def _populate(address: int, size: int) -> None:
    madvise = _madvise()
    if madvise(address, size, MADV_POPULATE_WRITE) != 0:
        ctypes.memset(address, 0, size)  # an older kernel; fresh memory is zero already


def _madvise() -> Any:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


class Prefault:
    """Provides the pages of a range, from its start, `AHEAD` bytes before they are used.

    The first touch of a page costs four times as much as copying into it (about 0.8 s per GiB, in
    a virtual machine); here only this object's thread pays for it. It changes no content, so it may
    run beside copies into the same pages. Does nothing on Linux before 5.14.
    """

    def __init__(self, address: int, length: int) -> None:
        """`address`: page-aligned start of the range, which stays mapped until `close` returns."""
        self._address = address
        self._length = length
        self._done = 0
        self._wanted = min(AHEAD, length)
        self._is_closed = False
        # Without it a use could be recorded between the thread's check and its wait.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtiers-prefault", daemon=True)
        self._thread.start()

    def used(self, end: int) -> None:
        """Record that the first `end` bytes of the range are in use. Does not wait."""
        wanted = min(end + AHEAD, self._length)
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    @property
    def done(self) -> int:
        """Bytes provided, from the start."""
        return self._done

    def _run(self) -> None:
        widen_affinity()
        madvise = _madvise()
        while self._has_work():
            size = min(_STEP, self._length - self._done)
            if madvise(self._address + self._done, size, MADV_POPULATE_WRITE) != 0:
                return
            self._done += size

    def _has_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._done < self._wanted)
            return not self._is_closed

    def close(self) -> None:
        """End the thread, which takes milliseconds. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
