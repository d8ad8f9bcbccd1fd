"""What lies at a path."""

from __future__ import annotations

import os
from pathlib import Path


def found_at(path: Path) -> os.stat_result | None:
    """What the system says of a path; None: nothing is there. Raises OSError, which `exists` and
    the like of pathlib take for nothing from Python 3.14 on."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
