"""Prefault: memory that the system has given before it is used."""

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
"""Bytes to have beyond what is in use: a third of a second's work, and all that a pool which is
never filled costs in vain."""

_STEP = 4 << 20
STEP = 1 << 30
"""What is provided between two looks at the memory that is left."""
PIECE = 64 << 20
PROVIDERS = 4
SAY_SECONDS = 5.0
MADV_POPULATE_WRITE = 23
"""Linux 5.14's, for which Python has no name."""


def provide(
    address: int,
    length: int,
    check: Callable[[int], None],
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Make the system give all pages of a range that is fresh, on several threads, in steps.

    Registering memory with CUDA would do it on one, and for a minute without a word. `check`
    hears the bytes of each step before it and may raise. From 1 GiB on it is said when this
    begins, every five seconds, and when it ends.
    """
    began = said = now()
    speaks = length >= STEP
    if speaks:
        logger.info("pinning %s of host memory", format_size(length))
    with ThreadPoolExecutor(PROVIDERS, "kvtiers-provide") as pool:
        for start in range(0, length, STEP):
            size = min(STEP, length - start)
            check(size)
            pieces = range(start, start + size, PIECE)
            list(pool.map(lambda at: _give(address + at, min(PIECE, length - at)), pieces))
            if speaks and now() - said >= SAY_SECONDS:
                said = now()
                done, whole = format_size(start + size), format_size(length)
                logger.info("pinning host memory: %s of %s are there", done, whole)
    if speaks:
        logger.info("pinning host memory: all is there after %.1f s", now() - began)


def _give(address: int, size: int) -> None:
    madvise = _madvise()
    if madvise(address, size, MADV_POPULATE_WRITE) != 0:
        ctypes.memset(address, 0, size)  # an older kernel; what is fresh is zero already


def _madvise() -> Any:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


class Prefault:
    """Asks the system for the pages of a range, from its start, `AHEAD` bytes before their use.

    The first touch of a page costs four times as much as copying into it (about 0.8 s per GiB, in
    a virtual machine), which then only this object's thread pays. It changes no content, so it
    may run beside copies into the same pages. Linux before 5.14 can't: then nothing happens.
    """

    def __init__(self, address: int, length: int) -> None:
        """`address`: of the range, aligned to pages. It stays mapped until `close` returns."""
        self._address = address
        self._length = length
        self._done = 0
        self._wanted = min(AHEAD, length)
        self._is_closed = False
        # Without it a use could be noted between the thread's last look and its wait.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtiers-prefault", daemon=True)
        self._thread.start()

    def used(self, end: int) -> None:
        """Note that the first `end` bytes of the range are in use. Waits for nothing."""
        wanted = min(end + AHEAD, self._length)
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    @property
    def done(self) -> int:
        """Bytes, from the start, that were asked for."""
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
