"""A file's pages that are mapped as memory, held there: where the device is gone, the kernel kills
who touches one that it has to read first (SIGBUS)."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from pathlib import Path

_IPC_LOCK = 14
"""Of `linux/capability.h`: who has it locks any amount."""

_mlock = ctypes.CDLL(None).mlock
_mlock.argtypes = (ctypes.c_size_t, ctypes.c_size_t)


class Mapped:
    """Where this process has a file mapped, which it has once and for as long as this is used."""

    def __init__(self, path: Path) -> None:
        name = os.path.realpath(path)
        rows = (row.split(maxsplit=5) for row in Path("/proc/self/maps").read_text().splitlines())
        ends = [row[0].split("-") for row in rows if row[-1] == name]
        self._start = int(ends[0][0], 16) if ends else 0
        self._length = int(ends[-1][1], 16) - self._start if ends else 0
        self._held = 0

    def hold(self, size: int) -> None:
        """Keep the first so many bytes in memory from now on, as far as this process may lock any
        (RLIMIT_MEMLOCK)."""
        end = min(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, self._length)
        if end > self._held:
            _mlock(self._start + self._held, end - self._held)
            self._held = end


def lockable() -> int | None:
    """How many bytes of memory this process may lock; None: any number."""
    capabilities = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.M)
    if capabilities and int(capabilities[1], 16) >> _IPC_LOCK & 1:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
