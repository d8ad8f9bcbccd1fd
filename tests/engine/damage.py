"""Damage to single blocks of a disk tier, behind the engine's back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tiers.block import HEADER_BYTES, parse_header
from tiers.disk.slab import PAGE
from tiers.errors import RecordError


def damage_blocks(folder: Path, chosen: Callable[[bytes], bool]) -> int:
    """Flip a bit in the payload of each block whose whole key is `chosen`; how many there were."""
    count = 0
    for slab, start, key in list(_records(folder)):
        if chosen(key):
            with slab.open("r+b") as file:
                file.seek(start + PAGE + 100)
                (byte,) = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            count += 1
    return count


def keys_on(folder: Path) -> list[bytes]:
    """The whole keys of all blocks that the slabs hold or held, in their order there."""
    return [key for _, _, key in _records(folder)]


def _records(folder: Path) -> Iterator[tuple[Path, int, bytes]]:
    for slab in folder.glob("**/slab-*"):
        data = slab.read_bytes()
        for start in (match.start() for match in re.finditer(b"kvtiers\n", data)):
            try:
                yield slab, start, parse_header(data[start : start + HEADER_BYTES]).key
            except RecordError:
                continue  # a payload that happens to look like a header
