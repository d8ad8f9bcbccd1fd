"""Locks on open files, between processes; `release` or the end of the process frees them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.02


def try_lock(handle: int) -> bool:
    """Lock an open file exclusively; False if another has it locked. Raises OSError."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def acquire(handle: int, seconds: float) -> bool:
    """Lock an open file exclusively; False if others held it for `seconds`. Raises OSError."""
    deadline = time.monotonic() + seconds
    while not try_lock(handle):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextmanager
def opened(path: Path | str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    """Open a file, and `release` it behind the body. Raises OSError."""
    handle = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        yield handle
    finally:
        release(handle)


def release(handle: int) -> None:
    """Unlock a file and close it. Raises OSError of the latter alone.

    Closing alone frees no lock as long as a child that was forked meanwhile has the file open.
    """
    with suppress(OSError):  # or who has just opened or closed what it kept would fail for that
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
