"""What the disk tests share: opening, filling, and a full check of the books against the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spec.offloading import StoreSite
from tiers.disk.rows import Slot
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.disk.store import DiskStore
from tiers.testing import Memory

PAYLOAD = 60_000
SLOT = slot_bytes(PAYLOAD)


MODE = "KVTIERS_TEST_DISK_MODE"
"""Environment variable, for child processes too: io and durability, like "direct none"."""


def open_disk(path: Path, slots: int = 8, payload: int = PAYLOAD) -> DiskStore:
    """A store with room for so many slots of `PAYLOAD`, in the mode of the environment."""
    io, durability = os.environ.get(MODE, "auto none").split()
    settings = {"path": path, "capacity": slots * SLOT, "io": io, "durability": durability}
    return DiskSpec.model_validate(settings).open(StoreSite(payload))


@contextmanager
def opened(path: Path, slots: int = 8) -> Iterator[DiskStore]:
    """`open_disk`, closed at the end."""
    store = open_disk(path, slots)
    try:
        yield store
    finally:
        store.close()


def key(number: int) -> bytes:
    return f"namespace-16-byt{number:08d}".encode()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def put(store: DiskStore, wanted: Sequence[bytes], payload: int = PAYLOAD) -> list[bool]:
    return store.put(Memory(wanted, payload).fill().blocks)


def get(store: DiskStore, wanted: Sequence[bytes], payload: int = PAYLOAD) -> list[bool]:
    """Load; every hit is checked byte for byte."""
    memory = Memory(wanted, payload)
    hits = store.get(memory.blocks)
    assert all(memory.holds(i) for i, hit in enumerate(hits) if hit), "a wrong block was served"
    return hits


def slab_path(path: Path, payload: int = PAYLOAD) -> Path:
    return path / f"slab-{slot_bytes(payload)}.dat"


def allocated(path: Path) -> int:
    """Disk space behind the slab files in bytes, but for what the file system's own lists take."""
    found = [file.stat() for file in path.glob("slab-*.dat")]
    return sum(max(0, stat.st_blocks * 512 - 8192) for stat in found)


def audit(store: DiskStore) -> None:
    """Every slot is in exactly one state, every row has its counterpart, and the sums agree."""
    vault = store._vault
    with vault.index.edit(b"auditor of slots") as edit:
        blocks = edit._txn.cursor(edit._tables["blocks"]).iternext(values=False)
        entries = {block: edit.entry(block) for block in list(blocks)}
        live = [entry.slot for entry in entries.values() if entry is not None]
        reserved, free = list(edit.reservations()), edit.free()
        every = [Slot(size, n) for size, count in edit.lengths().items() for n in range(count)]
        assert Counter(live + reserved + free) == Counter(every)
        recency = edit._txn.cursor(edit._tables["recency"])
        stamps = {block: int.from_bytes(stamp, "big") for stamp, block in recency}
        assert stamps == {block: entry.stamp for block, entry in entries.items() if entry}
        assert edit.used == sum(slot.size for slot in live + reserved) <= edit.capacity
        assert allocated(vault.path) <= edit.used


def child_environment() -> dict[str, str]:
    """For a Python that can import what we can, and this file."""
    found = [str(Path(__file__).parent), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


def run_child(*args: object) -> subprocess.Popen[str]:
    """Start `disk_child.py` in a process of its own."""
    child = Path(__file__).with_name("disk_child.py")
    return subprocess.Popen(
        [sys.executable, str(child), *map(str, args)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
