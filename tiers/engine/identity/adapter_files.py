"""The files of a LoRA adapter: what changes when others are put in their place."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from tiers.engine.identity.digests import SETTLED_SECONDS, Stamp, stamp_of
from tiers.engine.identity.weights import WEIGHTS, WITHOUT_EFFECT, links

TICK_SECONDS = 0.02
"""How far apart two changes of a file are at least, for their times to differ, on a file system
whose times are finer than seconds."""


def folder_stamp(path: str) -> bytes:
    """Return 16 bytes that change with an adapter's files and with the links on the way to them;
    none if it is no local folder, or can't be read."""
    return _digest(_stamps(path))


def settled_stamp(path: str) -> bytes:
    """Return the stamp of an adapter's folder that any later change changes; none without one.
    Waits for a tick of the file system's clock where the files are as new as that."""
    stamps = _stamps(path)
    newest = max((stamp.ctime_ns for _, stamp in stamps), default=0)
    tick = TICK_SECONDS if newest % 1_000_000_000 else SETTLED_SECONDS
    age = time.time() - newest / 1e9
    if 0 <= age < TICK_SECONDS == tick:
        time.sleep(tick - age)
        return _digest(stamps)
    return _digest(stamps) if age >= tick else b""


def _stamps(path: str) -> list[tuple[str, Stamp]]:
    """Return the stamps of an adapter's files, and of the links on the way to them, by name."""
    folder = Path(path).expanduser().absolute()
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix in (*WEIGHTS, ".json"))
        decide = [p for p in files if p.name not in WITHOUT_EFFECT]
        # A link that leads to itself is found here, before links are followed.
        stamps = [(p.name, stamp_of(p.stat())) for p in decide]
        way = [*links(folder), *(link for p in decide if p.is_symlink() for link in links(p))]
        return stamps + [(str(p), stamp_of(p.lstat())) for p in way]
    except OSError:
        return []


def _digest(stamps: list[tuple[str, Stamp]]) -> bytes:
    return hashlib.blake2b(json.dumps(stamps).encode(), digest_size=16).digest() if stamps else b""
