"""Digests of whole files, each read once per host, however many processes ask for it.

What was read is kept in a folder of the user's, an entry per file, under all that changes when
the file does. Whoever can write to that folder is the user, and can change the files as well.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from tiers.errors import KVTiersError

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
SETTLED_SECONDS = 2.0
"""A file that changed this recently may change again within one tick of its file system's clock,
unseen; so its digest is not kept."""
ENTRY_BYTES = 1024
"""An entry is shorter than this."""


class FileChanged(KVTiersError):
    """A file changed while it was read: nobody can say which of its contents was loaded."""


class Stamp(NamedTuple):
    """What changes when a file's content does. The time of change, which no program can set,
    tells apart what another file, with its number and times, was before."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file with that status."""
    return Stamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


class Digests:
    """Digests of files by content, as xxh3 of 128 bits, in hexadecimal.

    `folder`: where they are kept; None: nowhere. One that can't be made or used safely is left
    alone, and said once; then every process reads for itself.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else _own_folder(folder)

    def of(self, path: Path) -> str:
        """The digest of a file; waits for another process that is reading it.

        Raises OSError, and FileChanged for a file that changes meanwhile.
        """
        with path.open("rb", buffering=0) as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            with self._entry(stamp) as entry:
                kept = None if entry is None else _kept(entry, stamp)
                if kept is not None:
                    return kept
                state = xxhash.xxh3_128()
                for piece in pieces(file.fileno()):
                    state.update(piece)
                if stamp_of(os.fstat(file.fileno())) != stamp:
                    raise FileChanged(f"{path.name} changed while it was read")
                settled = time.time() - stamp.ctime_ns / 1e9 > SETTLED_SECONDS
                if entry is not None and settled:
                    _keep(entry, stamp, state.hexdigest())
                return state.hexdigest()

    @contextmanager
    def _entry(self, stamp: Stamp) -> Iterator[Path | None]:
        """Where the digest of a file is kept, None: nowhere. No other process has it until the
        context ends."""
        lock = None
        path = None
        if self._folder is not None:
            path = self._folder / f"{stamp.device:x}-{stamp.inode:x}"
            lock = _locked(path.with_suffix(".lock"))
        try:
            yield path if lock is not None else None
        finally:
            if lock is not None:
                os.close(lock)


def _locked(path: Path) -> int | None:
    """A file that this process has locked, once it can; None where files can't be."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.info("digests of weights are not kept: %s", error)
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        os.close(lock)
        logger.info("digests of weights are not kept: %s", error)
        return None
    return lock


def pieces(file: int) -> Iterator[memoryview]:
    """The content of an open file from where it stands; each piece is good until the next."""
    buffer = bytearray(PIECE_BYTES)
    while count := os.readv(file, [buffer]):
        yield memoryview(buffer)[:count]


def _own_folder(folder: Path) -> Path | None:
    """The folder, made where it is missing; None where it is not the user's alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise OSError("it is no folder of this user's")
        if status.st_mode & 0o022:
            raise OSError("others can write to it")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError("it can't be written to")
    except OSError as error:
        logger.info("digests of weights are not kept in %s: %s", folder, error)
        return None
    return folder


def _kept(entry: Path, stamp: Stamp) -> str | None:
    """The digest kept for a file as it is; None: none, or what is there can't be read."""
    try:
        file = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        told = json.loads(os.read(file, ENTRY_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(file)
    if not isinstance(told, list) or len(told) != 2 or told[0] != list(stamp):
        return None
    digest = told[1]
    is_digest = isinstance(digest, str) and len(digest) == 32 and set(digest) <= set(_HEX)
    return digest if is_digest else None


_HEX = "0123456789abcdef"


def _keep(entry: Path, stamp: Stamp, digest: str) -> None:
    """Write an entry, whole or not at all; one that can't be written is read again next time."""
    try:
        file, name = tempfile.mkstemp(dir=entry.parent)
        try:
            with os.fdopen(file, "w") as text:
                json.dump([list(stamp), digest], text)
            os.replace(name, entry)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        logger.info("a digest of weights was not kept: %s", error)
