"""Keeping an open tier's files: what cleans /tmp and /var/tmp takes what has not changed for days.

A lock that was removed locks nobody out: two processes would write to one index, each behind a lock
of its own. So the files are made to look new, and what is gone all the same is told.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from tiers.disk.folder.folder import Folder

EVERY_S = 600.0
"""Seconds between two looks at the files."""

logger = logging.getLogger(__name__)


class Keeping:
    """Keeps the files of a folder that this process has open; `owner` is the process's own."""

    def __init__(self, folder: Folder, owner: Path) -> None:
        self._folder = folder
        self._owner = owner
        self._next = 0.0
        self._was_said = False

    def look(self) -> None:
        """Make the files look new, and warn once if some are gone; not more often than needed."""
        now = time.monotonic()
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


def _is_kept(file: Path) -> bool:
    """Make a file look new; return whether it is there."""
    try:
        os.utime(file, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError:  # a read-only file system, where nothing is removed either
        return True
    return True
