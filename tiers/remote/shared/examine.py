"""The shared tier's findings before an engine starts: its directory, its room, what works there.

What is stored to try it has a key that no engine has, and is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from spec.fields import format_number, format_size
from spec.findings import DoctorFinding
from tiers.paths import mount_of
from tiers.remote.packs.pack import INDEX_BYTES, PACK_BYTES, name_of
from tiers.remote.shared.directory_bucket import DirectoryBucket
from tiers.remote.trial import look_up
from tiers.timed import timed


def examine(path: Path, capacity: int | None) -> Iterator[DoctorFinding]:
    """Findings about this directory; `capacity` in bytes. Raises TierError, OSError."""
    bucket = DirectoryBucket(path)
    if os.path.ismount(path):
        yield DoctorFinding(
            "note",
            f"{path} is where a file system is mounted: without it, it is on this host's own disk",
            "name a directory below it",
            "nothing",
        )
    kind, _, options = mount_of(path)
    if kind.startswith("nfs") and "lookupcache=" not in options:
        yield DoctorFinding(
            "note",
            f"{path} is on an NFS: what was looked for before it was stored is missed for a minute",
            "mount it with lookupcache=positive",
            "each look for what is not there asks the server",
        )
    yield from _room(path, capacity)
    yield from _try_out(bucket)


def _room(path: Path, capacity: int | None) -> Iterator[DoctorFinding]:
    found = os.statvfs(path)
    free, whole = (blocks * found.f_frsize for blocks in (found.f_bavail, found.f_blocks))
    if capacity is None:
        yield DoctorFinding(
            "warning",
            f"no capacity: nothing is evicted, and {format_size(free)} are free",
            "set capacity, or remove files by their age",
            "what was used least recently goes",
        )
    elif capacity > whole:
        yield DoctorFinding(
            "warning",
            f"capacity {format_size(capacity)} is more than its file system has, "
            f"{format_size(whole)}: nothing is evicted before it is full",
            "lower capacity",
            "none; once it is full nothing new is stored",
        )
    else:
        yield DoctorFinding("fine", f"{format_size(free)} are free of {format_size(whole)}")


def _try_out(bucket: DirectoryBucket) -> Iterator[DoctorFinding]:
    """Do what an engine does. Raises TierError."""
    name, index = name_of(os.urandom(48)), memoryview(bytearray(INDEX_BYTES))
    try:
        stored, _ = timed(lambda: bucket.put(name, [bytes(PACK_BYTES)]))
        _, took = look_up(lambda: bucket.read(name, 0, [index]))
    finally:
        bucket.delete([name])
        with suppress(OSError):
            for folder in [*Path(bucket.describe(), name).parents][:2]:
                folder.rmdir()
    rate = format_number(PACK_BYTES / stored / 1e6)
    found = f"a file is found in {took}; it stores {rate} MB/s, one at a time"
    yield DoctorFinding("fine", found)
