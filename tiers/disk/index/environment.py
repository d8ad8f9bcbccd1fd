"""The LMDB environment of an index, which is opened anew when LMDB refuses all.

An error of the device in the very write that ends a commit makes LMDB refuse every transaction,
reading ones too, until the environment is closed. What was committed before is as it was.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from tiers.disk.failures import Damaged

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
        self._under_way = 0
        self._refuses = False
        self._env = self._open()
        self._require_whole_file()

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
        """Open all tables; make those that are missing."""
        self.tables = {name: self._env.open_db(name.encode()) for name in self._names}

    def open_db(self, name: bytes | None, txn: Any, create: bool = True) -> Any:
        """Open one table in a transaction."""
        return self._env.open_db(name, txn, create=create)

    @contextmanager
    def begin(self, table: str | None = None, write: bool = False) -> Iterator[Any]:
        """A transaction, on `table` if nothing else is said in it."""
        with self._lock:
            if self._refuses:
                raise lmdb.PanicError("an error of the device; the index is opened anew soon")
            self._under_way += 1
        try:
            with self._env.begin(db=self.tables[table] if table else None, write=write) as txn:
                yield txn
        except lmdb.PanicError:
            self._refuses = True
            raise
        finally:
            with self._lock:
                self._under_way -= 1

    def reopen(self) -> None:
        """Open the environment anew if LMDB refuses all and no transaction is under way. By one
        thread, which also calls all other methods than `begin`. Raises Damaged, too."""
        with self._lock:
            if not self._refuses or self._under_way:
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
