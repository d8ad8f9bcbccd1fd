"""The clean-close digest: a checksum of the index that lies beside it while no process has it open.

LMDB trusts every page: a flipped bit in one can send it anywhere, out of the process's memory too,
and then the engine dies. So the last process to close the folder cleanly records the digest of the
index, and the first process to open the folder compares it. A process that is killed leaves no
digest, and none exists while the index is in use: the kernel alone keeps the written pages right.

Reading a large index takes seconds, so nobody does it under the folder's lock. A comparison counts
if both files are still the same once the lock is held.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from tiers.concurrency.file_locks import acquire, opened, release
from tiers.disk.folder.folder import ONE_HOST, Folder
from tiers.disk.folder.owner import Owner, Owners, scan_owners
from tiers.disk.slab import sync_folder
from tiers.errors import TierNotOpen
from tiers.paths import found_at

CHECK_WAIT_S = 1.0
"""Seconds that opening waits for another process that checks the index, 2 GB of it; one that is
stopped never ends."""

_TRIES = 3
_CONDEMNED = b"damaged"
"""The digest of an index that nobody may use any more."""

logger = logging.getLogger(__name__)


class State(NamedTuple):
    """The recorded digest, None if there is none, and the index: its inode, length and age."""

    digest: bytes | None
    file: tuple[int, int, int] | None


class Compared(NamedTuple):
    """The state that was compared, and its fault, if any."""

    state: State
    wrong: str | None

    def why_wiped(self, owners: Owners) -> str:
        """Why nobody may use the index of a folder with these owners; empty: it is usable. With a
        digest the index was closed since, whoever else had been killed by then."""
        is_sound = owners.alive or self.state.digest is not None
        return self.wrong or ("" if is_sound else owners.torn)


def state(folder: Folder) -> State:
    """Read what lies in the folder now. Raises OSError."""
    try:
        found = folder.digest.read_bytes()
    except FileNotFoundError:
        found = None
    stat = found_at(folder.index)
    return State(found, stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@contextmanager
def compared(folder: Folder) -> Iterator[Compared]:
    """Compare the index with its digest, without the folder's lock. One process at a time does it,
    and others wait until its body, which may remove the digest, has ended. Raises TierNotOpen if
    the wait is too long, and OSError."""
    try:
        handle = os.open(folder.digest, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield Compared(state(folder), None)
        return
    try:
        if not acquire(handle, CHECK_WAIT_S):
            raise TierNotOpen(
                f"{folder.path}: another process has been checking the tier's index for "
                f"{CHECK_WAIT_S:.0f} s"
            )
        found = state(folder)
        yield Compared(found, _wrong(folder.index, found))
    finally:
        release(handle)


def _wrong(index: Path, found: State) -> str | None:
    if found.digest is None:
        return None
    if found.digest == _CONDEMNED:
        return f"{index} was found to be damaged when it was last in use"
    if found.file is None or found.digest != compute(index):
        return f"{index} has changed since it was closed"
    return None


def remove(folder: Folder) -> None:
    """Remove the digest before the index is changed. Raises OSError."""
    with suppress(FileNotFoundError):
        folder.digest.unlink()
        sync_folder(folder.path)  # or a power cut could bring back the digest of an older index


def leave(folder: Folder, owner: Owner) -> bool:
    """Record the digest and give up ownership, if no other process has the folder open.

    The index is closed and synced. Returns whether `owner` has left. The digest is computed without
    the folder's lock: a process that opens the folder meanwhile finds us there, and no digest. If
    that process has left again, the digest is computed anew. Raises TierNotOpen and OSError.
    """
    digest, then = b"", None
    for _ in range(_TRIES):
        with folder.locked():
            if scan_owners(folder.owners, folder.kind in ONE_HOST).alive != {owner.id}:
                break
            now = state(folder)
            if now == then:
                if now.digest is None:  # a condemned folder stays condemned
                    record(folder, digest)
                owner.leave(clean=True)
                return True
            then = now
        digest = compute(folder.index)
    return False


def condemn(folder: Folder, why: Exception) -> None:
    """Have every process leave a folder whose index is damaged, whether or not it meets the damage
    itself, and the next one wipe it."""
    logger.error("disk tier %s is emptied when no process has it open: %s", folder.path, why)
    try:
        record(folder, _CONDEMNED)
    except OSError as error:
        with suppress(OSError):
            if is_condemned(folder):  # by another process, which took the draft
                return
        line = "disk tier %s: the index can't be marked as damaged: %s"
        logger.warning(line, folder.path, error)


def is_condemned(folder: Folder) -> bool:
    """Whether a process has condemned the folder since it was opened. Raises OSError."""
    return state(folder).digest == _CONDEMNED


def compute(index: Path) -> bytes:
    """Compute the digest of a whole index. Raises OSError."""
    with index.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest().encode()


def record(folder: Folder, content: bytes) -> None:
    """Write `content` as the folder's digest. Raises OSError."""
    # It gets its name only when it is whole: a digest cut by a power cut would condemn the index.
    draft = folder.digest.with_suffix(".draft")
    with opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW) as file:
        os.write(file, content)
        os.fsync(file)
    draft.rename(folder.digest)
