"""The disk tier's index alone: how soon it is open again, and how much memory a block takes."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import StoreContext
from tiers.block import NAMESPACE_BYTES
from tiers.disk.access import Access
from tiers.disk.fingerprint_index import FingerprintTable
from tiers.disk.registry import open_folders
from tiers.disk.rows import index_key
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.disk.store import DiskStore

PAYLOAD = 4096
_AT_ONCE = 1000


def index_cases(scale: Scale) -> Iterator[Case]:
    """Reopening, and memory a block: one index, of small blocks whose slots are holes."""
    count = 2000 if scale.smoke else 1_000_000
    path = scale.folder / "index"
    _fill(path, count)
    name = f"{count:,} blocks"
    yield Case("disk", f"index: reopen {name}", "s", _reopen(path, count), target=1.0, of="ours")
    yield Case(
        "disk",
        f"index: memory, {name} looked up",
        "bytes/block",
        _memory(path, count),
        target=200,
        of="ours",
        why="but for 16 bytes, mapped pages of the index file, that the kernel may take back",
    )


def _open(path: Path, count: int) -> DiskStore:
    spec = DiskSpec(path=path, capacity=count * slot_bytes(PAYLOAD), io="buffered")
    return spec.open(StoreContext(PAYLOAD))


def _key(number: int) -> bytes:
    return bytes(NAMESPACE_BYTES) + hashlib.sha256(number.to_bytes(8)).digest() + b"\0"


def _fill(path: Path, count: int) -> None:
    """Make a tier whose index names blocks that nobody wrote."""
    size = slot_bytes(PAYLOAD)
    folder = open_folders.acquire(path, count * size, Access("buffered"))
    for start in range(0, count, _AT_ONCE):
        with folder.edit() as edit:
            for number in range(start, start + _AT_ONCE):
                edit.publish(index_key(_key(number)), edit.claim(size), PAYLOAD, bytes(16))
    folder.slabs[size]  # makes the file
    os.truncate(path / f"slab-{size}.dat", count * size)
    open_folders.release(folder)


def _reopen(path: Path, count: int) -> Measure:
    def run() -> float:
        began = time.perf_counter()
        store = _open(path, count)
        found = store.peek([_key(0), _key(count - 1)])
        took = time.perf_counter() - began
        store.close()
        if found != [True, True]:
            raise RuntimeError("the index lost blocks")
        return took

    return run


def _memory(path: Path, count: int) -> Measure:
    """Memory that grows from before the tier is open until all is looked up and the table made."""

    def run() -> float:
        # What the first table of a process loads of torch is not the blocks'.
        FingerprintTable(1, [bytes(8)]).has([bytes(16)])
        gc.collect()
        before = _resident()
        store = _open(path, count)
        for start in range(0, count, _AT_ONCE):
            store.peek([_key(number) for number in range(start, start + _AT_ONCE)])
        while store._folder.fingerprints._renewing:
            time.sleep(0.01)
        grown = _resident() - before
        store.close()
        return grown / count

    return run


def _resident() -> int:
    """Bytes of this process's memory, its mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
