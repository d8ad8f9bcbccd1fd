"""The index's seal: a checksum of its file, which lies beside it while no process has it open.

LMDB trusts every page: a flipped bit in one can send it anywhere, out of the process's memory too,
and then the engine dies. So the last process to close the folder cleanly seals the index, and the
first to open it compares. A process that is killed leaves no seal, and there is none while the
index is in use: what it wrote is then the kernel's to keep right.

Reading a large index takes seconds, so nobody does it under the folder's lock. What was read there
counts if the files are the same once the lock is held.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from tiers.disk.locks import acquire
from tiers.disk.slab import sync_folder
from tiers.errors import TierNotOpen

CHECK_WAIT_S = 30.0
"""Seconds that opening waits for another process that checks the index: 60 GB at 2 GB/s."""

_AT_ONCE = 1 << 20
_CONDEMNED = b"damaged"


class State(NamedTuple):
    """A seal, None if there is none, and the file that it is of: its inode, length and age."""

    seal: bytes | None
    file: tuple[int, int, int] | None


class Compared(NamedTuple):
    """What was compared, and what was wrong with it."""

    state: State
    wrong: str | None


def state(index: Path, seal: Path) -> State:
    """What lies there now. Raises OSError."""
    try:
        found = seal.read_bytes()
    except FileNotFoundError:
        found = None
    try:
        stat = index.stat()
    except FileNotFoundError:
        return State(found, None)
    return State(found, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@contextmanager
def compared(index: Path, seal: Path) -> Iterator[Compared]:
    """Compare index and seal, without the folder's lock: one process does it, for as long as the
    body, and those that come meanwhile wait, since there may be no seal any more when it is done.

    Raises TierNotOpen when that takes too long, OSError.
    """
    try:
        handle = os.open(seal, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield Compared(state(index, seal), None)
        return
    try:
        if not acquire(handle, CHECK_WAIT_S):
            raise TierNotOpen(
                f"{index.parent}: another process has been checking the tier's index for "
                f"{CHECK_WAIT_S:.0f} s"
            )
        found = state(index, seal)
        yield Compared(found, _wrong(index, found))
    finally:
        os.close(handle)


def _wrong(index: Path, found: State) -> str | None:
    if found.seal is None:
        return None
    if found.seal == _CONDEMNED:
        return f"{index} was found to be damaged when it was last in use"
    if found.file is None or found.seal != digest(index):
        return f"{index} is not as it was closed"
    return None


def remove(seal: Path) -> None:
    """Break the seal before the index is changed; before that is done, so is the name's removal,
    else a power cut could bring the seal of an older index back. Raises OSError."""
    if seal.exists():
        seal.unlink()
        sync_folder(seal.parent)


def put(seal: Path, content: bytes) -> None:
    """Seal an index that is closed and synced by its digest, unless it was condemned. Raises
    OSError."""
    if not seal.exists():
        _write(seal, content)


def condemn(seal: Path) -> None:
    """Let the next to open the index wipe it. Raises OSError."""
    _write(seal, _CONDEMNED)


def digest(index: Path) -> bytes:
    """The checksum of a whole index. Raises OSError."""
    sums = xxhash.xxh3_128()
    piece = bytearray(_AT_ONCE)
    with index.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            sums.update(memoryview(piece)[:count])
    return sums.hexdigest().encode()


def _write(seal: Path, content: bytes) -> None:
    # Under its name only when it is whole: a seal cut by a power cut would condemn the index.
    draft = seal.with_suffix(".draft")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)
    draft.rename(seal)
