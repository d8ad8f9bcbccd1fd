"""The index, in LMDB: which block is in which slot, which was used last, which slots are free.

A key here is a block's index key (see `edit`), which is as short as is safe: the index is nearly
all the memory that a block takes. `edit` holds what changes the index.

A commit that is not synced survives the death of a process but not of the machine; owner files
show which of the two happened (see `owner`).

An error of the device in the very write that ends a commit makes LMDB refuse every transaction,
reading ones too, until its environment is closed. Commits from before are whole.

LMDB's own lock of writers can't be given up: behind a process that is stopped while it has that
lock all others would hang. So a writer first locks a byte of the index file, and tries for a while.
A record lock it is, since no fork inherits those: a child would hold it when its parent is killed.
Closing any handle of the index file would free it; then, and beside a process that does not know
of it, LMDB's lock alone keeps writers apart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from tiers.block import FORMAT_VERSION
from tiers.concurrency.file_locks import opened
from tiers.disk.index.edit import (
    INDEX_KEY_BYTES,
    ROW,
    STAMP,
    STATE,
    Edit,
    Entry,
    fields,
    parse_changes,
    parse_entry,
    parse_times,
)
from tiers.disk.index.mapped import Mapped
from tiers.disk.slab import NO_SPACE, allocate_behind
from tiers.errors import TierError, TierFull, TierUnavailable, TierUnusable
from tiers.store import Usage

UNREADABLE = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EUCLEAN})
"""The error numbers of a read from a place that the device has lost, until it is written again."""

_FULL = (lmdb.MapFullError, lmdb.DiskError)
_DAMAGE = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError)


class Damaged(TierUnavailable):
    """The folder's content can't be right; nothing but a wipe repairs it."""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise vendor errors of the body as TierFull, TierUnavailable or Damaged of this path."""
    try:
        yield
    except _FULL as error:
        raise TierFull(f"{path}: no space for the index: {error}") from error
    except _DAMAGE as error:
        raise Damaged(f"{path}: the index is damaged: {error}") from error
    except lmdb.Error as error:
        kind: type[TierError] = TierUnavailable
        why = ""
        # Of a write that the file system took in part LMDB says that the device failed.
        with suppress(OSError):  # its folder may be gone
            if str(error).endswith(os.strerror(errno.EIO)) and os.statvfs(path).f_bavail < 256:
                kind, why = TierFull, "no space for the index: "
        raise kind(f"{path}: {why}{error}") from error
    except OSError as error:
        kind = TierFull if error.errno in NO_SPACE else TierUnavailable
        raise kind(f"{path}: {error.strerror or error}") from error


INDEX_FORMAT = 3
MAP_BYTES = 1 << 38
"""Address space for the index, not memory or disk: some 500 million blocks. The same for every
capacity, so that no process finds the map outgrown by one that was given more."""

READERS_CHECKED_S = 60.0

LEAST_AHEAD, MOST_AHEAD = 2 << 20, 32 << 20
"""Bytes of disk that the index has to grow, as many as it is long: on a disk that others filled an
eviction is still committed. While all blocks were replaced it grew by half, or by 1.3 MiB."""

WAIT_S = 1.0
"""How long a write waits for others while none of them commits. Beside healthy processes one edit
of some two thousand took 0.7 s, on a machine under load."""

BRIEF_WAIT_S = 0.5
"""The same while the tier is opened or closed."""

_POLL_S = 0.001
_NO_LOCK = nullcontext()

_MAX_READERS = 1024
_LOCK_BYTES = (_MAX_READERS + 64) * 64
"""Of LMDB's lock file: a line of the processor's cache a reader, and its header."""

_LOOKED_THROUGH = 1 << 14
"""Rows that a search for the blocks used last looks at, at most: 10 ms."""
_TABLES = ("blocks", "recency", "free", "reserved", "lengths", "changes", "meta")
_OURS = b"kvtiers index "
_REMEDY = "name another folder, or remove this one's files"
_LMDB, _DATA_FORMAT = b"\xde\xc0\xef\xbe", b"\1\0\0\0"
"""What LMDB begins a file with, behind some bytes."""
_FORMAT = _OURS + f"{INDEX_FORMAT}, records {FORMAT_VERSION}".encode()

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Live keys after row `row` of the log, joined, and the rows since the piece before."""

    row: int
    changes: list[array[int]]
    keys: bytes


def _allocate_readers(path: Path) -> None:
    """Allocate disk space for LMDB's lock file, which LMDB makes as a hole and writes as memory: on
    a full disk one more reader would kill the process by SIGBUS. Only while this process has no
    LMDB open on the file: closing any handle of it frees the locks LMDB has on it."""
    with opened(f"{path}-lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as handle:
        os.posix_fallocate(handle, 0, _LOCK_BYTES)


def _changes(log: Any, last: int, after: int, limit: int | None) -> list[array[int]] | None:
    if after == last:
        return []
    if not log.set_key(ROW.pack(after + 1)):
        return None
    return [parse_changes(row) for row in islice(log.iternext(keys=False), limit)]


class Index:
    """One open LMDB environment. LMDB allows one per file and process: see `open_folders`.

    `synced`: after a power cut the index is as one of the last two commits left it. `lasting`: as
    the last one left it, for which each commit syncs twice. `is_ours`: processes of ours left it
    or have it open, so one that looks like another program's is damaged.

    Its methods raise LMDB's errors; the constructor also Damaged, OSError, and TierUnusable for an
    index of another format.
    """

    def __init__(
        self, path: Path, synced: bool = False, lasting: bool = False, is_ours: bool = False
    ) -> None:
        self._path = path
        self._pages = 0
        self._checked = -math.inf
        self.wait = BRIEF_WAIT_S
        """How long a write waits for others while none of them commits, in seconds; then it raises
        lmdb.LockError."""
        # Without it LMDB could be closed under a transaction. Never held during I/O.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._refuses = self._keeps_all = False
        # Keeps this process's writers apart, since a record lock is of the process. Held during
        # I/O, and waited for as the record lock is.
        self._writing = threading.Lock()
        _allocate_readers(path)
        self._open = partial(
            lmdb.open,
            str(path),
            subdir=False,
            map_size=MAP_BYTES,
            mode=0o600,
            sync=synced,
            metasync=lasting,
            max_dbs=len(_TABLES),
            max_readers=_MAX_READERS,
        )
        with ExitStack() as undo:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            undo.callback(os.close, self._file)
            self._env = self._opened()
            undo.callback(self._env.close)
            self._require_whole_file()
            self._hold()
            self.keep_pages()
            self._require_format(is_ours)
            self._open_tables()
            undo.pop_all()

    def _opened(self) -> Any:
        try:
            return self._open()
        except lmdb.Error as error:
            found = os.pread(self._file, 64, 0).partition(_LMDB)[2][:4]
            if found not in (b"", _DATA_FORMAT):
                why = f"{self._path} has LMDB's format {found[0]}, this LMDB reads another"
                raise TierUnusable(f"{why}; {_REMEDY}") from error
            if isinstance(error, lmdb.VersionMismatchError):  # of a lock file that is in use
                why = "processes with another version of LMDB have it open; end them"
                raise lmdb.VersionMismatchError(why) from error
            raise

    def _require_whole_file(self) -> None:
        # Reading a mapped page behind the end of a cut file would kill the process by SIGBUS.
        page = self._env.stat()["psize"]
        need, size = (self._env.info()["last_pgno"] + 1) * page, os.stat(self._path).st_size
        if size < need:
            raise Damaged(f"{self._path} has {size} bytes, {need} expected")

    def _hold(self) -> None:
        """Keep what is mapped in memory; the index from `keep_all` on."""
        Mapped(Path(f"{self._path}-lock")).hold(_LOCK_BYTES)
        found = Mapped(self._path)
        if self._keeps_all:  # before any other thread has it to hold
            found.hold(os.fstat(self._file).st_size)
        self._map = found

    def keep_all(self) -> None:
        """Keep the index in memory from now on, as it grows. To read a large one takes seconds.
        Raises OSError."""
        self._keeps_all = True
        self._hold()

    def _hold_grown(self) -> None:
        """Keep what the index has grown by, too. Raises OSError where XFS has shut down: then it
        kills who changes a page of LMDB's lock file, as each transaction does."""
        size = os.fstat(self._file).st_size
        if self._keeps_all:
            self._map.hold(size)

    def _require_format(self, is_ours: bool) -> None:
        found, no_table = b"of another program", (lmdb.NotFoundError, lmdb.IncompatibleError)
        with self.begin(write=True) as txn, suppress(*no_table):
            fresh = self._env.stat()["entries"] == 0
            meta = self._env.open_db(b"meta", txn, create=fresh)
            if fresh:
                txn.put(b"format", _FORMAT, db=meta)
            found = txn.get(b"format", b"unknown", db=meta)
        if is_ours and not found.startswith(_OURS):
            raise Damaged(f"{self._path}: the index is damaged: it has no format")
        if found != _FORMAT:
            raise TierUnusable(
                f"{self._path} has the format {found.decode(errors='replace')!r}, this version "
                f"reads {_FORMAT.decode()!r}; {_REMEDY}"
            )

    def _open_tables(self) -> None:
        """Open all tables, for use in transactions; make those missing. Waits as a write."""
        with self._alone(), self._env.begin(write=True) as txn:
            self.tables = {name: self._env.open_db(name.encode(), txn) for name in _TABLES}

    @contextmanager
    def begin(self, table: str | None = None, write: bool = False) -> Iterator[Any]:
        """A transaction, on `table` unless it names another. Raises lmdb.LockError if it writes and
        others keep it waiting, see `wait`."""
        self._hold_grown()
        with self._lock:
            self._require_usable()
            self._in_flight += 1
        try:
            with (
                self._alone() if write else _NO_LOCK,
                self._env.begin(db=self.tables[table] if table else None, write=write) as txn,
            ):
                yield txn
        except lmdb.PanicError:
            self._refuses = True
            raise
        finally:
            with self._lock:
                self._in_flight -= 1

    def _require_usable(self) -> None:
        if self._refuses:
            raise lmdb.PanicError("an error of the device; the index is opened anew soon")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep others from writing during the body. Raises lmdb.LockError and OSError."""
        last, since = -1, 0.0
        while not self._try_alone():
            commits = self._env.info()["last_txnid"]
            if commits != last:  # who writes is not stopped
                last, since = commits, time.monotonic()
            elif time.monotonic() > since + self.wait:
                raise lmdb.LockError(
                    f"a process has been writing to the index for {self.wait:g} s, is it stopped? "
                    "(lslocks names it)"
                )
        try:
            yield
        finally:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1)
            finally:
                self._writing.release()

    def _try_alone(self) -> bool:
        """Try to be the one that writes, for a moment. Raises OSError."""
        if not self._writing.acquire(timeout=_POLL_S):
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError as error:
            self._writing.release()
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            time.sleep(_POLL_S)
            return False
        return True

    def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        with self.begin("blocks") as txn:
            found = [txn.get(key) for key in keys]
        return [None if data is None else parse_entry(data) for data in found]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether it is live. Reads mapped memory and takes no lock."""
        with self.begin("blocks") as txn:
            return [txn.get(key) is not None for key in keys]

    def rows(self, after: bytes, limit: int) -> list[tuple[bytes, Entry]]:
        """The first `limit` live blocks after key `after`, in the order of their keys."""
        with self.begin("blocks") as txn:
            cursor = txn.cursor()
            found = islice(cursor, limit) if cursor.set_range(after + b"\0") else ()
            return [(key, parse_entry(data)) for key, data in found]

    def recent(
        self, beginning: bytes, count: int, before: int | None
    ) -> tuple[list[tuple[bytes, Entry]], int | None]:
        """Live blocks whose keys begin with these bytes, `count` at most, the one used last first,
        of those used before the stamp `before`; and the stamp to go on with, None: at the end."""
        found: list[tuple[bytes, Entry]] = []
        with self.begin() as txn:
            blocks, cursor = self.tables["blocks"], txn.cursor(self.tables["recency"])
            is_behind = before is not None and cursor.set_range(STAMP.pack(before))
            more = cursor.prev() if is_behind else cursor.last()
            for _ in range(_LOOKED_THROUGH):
                if not more:
                    return found, None
                before, key = fields(STAMP, cursor.key())[0], cursor.value()
                if key.startswith(beginning) and (row := txn.get(key, db=blocks)) is not None:
                    found.append((key, parse_entry(row)))
                    if len(found) >= count:
                        break
                more = cursor.prev()
        return found, before

    def times(self) -> list[tuple[int, int]]:
        """Moments, in seconds since the epoch, and the last stamp before each, in order."""
        with self.begin("meta") as txn:
            return parse_times(txn.get(b"times") or b"")

    def piece(self, row: int | None, after: bytes, limit: int) -> Piece | None:
        """Return the first `limit` live keys after key `after`, and the log's rows after row `row`,
        from one reading. None if the log no longer reaches row `row`."""
        with self.begin() as txn:
            log = txn.cursor(self.tables["changes"])
            last = fields(ROW, log.key())[0] if log.last() else 0
            changes = _changes(log, last, last if row is None else row, None)
            if changes is None:
                return None
            blocks = txn.cursor(self.tables["blocks"])
            more = blocks.set_range(after + b"\0")
            found = list(islice(blocks.iternext(values=False), limit)) if more else []
        keys = b"".join(found)
        if len(keys) != INDEX_KEY_BYTES * len(found):
            raise lmdb.CorruptedError("a key of another length in the index")
        return Piece(last, changes, keys)

    def changes(self, after: int, limit: int) -> tuple[list[array[int]] | None, int]:
        """Return the log's rows after row `after`, `limit` at most: fingerprints in the order of
        their changes. None if the log no longer reaches row `after`. And the last commit read."""
        with self.begin("changes") as txn:
            log = txn.cursor()
            last = fields(ROW, log.key())[0] if log.last() else 0
            return _changes(log, last, after, limit), txn.id()

    def last_commit(self) -> int:
        """The number of the last commit, of any process; a transaction may not see it yet."""
        self._require_usable()
        return int(self._env.info()["last_txnid"])

    def usage(self) -> Usage:
        """Count live blocks, and the bytes of live and reserved slots."""
        with self.begin() as txn:
            blocks = txn.stat(self.tables["blocks"])["entries"]
            data = txn.get(b"state", db=self.tables["meta"])
        capacity, used, _ = fields(STATE, data) if data else (0, 0, 0)
        return Usage(blocks=blocks, used=used, capacity=capacity)

    @contextmanager
    def edit(self, owner: bytes) -> Iterator[Edit]:
        """One write transaction: applies all of the body's changes, or none if the body raises."""
        with self.begin(write=True) as txn:
            edit = Edit(txn, self.tables, owner)
            yield edit
            edit.save_state()

    def reopen(self) -> bool:
        """Open LMDB anew if it refuses all and no transaction is in flight; return whether it was.
        By one thread at a time."""
        with self._lock:
            if not self._refuses or self._in_flight:
                return False
        # Nobody begins a transaction until it refuses no more.
        self._env.close()
        self._env = self._open()
        self._require_whole_file()
        self._hold()
        self._open_tables()
        self._refuses = False
        logger.warning("%s was opened anew after an error of the device", self._path)
        return True

    def keep_pages(self) -> None:
        """Every minute, and when the file grew: remove dead readers, whose pages are never used
        again otherwise, and have space allocated to grow. Takes microseconds."""
        self._hold_grown()
        pages, now = self._env.info()["last_pgno"], time.monotonic()
        if pages > self._pages or now > self._checked + READERS_CHECKED_S:
            self._pages, self._checked = pages, now
            self._env.reader_check()
            with suppress(OSError):  # a full disk, or a file system that can't
                allocate_behind(self._file, LEAST_AHEAD, MOST_AHEAD)

    def sync(self) -> None:
        self._env.sync(True)

    def close(self) -> None:
        """Unmap. Not while another thread is in a method."""
        self._env.close()
        os.close(self._file)
