"""Digests of whole files; each file is read once per host, however many processes ask for it.

Digests are kept in a folder that only the user can write to, one entry per file. An entry names
everything that changes when the file changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import xxhash

from tiers.concurrency.file_locks import acquire, opened
from tiers.errors import KVTiersError
from tiers.paths import foreign, mount_of

logger = logging.getLogger(__name__)

SETTLED_SECONDS = 2.0
"""Age in seconds from which a file's digest is kept. A younger file may change again within one
tick of its file system's clock, which its times would not show."""
LOCK_SECONDS = 60.0
"""Seconds that others wait for who reads a file; then each reads it itself."""
IMAGES = ("squashfs", "erofs", "iso9660", "cramfs", "romfs")
"""File systems of which nothing is kept, nor believed that an earlier version kept: the next image
may have all that a stamp shows alike."""
ENTRY_BYTES = 1024
"""Upper bound of an entry's length."""
_DIGEST = re.compile("[0-9a-f]{32}")


class FileChanged(KVTiersError):
    """A file changed while it was read, so nobody knows which content the engine loaded."""


class Stamp(NamedTuple):
    """What changes when a file's content changes. No program can set `ctime_ns`, so it tells a file
    from an earlier one with the same inode and times."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


class Digests:
    """Digests files by content: xxh3 with 128 bits, in hexadecimal.

    `folder` keeps the digests. If it is None, or can't be made or used safely, which is logged,
    every process reads the files itself.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else _own_folder(folder)

    def of(self, path: Path) -> str:
        """Return the digest of a file. Waits while another process reads it. Raises OSError, and
        FileChanged for a file that changes meanwhile."""
        with path.open("rb", buffering=0) as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            with self._entry(stamp) as entry:
                if mount_of(path).kind in IMAGES:
                    entry = None
                kept = None if entry is None else _kept(entry, stamp)
                if kept is not None:
                    return kept
                digest = read_digest(file)
                if stamp_of(os.fstat(file.fileno())) != stamp:
                    raise FileChanged(f"{path.name} changed while it was read")
                settled = time.time() - stamp.ctime_ns / 1e9 > SETTLED_SECONDS
                if entry is not None and settled:
                    _keep(entry, stamp, digest)
                return digest

    @contextmanager
    def _entry(self, stamp: Stamp) -> Iterator[Path | None]:
        """Yield the path of a file's entry, locked against other processes; None without one."""
        path = self._folder and self._folder / f"{stamp.device:x}-{stamp.inode:x}"
        with ExitStack() as locked:
            if path is not None:
                file = path.with_suffix(".lock")
                try:
                    how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                    if not acquire(locked.enter_context(opened(file, how)), LOCK_SECONDS):
                        raise TimeoutError(f"{file} has been locked for {LOCK_SECONDS:g} s")
                except OSError as error:
                    logger.info("digests of weights are not kept: %s", error)
                    path = None
            yield path


def read_digest(file: FileIO) -> str:
    return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _own_folder(folder: Path) -> Path | None:
    """Make `folder` if it is missing and return it; None if others may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise OSError("it is no folder")
        if why := foreign(status):
            raise OSError(f"it {why}")
    except OSError as error:
        logger.info("digests of weights are not kept in %s: %s", folder, error)
        return None
    return folder


def _kept(entry: Path, stamp: Stamp) -> str | None:
    """Return the digest in `entry` for a file with this `stamp`; None without a valid one."""
    try:
        with open(entry, "rb", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW)) as file:
            entry_fields = json.loads(file.read(ENTRY_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    match entry_fields:
        case [list(theirs), str(digest)] if theirs == list(stamp) and _DIGEST.fullmatch(digest):
            return digest
    return None


def _keep(entry: Path, stamp: Stamp, digest: str) -> None:
    """Write an entry, whole or not at all. After a failure the file is read again next time."""
    draft = entry.with_suffix(".new")  # whoever has locked the entry writes it alone
    try:
        draft.write_text(json.dumps([list(stamp), digest]))
        draft.replace(entry)
    except OSError as error:
        logger.info("a digest of weights was not kept: %s", error)
