"""What the disk tests share: opening, filling, and a full check of the books against the disk."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from spec.offloading import StoreContext
from tiers import paths
from tiers.disk.disk_store import DiskStore
from tiers.disk.folder.open_folder import OpenFolder
from tiers.disk.index.edit import Entry, Slot, index_key
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnusable
from tiers.testing import Memory

if TYPE_CHECKING:
    import pytest

PAYLOAD = 60_000
SLOT = slot_bytes(PAYLOAD)


MODE = "KVTIERS_TEST_DISK_MODE"
"""Environment variable, for child processes too: io and durability, like "direct none"."""


LMDB_PAGE = min(mmap.PAGESIZE, 1 << 15)
"""Bytes of a page of an index that is made on this machine."""


def make_index(path: Path, page: int) -> None:
    """An index without blocks, as LMDB makes it where the system's pages are so large."""
    lmdb.open(str(path), subdir=False, mode=0o600).close()
    made, metas = path.read_bytes(), bytearray(2 * page)
    for number in range(2):
        start = number * page
        metas[start : start + 200] = made[number * LMDB_PAGE :][:200]
        struct.pack_into("<I", metas, start + 40, page)
    path.write_bytes(metas)


def open_disk(path: Path, slots: int = 8, payload: int = PAYLOAD) -> DiskStore:
    """A store with room for so many slots of `PAYLOAD`, in the mode of the environment."""
    io, durability = os.environ.get(MODE, "auto none").split()
    settings = {"path": path, "capacity": slots * SLOT, "io": io, "durability": durability}
    return DiskSpec.model_validate(settings).open(StoreContext(payload))


@contextmanager
def opened(path: Path, slots: int = 8) -> Iterator[DiskStore]:
    """`open_disk`, closed at the end."""
    store = open_disk(path, slots)
    try:
        yield store
    finally:
        store.close()


def folder_of(store: DiskStore) -> OpenFolder:
    """What the process has open of a store's folder."""
    return store._folder


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
    return sum(max(0, stat.st_blocks * 512 - 2 * os.statvfs(path).f_frsize) for stat in found)


def audit(store: DiskStore, lists: int = 0) -> None:
    """Every slot is in exactly one state, every row has its counterpart, and the sums agree.
    `lists`: bytes that the file system's lists of many small pieces may take beside."""
    folder = folder_of(store)
    with folder.index.edit(b"auditor of slots") as edit:
        blocks = edit._txn.cursor(edit._tables["blocks"]).iternext(values=False)
        entries = {block: edit.entry(block) for block in list(blocks)}
        live = [entry.slot for entry in entries.values() if entry is not None]
        owners, free = edit.reservations(), edit.free()
        reserved = list(owners)
        every = [Slot(size, n) for size, count in edit.lengths().items() for n in range(count)]
        assert Counter(live + reserved + free) == Counter(every)
        ours = {slot for slot, owner in owners.items() if owner == folder._owner.id}
        of_puts = {slot for put in folder._puts for slot in put.slots.values()}
        assert ours <= of_puts | {*folder._leaked}, "a slot is reserved for nobody"
        recency = edit._txn.cursor(edit._tables["recency"])
        stamps = {block: int.from_bytes(stamp, "big") for stamp, block in recency}
        assert stamps == {block: entry.stamp for block, entry in entries.items() if entry}
        assert edit.used == sum(slot.size for slot in live + reserved) <= edit.capacity
    # Another process may be about to give space back that it has freed.
    for wait in range(50):
        with folder.index.edit(b"auditor of slots") as edit:
            if allocated(folder.path) <= edit.used + lists:
                return
        time.sleep(0.01 * wait)
    raise AssertionError(f"{allocated(folder.path)} bytes on the disk, {edit.used} in use")


def child_environment() -> dict[str, str]:
    """For a Python that can import what we can, and the tests."""
    found = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


def run_code(code: str, *args: object, within: Sequence[str] = (), timeout: float = 60) -> None:
    """Run Python in another process to its end; its failure is the test's. For what `code` finds
    see `Other`; `within` is a command that runs the command which follows it."""
    done = subprocess.run(
        [*within, sys.executable, "-c", _OTHER + code, *map(str, args)],
        env=child_environment(),
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def handles_of(folder: Path, pattern: str) -> list[int]:
    """This process's open handles of the files of a folder that match."""
    files = {str(file) for file in folder.glob(pattern)}
    every = [int(name) for name in os.listdir("/proc/self/fd")]
    return [one for one in every if os.path.realpath(f"/proc/self/fd/{one}") in files]


def say_mounted(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the kernel say that every file system is of this kind."""
    rows = Path("/proc/self/mountinfo").read_text()
    doctored = tmp_path / "mountinfo"
    doctored.write_text(re.sub(r" - \S+ ", f" - {kind} ", rows))
    monkeypatch.setattr(paths, "_MOUNTS", doctored)


def run_mounted(mount: str, code: str, path: Path, *args: object) -> None:
    """Run Python after a mount that only its process sees."""
    import pytest  # a third of what each child would import

    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user can't mount anything")
    run_code(code, path, *args, within=["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" "$@"'])


def image_made(path: Path, kind: str, size: str, options: str = "") -> str:
    """The shell's command that makes `path`/image, to be mounted; skips where none can be."""
    import pytest

    if not shutil.which(f"mkfs.{kind}") or not Path("/dev/loop-control").exists():
        pytest.skip(f"no mkfs.{kind}, or no loop device to mount its image")
    return f'truncate -s {size} "{path}/image" && mkfs.{kind} -q {options} "{path}/image"'


def refused(path: Path, match: str, capacity: int = 8 * SLOT, shares: int = 1) -> None:
    """Opening must fail with a message that matches and names the path."""
    import pytest

    spec = DiskSpec(path=path, capacity=capacity)
    with pytest.raises((TierUnusable, TierNotOpen), match=match) as caught:
        spec.open(StoreContext(PAYLOAD, shares))
    assert str(path) in str(caught.value)


class Other:
    """Another process on a folder: runs Python until it says a word, and goes on when told to."""

    def __init__(self, code: str, *args: object, within: Sequence[str] = ()) -> None:
        """`code` finds `args` in `args` and what this file has; it calls `say` and `wait`."""
        self._process = subprocess.Popen(
            [*within, sys.executable, "-c", _OTHER + code, *map(str, args)],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        """The next word it says; "" if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self) -> None:
        """Let it go on from where it waits."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def go_on(self) -> None:
        """Let it go on from where it has stopped itself."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self.gone()

    def gone(self) -> int:
        """Wait until it has ended; how."""
        self._process.communicate()
        return self._process.returncode

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self, seconds: float = 120) -> None:
        """Let it end, which it must do in order, and within so many seconds."""
        self._process.communicate("\n", timeout=seconds)
        assert self._process.returncode == 0


_OTHER = """
import os, signal, sys
from pathlib import Path
from tests.disk.audit import *
from tiers.errors import TierFull, TierNotOpen, TierUnavailable, TierUnusable
args = sys.argv[1:]
path = Path(args[0])
say = lambda word: print(word, flush=True)
wait = sys.stdin.readline
"""


def put_row(path: Path, table: str, key: bytes, row: bytes) -> None:
    """Write a row of a tier's index, as whoever damages it."""
    run_code(_PUT_ROW, path, table, key.hex(), row.hex())


_PUT_ROW = """
import lmdb
with lmdb.open(str(path / "index.mdb"), subdir=False, max_dbs=8) as env:
    table = env.open_db(args[1].encode())
    with env.begin(db=table, write=True) as txn:
        txn.put(*map(bytes.fromhex, args[2:]))
"""


def fill_index(path: Path, count: int, payload: int = 4096) -> None:
    """A closed tier whose index names so many blocks that nobody wrote, `key(n)` the n-th used."""
    size = slot_bytes(payload)
    capacity = f"{count * size}B"
    store = DiskSpec.model_validate({"path": path, "capacity": capacity}).open(
        StoreContext(payload)
    )
    folder = folder_of(store)
    for start in range(0, count, 1000):
        with folder.edit() as edit:
            for number in range(start, min(count, start + 1000)):
                edit.publish(index_key(key(number)), Entry(edit.claim(size), payload, bytes(16)))
    folder.slabs[size]  # makes the file
    os.truncate(path / f"slab-{size}.dat", count * size)
    store.close()


def settled(store: DiskStore) -> DiskStore:
    """The store, once the tier has shrunk to its capacity."""
    while (usage := store.usage()).used > (usage.capacity or 0):
        time.sleep(0.01)
    return store
