"""The LMDB environment of an index, which is opened anew when LMDB refuses all, and whose writers
wait for each other no longer than they should.

An error of the device in the very write that ends a commit makes LMDB refuse every transaction,
reading ones too, until the environment is closed. What was committed before is as it was.

LMDB's own lock of writers can't be given up: behind a process that is stopped while it has that
lock all others would hang. So a writer first locks a byte of the index file, and tries for a while.
A record lock it is, since no fork inherits those: a child would hold it when its parent is killed.
Closing any handle of the index file would free it; then, and beside a process that does not know
of it, LMDB's lock alone keeps writers apart.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from tiers.disk.failures import Damaged

WAIT_S = 1.0
"""How long a write waits for others while none of them commits. Beside healthy processes one edit
of some two thousand took 0.7 s, on a machine under load."""

BRIEF_WAIT_S = 0.5
"""The same while the tier is opened or closed."""

_POLL_S = 0.001
_NO_WAIT = nullcontext()

logger = logging.getLogger(__name__)


class Environment:
    """One open LMDB environment. LMDB allows one per file and process. Raises LMDB's errors."""

    def __init__(self, path: Path, names: Sequence[str], **options: Any) -> None:
        """`names`: of the tables, which `open_tables` opens. Raises Damaged, too."""
        self._path = path
        self._names = names
        self._open = partial(lmdb.open, str(path), **options)
        self.tables: dict[str, Any] = {}
        """For use in a transaction."""
        # Without it the environment could be closed under a transaction. Never held during I/O.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._refuses = False
        self.wait = BRIEF_WAIT_S
        """How long a write waits for others while none of them commits, in seconds."""
        # Keeps this process's writers apart, since a record lock is of the process. Held during
        # I/O, and waited for as the record lock is.
        self._writing = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        try:
            self._env = self._open()
            self._require_whole_file()
        except BaseException:
            os.close(self._file)
            raise

    def _require_whole_file(self) -> None:
        # Reading a mapped page behind the end of a cut file would kill the process by SIGBUS.
        try:
            with self._env.begin() as txn:
                page = txn.stat(self._env.open_db(None, txn))["psize"]
            need, size = (self._env.info()["last_pgno"] + 1) * page, os.stat(self._path).st_size
            if size < need:
                raise Damaged(f"{self._path} has {size} bytes, {need} expected")
        except BaseException:
            self._env.close()
            raise

    def open_tables(self) -> None:
        """Open all tables; make those that are missing. Waits as a write."""
        with self._alone(), self._env.begin(write=True) as txn:
            self.tables = {name: self.open_db(name.encode(), txn) for name in self._names}

    def open_db(self, name: bytes | None, txn: Any, create: bool = True) -> Any:
        """Open one table in a transaction."""
        return self._env.open_db(name, txn, create=create)

    @contextmanager
    def begin(self, table: str | None = None, write: bool = False) -> Iterator[Any]:
        """A transaction, on `table` if nothing else is said in it. One that writes raises
        lmdb.LockError if others keep it waiting, see `wait`."""
        with self._lock:
            if self._refuses:
                raise lmdb.PanicError("an error of the device; the index is opened anew soon")
            self._in_flight += 1
        try:
            with (
                self._alone() if write else _NO_WAIT,
                self._env.begin(db=self.tables[table] if table else None, write=write) as txn,
            ):
                yield txn
        except lmdb.PanicError:
            self._refuses = True
            raise
        finally:
            with self._lock:
                self._in_flight -= 1

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

    def reopen(self) -> None:
        """Open the environment anew if LMDB refuses all and no transaction is under way. By one
        thread, which also calls all other methods than `begin`. Raises Damaged, too."""
        with self._lock:
            if not self._refuses or self._in_flight:
                return
        # Nobody begins a transaction until it refuses no more.
        self._env.close()
        self._env = self._open()
        self._require_whole_file()
        self.open_tables()
        self._refuses = False
        logger.warning("%s was opened anew after an error of the device", self._path)

    def info(self) -> Mapping[str, int]:
        """What LMDB tells of it."""
        found: Mapping[str, Any] = self._env.info()
        return found

    def reader_check(self) -> None:
        """Remove dead processes from LMDB's table of readers."""
        self._env.reader_check()

    def sync(self) -> None:
        """Sync all commits to the device."""
        self._env.sync(True)

    def close(self) -> None:
        """Unmap. Not while another thread is in a method."""
        self._env.close()
        os.close(self._file)
