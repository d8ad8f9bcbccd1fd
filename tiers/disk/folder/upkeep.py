"""Upkeep: the work that a process does for a folder in the background, on a thread of its own.

It works in short steps of one write transaction at most. In the pauses between them other threads
and processes get their turn.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tiers.concurrency.executors import start_thread
from tiers.concurrency.repeated_log import LoggedOnce
from tiers.disk.folder.clean_close import is_condemned
from tiers.disk.folder.folder import Folder
from tiers.errors import TierError
from tiers.paths import found_at

FILES_EVERY_S = 600.0
"""Seconds between two looks at each file."""

PLACE_EVERY_S = 5.0
"""Seconds between two looks at whether the folder is still the one that was opened."""

logger = logging.getLogger(__name__)


class Keeping:
    """Keeps the files of a folder that this process has open; `owner` is the process's own.

    Cleaners of /tmp and /var/tmp remove files that have not changed for days. A lock that was
    removed locks nobody out: two processes would write to one index, each behind a lock of its own.
    So the files are made to look new, and those that are missing all the same are logged.
    """

    def __init__(self, folder: Folder, owner: Path, lose: Callable[[str], object]) -> None:
        """`lose` is called once, with a line, when the folder was removed or replaced, or when
        another process has found its index to be damaged."""
        self._folder = folder
        self._owner = owner
        self._lose = lose
        self._place = _identity(folder.path)
        fixed = (folder.index, folder.index_lock, folder.lock)
        self._files = {file: _identity(file) for file in fixed}
        self._next = self._next_place = 0.0
        self._log = LoggedOnce(logger)

    def look(self) -> None:
        """Make the files look new, and warn once if some are gone; not more often than needed."""
        now = time.monotonic()
        if now >= self._next_place:
            self._next_place = now + PLACE_EVERY_S
            if why := self._why_gone():
                self._lose(f"{self._folder.path} {why}")
                return
        if now < self._next:
            return
        self._next = now + FILES_EVERY_S
        files = (*self._folder.shared_files(), self._owner)
        gone = [file.name for file in files if not _is_kept(file)]
        if gone:
            self._log.warn(
                "disk tier %s: removed while the tier is open: %s; its blocks are served on and "
                "lost with the engine; end every engine on the folder before another is started",
                self._folder.path,
                ", ".join(gone),
            )

    def _why_gone(self) -> str:
        """Why the folder may be used no more; empty: it may. While one of the files is left, it
        keeps other processes out."""
        others = (_identity(file) != opened for file, opened in self._files.items())
        if _identity(self._folder.path) != self._place or all(others):
            return "was removed or replaced"
        return "has an index that is damaged" if is_condemned(self._folder) else ""


def _identity(path: Path) -> tuple[int, int] | None:
    """The device and inode at a path; None: nothing is there. Raises OSError."""
    found = found_at(path)
    return None if found is None else (found.st_dev, found.st_ino)


def _is_kept(file: Path) -> bool:
    try:
        os.utime(file, follow_symlinks=False)
    except OSError as error:  # else a read-only file system, where nothing is removed either
        return not isinstance(error, FileNotFoundError)
    return True


EVERY_S = 1.0
"""Seconds between two rounds: the delay until a use is written, or a dead reader is noticed."""

PAUSE_S = 0.001
"""Seconds between two steps. Without it this thread would mostly get LMDB's lock again."""

_CLOSE_WAIT_S = 5.0

Duty = Callable[[], bool | None]
"""Does a step of some work; returns True if there is more to do now."""


class Upkeep:
    """Runs duties in rounds. A step holds the open folder as a verb does, so that nobody closes it
    meanwhile."""

    def __init__(
        self, path: Path, hold: Callable[[], AbstractContextManager[object]], duties: Sequence[Duty]
    ) -> None:
        self._path = path
        self._hold = hold
        self._duties = duties
        self._stopped = threading.Event()
        # Held during a step. Without it a step in flight could end after `close` has returned,
        # and only then close the folder.
        self._stepping = threading.Lock()
        self._failing = False

    def start(self) -> None:
        start_thread(self._run, "disk-upkeep")

    def stop(self) -> None:
        """Let no further step begin. Does not wait."""
        self._stopped.set()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Keep steps from running during the body; a step that hangs is waited for 5 s at most."""
        held = self._stepping.acquire(timeout=_CLOSE_WAIT_S)
        try:
            yield
        finally:
            if held:
                self._stepping.release()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                while True in [self._step(duty) for duty in self._duties]:
                    self._stopped.wait(PAUSE_S)
            except TierError as error:
                # Logged once; verbs that meet the same error are counted.
                if not self._failing and not self._stopped.is_set():
                    logger.warning(
                        "disk tier %s: upkeep failed and is tried again every second: %s",
                        self._path,
                        error,
                    )
                self._failing = True
            else:
                self._failing = False
            self._stopped.wait(EVERY_S)

    def _step(self, duty: Duty) -> bool:
        with self._stepping:
            if self._stopped.is_set():
                return False
            with self._hold():
                return bool(duty())
