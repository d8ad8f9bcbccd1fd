"""Writing a file whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, which then takes its name; an error or an interrupt
    leaves what was there. The other file keeps the suffix."""
    other = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(other)
        os.replace(other, path)
    finally:
        other.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write JSON to a file, whole or not at all."""
    text = json.dumps(content, indent=1) + "\n"
    write_whole(path, lambda other: other.write_text(text, encoding="utf-8"))
