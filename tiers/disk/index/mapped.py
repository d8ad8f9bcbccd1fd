"""A file's pages that are mapped as memory, held there: where the device is gone, the kernel kills
who touches one that it has to read first (SIGBUS)."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import resource
from pathlib import Path

from spec.fields import format_size

_IPC_LOCK = 14
"""Of `linux/capability.h`: who has it locks any amount."""

_mlock = ctypes.CDLL(None).mlock
_mlock.argtypes = (ctypes.c_size_t, ctypes.c_size_t)

logger = logging.getLogger(__name__)


class Mapped:
    """Where this process has a file mapped, which it has once and for as long as this is used."""

    def __init__(self, path: Path) -> None:
        self._name = name = os.path.realpath(path)
        rows = (row.split(maxsplit=5) for row in Path("/proc/self/maps").read_text().splitlines())
        ends = [row[0].split("-") for row in rows if row[-1] == name]
        self._start = int(ends[0][0], 16) if ends else 0
        self._length = int(ends[-1][1], 16) - self._start if ends else 0
        self._held = 0

    def hold(self, size: int) -> None:
        """Keep the first so many bytes in memory from now on, as far as this process may lock any
        (RLIMIT_MEMLOCK)."""
        end = min(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, self._length)
        held, step = self._held, end - self._held
        while held < end:
            step = min(step, end - held)
            # Without a limit it is a page that can't be read: it is locked when it can.
            if _mlock(self._start + held, step) == 0 or lockable() is None:
                held += step
            elif step > mmap.PAGESIZE:  # of what is too much the kernel locks nothing
                step = step // 2 // mmap.PAGESIZE * mmap.PAGESIZE
            else:
                end = self._length = held  # it is not tried again
                line = "%s: only %s may be locked in memory (RLIMIT_MEMLOCK), see kvtiers doctor"
                logger.info(line, self._name, format_size(held))
        self._held = held


def lockable() -> int | None:
    """How many bytes of memory this process may lock; None: any number."""
    capabilities = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.M)
    if capabilities and int(capabilities[1], 16) >> _IPC_LOCK & 1:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
