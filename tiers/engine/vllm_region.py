"""Who removes the file of vLLM's host memory, if its engine is killed while it starts?

The file lies in /dev/shm, and has a name until all processes of the engine have mapped it. Beside
it is a lock, which ends with the last process that holds it: the next engine removes each file
whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from tiers.concurrency.file_locks import opened, try_lock

FOLDER = Path("/dev/shm")
ENGINE = "kvtiers_"
"""What the ids of our engines begin with, so that no file of vLLM's own engines is taken."""


class NamedRegion:
    """The name of one engine's host memory, which this process needs until `remove`."""

    def __init__(self, engine_id: str) -> None:
        """Remove what killed engines have left. `engine_id`: begins with `ENGINE`."""
        self._file = FOLDER / f"vllm_offload_{engine_id}.mmap"
        self._lock = self._file.with_suffix(".lock")
        for lock in FOLDER.glob(f"vllm_offload_{ENGINE}*.lock"):
            # Another process may sweep, too, or it is another user's.
            with suppress(OSError), opened(lock, os.O_RDWR) as handle:
                if try_lock(handle):
                    lock.with_suffix(".mmap").unlink(missing_ok=True)
                    lock.unlink(missing_ok=True)
        self._handle = _shared(self._lock)

    def remove(self) -> None:
        """All processes have mapped it, or none will."""
        self._file.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)


def _shared(lock: Path) -> int:
    """Lock a file together with others, until this process ends."""
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(lock), os.fstat(handle)):
                return handle
        os.close(handle)  # who sweeps has removed it meanwhile
