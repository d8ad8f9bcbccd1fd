"""Takes a lock on a file, with a time limit."""

from __future__ import annotations

import fcntl
import time

WAIT_S = 5.0
"""Seconds that opening waits for another process. Nobody holds a lock that long, unless it is
stopped, its disk hangs, or the index that it checks is very large."""

_POLL_S = 0.02


def acquire(handle: int, seconds: float) -> bool:
    """Lock an open file exclusively; False if others held it for `seconds`. Raises OSError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        else:
            return True
        time.sleep(_POLL_S)
