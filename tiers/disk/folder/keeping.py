"""Keeping an open tier's files: what cleans /tmp and /var/tmp takes what has not changed for days.

A lock that was removed locks nobody out: two processes would write to one index, each behind a lock
of its own. So the files are made to look new, and what is gone all the same is told.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from tiers.disk.folder.folder import Folder

EVERY_S = 600.0
"""Seconds between two looks at each file."""

PLACE_EVERY_S = 5.0
"""Seconds between two looks at whether the folder is still the one that was opened."""

logger = logging.getLogger(__name__)


class Keeping:
    """Keeps the files of a folder that this process has open; `owner` is the process's own."""

    def __init__(self, folder: Folder, owner: Path, lose: Callable[[str], None]) -> None:
        """`lose` is told, once, that the folder was removed or replaced, and in which words."""
        self._folder = folder
        self._owner = owner
        self._lose = lose
        self._place = _identity(folder.path)
        fixed = (folder.index, folder.index_lock, folder.lock)
        self._files = {file: _identity(file) for file in fixed}
        self._next = self._next_place = 0.0
        self._was_said = False

    def look(self) -> None:
        """Make the files look new, and warn once if some are gone; not more often than needed."""
        now = time.monotonic()
        if now >= self._next_place:
            self._next_place = now + PLACE_EVERY_S
            if self._is_gone():
                self._lose(f"{self._folder.path} was removed or replaced")
                return
        if now < self._next:
            return
        self._next = now + EVERY_S
        files = (*self._folder.shared_files(), self._owner)
        gone = [file.name for file in files if not _is_kept(file)]
        if gone and not self._was_said:
            self._was_said = True
            logger.warning(
                "disk tier %s: removed while the tier is open: %s; what is stored is served on and "
                "lost with the engine; end every engine on the folder before another is started",
                self._folder.path,
                ", ".join(gone),
            )

    def _is_gone(self) -> bool:
        """Whether the folder is another than was opened, or all that it had is. Where a part is
        missing, the rest still keeps other processes out."""
        if _identity(self._folder.path) != self._place:
            return True
        return all(_identity(file) != opened for file, opened in self._files.items())


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file or folder is at a path, if any; the same while that can't be told."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _is_kept(file: Path) -> bool:
    """Make a file look new; return whether it is there."""
    try:
        os.utime(file, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError:  # a read-only file system, where nothing is removed either
        return True
    return True
