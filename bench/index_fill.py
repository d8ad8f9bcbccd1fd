"""An index of millions of blocks, made in minutes: the rows that so many stores would leave, on
pages as full as theirs.

Stores insert keys at random places, which leaves leaf pages 69% full. So does this, but range by
range of the keys: only a range's pages are in use at a time, where stores would go through the
whole index for each batch. The order of use is appended to by both, which leaves its pages full.
The pages lie in the file in the order of their keys, which those of stores don't: that matters
where an index is read that the kernel does not have in memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from tiers.block import NAMESPACE_BYTES
from tiers.disk.folder.open_folders import open_folders
from tiers.disk.index.edit import ENTRY, NAMESPACE_PART, STAMP, STATE, index_key
from tiers.disk.index.edit import SIZE as SIZE_ROW
from tiers.disk.index.index import Index
from tiers.disk.slab import Access, slot_bytes

PAYLOAD = 4096
SIZE = slot_bytes(PAYLOAD)

_AT_ONCE = 250_000
_RANGES = 256
_ROW = struct.Struct("<16sQ")
_NAMESPACE = bytes(NAMESPACE_BYTES)


def block_key(number: int) -> bytes:
    """The key of block `number`: as long as an engine's."""
    return _NAMESPACE + number.to_bytes(33)


def fill(path: Path, count: int) -> None:
    """Make a full tier of `count` blocks, stored in the order of their numbers, whose slots are
    holes of a file. Takes 26 bytes of memory a block, and 6 us."""
    folder = open_folders.acquire(path, count * SIZE, Access("buffered"))
    index = folder.index
    ranges = [bytearray() for _ in range(_RANGES)]
    for start in range(0, count, _AT_ONCE):
        _append_uses(index, range(start, min(count, start + _AT_ONCE)), ranges)
    while ranges:
        with index.begin(write=True) as txn:
            txn.cursor(index.tables["blocks"]).putmulti(_rows(ranges.pop()))
    with index.begin(write=True) as txn:
        txn.put(SIZE_ROW.pack(SIZE), SIZE_ROW.pack(count), db=index.tables["lengths"])
        state = STATE.pack(count * SIZE, count * SIZE, count)
        txn.put(b"state", state, db=index.tables["meta"])
    folder.slabs[SIZE]  # makes the file
    os.truncate(path / f"slab-{SIZE}.dat", count * SIZE)
    open_folders.release(folder)


def _append_uses(index: Index, numbers: range, ranges: list[bytearray]) -> None:
    keys = [index_key(block_key(number)) for number in numbers]
    uses = [(STAMP.pack(number), key) for number, key in zip(numbers, keys, strict=True)]
    with index.begin(write=True) as txn:
        txn.cursor(index.tables["recency"]).putmulti(uses, append=True)
    for number, key in zip(numbers, keys, strict=True):
        ranges[key[NAMESPACE_PART]] += _ROW.pack(key[NAMESPACE_PART:], number)


def _rows(some: bytearray) -> Iterator[tuple[bytes, bytes]]:
    begin, none = index_key(block_key(0))[:NAMESPACE_PART], bytes(16)
    for digest, number in _ROW.iter_unpack(some):
        yield begin + digest, ENTRY.pack(number, PAYLOAD, none, number)
