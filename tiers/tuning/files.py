"""Writing a file whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tiers.errors import KVTiersError


class CannotWrite(KVTiersError):
    """A result found no place; names the file."""


def write_whole(path: Path, text: str) -> None:
    """Write a file beside `path`, which then takes its name; an error or an interrupt leaves what
    was there. Raises CannotWrite."""
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe: a file in its place would end it for all.
            path.write_text(text, encoding="utf-8")
            return
        place = path.resolve()  # the target of a link is written, and the link stays
        other = place.with_name(f".{place.stem}.{os.getpid()}{place.suffix}")
        try:
            other.write_text(text, encoding="utf-8")
            os.replace(other, place)
        finally:
            other.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise CannotWrite(f"{path}: it can't be written: {why}; name another place") from error


def write_json(path: Path, content: object) -> None:
    """Write JSON to a file, whole or not at all. Raises CannotWrite."""
    write_whole(path, json.dumps(content, indent=1) + "\n")
