"""Modes of io and durability: the same blocks in each, and what each survives."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from spec.offloading import StoreContext
from tests.disk.audit import (
    MODE,
    SLOT,
    audit,
    handles_of,
    image_made,
    key,
    keys,
    open_disk,
    put,
    run_mounted,
    slab_path,
)
from tiers.disk import slab as slabs
from tiers.disk.disk_store import DiskStore
from tiers.disk.slab import PAGE, Slab, choose_direct
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnavailable, TierUnusable
from tiers.host.spare_memory import spare_memory
from tiers.store import Block, TierStore
from tiers.testing import StoreContract, payload_of

COMPLETE = 16 * PAGE


class TestDirect(StoreContract):
    persistent = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"

    def open_store(self, payload_bytes: int) -> TierStore:
        capacity = max(payload_bytes, self.payload_bytes) * 96
        spec = DiskSpec.model_validate({"path": self.path, "capacity": capacity, "io": "direct"})
        return spec.open(StoreContext(payload_bytes))


def on_pages(shift: int, count: int = 3) -> list[Block]:
    """Blocks of whole pages, each payload so many bytes behind a page's start."""
    memory = memoryview(mmap.mmap(-1, count * 2 * COMPLETE))
    starts = [n * 2 * COMPLETE + shift for n in range(count)]
    return [Block(key(n), memory[start : start + COMPLETE]) for n, start in enumerate(starts)]


@pytest.mark.parametrize("store_shift", [0, 512, 1])
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_what_one_way_wrote_every_way_reads(tmp_path: Path, io: str, store_shift: int) -> None:
    def opened(how: str) -> DiskStore:
        settings = {"path": tmp_path, "capacity": 8 * (COMPLETE + PAGE), "io": how}
        return DiskSpec.model_validate(settings).open(StoreContext(COMPLETE))

    store = opened(io)
    blocks = on_pages(store_shift)
    for block in blocks:
        block.payload[:] = payload_of(block.key, COMPLETE)
    assert store.put(blocks) == [True] * 3
    store.close()
    for how in ("direct", "buffered"):
        store = opened(how)
        for shift in (0, 512, 1):
            found = on_pages(shift)
            assert store.get(found) == [True] * 3
            assert all(block.payload == payload_of(block.key, COMPLETE) for block in found)
        store.close()


def test_direct_blocks_stay_out_of_the_page_cache(tmp_path: Path) -> None:
    settings = {"path": tmp_path, "capacity": 64 << 20, "io": "direct"}
    store = DiskSpec.model_validate(settings).open(StoreContext(COMPLETE))
    blocks = on_pages(0, count=64)
    store.put(blocks)
    assert store.get(blocks) == [True] * 64
    assert cached_pages(slab_path(tmp_path, COMPLETE)) < 64
    store.close()


def cached_pages(path: Path) -> int:
    """How many of a file's pages the page cache has now."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        pages = (ctypes.c_ubyte * (-(-len(view) // PAGE)))()
        start = ctypes.c_char.from_buffer(view)
        wrong = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), pages
        )
        del start
    assert wrong == 0
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("shift", [0, 512])
def test_what_is_read_only_and_on_pages_is_written_without_a_copy(
    tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    slab = Slab(tmp_path / "slab-1.dat", 2 * PAGE, direct=True)
    monkeypatch.setattr(slab, "_write", lambda _, parts: written.extend(map(len, parts)))
    with (
        mmap.mmap(-1, 2 * PAGE) as memory,
        memoryview(memory) as whole,
        whole[shift : shift + PAGE] as part,
        part.toreadonly() as payload,
    ):
        slab.write(0, [b"header"], [payload])
    slab.close()
    assert written == ([2 * PAGE] if shift else [PAGE, PAGE])


def test_auto_is_direct_where_memory_is_short(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.touch()
    for capacity, expected in ((SLOT, False), (2 * spare_memory(), True)):
        direct, why = choose_direct(tmp_path, probe, "auto", capacity)
        assert direct is expected and "memory to spare" in why
        assert why.startswith("io is direct: " if direct else "io is buffered: ")
    assert probe.stat().st_size == 0


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Path("/proc/self/comm")
    direct, why = choose_direct(tmp_path, probe, "auto", 2 * spare_memory())
    assert not direct and "no direct I/O on this file system" in why
    with pytest.raises(TierUnusable, match="set io to auto or buffered"):
        choose_direct(tmp_path, probe, "direct", SLOT)
    monkeypatch.setattr(slabs, "supports_direct", lambda probe: False)
    monkeypatch.setenv(MODE, "direct none")
    with pytest.raises(TierUnusable, match="set io to auto or buffered"):
        open_disk(tmp_path)
    assert not (tmp_path / "index.mdb").exists(), "nothing was made there"


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM])
def test_an_error_that_may_pass_says_nothing_of_direct_io(
    tmp_path: Path, call: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tier is unusable, or buffered, until the engine is restarted."""

    def fails(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setenv(MODE, "direct none")
    handles = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(TierNotOpen, match=os.strerror(error)):
            open_disk(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == handles
    store = open_disk(tmp_path)
    assert "io direct" in store.describe()
    store.close()


WITHOUT_EXTENTS = """
import os
from tests.disk.audit import MODE
from tiers.disk import slab
mount = path / "mount"
slab.spare_memory = lambda: 0
try:
    open_disk(mount / "tier")
except TierUnusable as error:
    assert "set io to auto or buffered" in str(error), error
else:
    raise SystemExit("opened")
os.environ[MODE] = "auto none"
store = open_disk(mount / "tier")
for n in range(20):
    assert put(store, keys(n)) == [True]
assert get(store, keys(19, 18, 0)) == [True, True, False]
audit(store)
store.close()
"""


@pytest.mark.fault
def test_a_file_system_that_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = image_made(tmp_path, "ext4", "32M", '-O "^extent,^64bit,^has_journal"')
    monkeypatch.setenv(MODE, "direct none")
    (tmp_path / "mount").mkdir()
    mount = f'mount -o loop "{tmp_path}/image" "{tmp_path}/mount"'
    run_mounted(f"{made} && {mount}", WITHOUT_EXTENTS, tmp_path)


def test_one_process_opens_a_folder_in_one_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE, "buffered none")
    store = open_disk(tmp_path)
    for other in ("direct none", "buffered sync"):
        monkeypatch.setenv(MODE, other)
        with pytest.raises(TierUnusable, match="other settings of io or durability"):
            open_disk(tmp_path)
    assert put(store, keys(0)) == [True]
    store.close()


@pytest.mark.fault
def test_a_sync_that_fails_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE, "buffered sync")
    store = open_disk(tmp_path)
    put(store, keys(*range(8)))
    (handle,) = handles_of(tmp_path, "slab-*")
    kept, sink = os.dup(handle), os.open("/dev/null", os.O_RDWR)
    os.dup2(sink, handle)  # takes every write and can't be synced
    with pytest.raises(TierUnavailable):
        put(store, keys(10, 11, 12))
    os.dup2(kept, handle)
    os.close(kept)
    os.close(sink)
    assert store.peek(keys(10, 11, 12)) == [False] * 3
    assert put(store, keys(20)) == [True]
    audit(store)
    store.close()


POWER_CUT = """
import os, shutil, subprocess
from tests.disk.audit import MODE
image, copy, mount = path / "image", path / "copy", path / "mount"

def mounted(file):
    subprocess.run(["mount", "-o", "loop", str(file), str(mount)], check=True)

mounted(image)
store = open_disk(mount / "tier", slots=16)
for n in range(0, 20, 4):
    assert all(put(store, keys(*range(n, n + 4))))
    if n == 8:
        os.sync()  # as the kernel does, given time
now = store.has(keys(*range(20)))
assert now == [False] * 4 + [True] * 16
shutil.copyfile(image, copy)  # what the device has; what the kernel still holds is lost
store.close()
subprocess.run(["umount", str(mount)], check=True)
mounted(copy)
for owner in (mount / "tier" / "owners").iterdir():
    another = "0" * 8 + "-0000-0000-0000-" + "0" * 12
    owner.rename(owner.with_name(another + owner.name[36:]))
store = open_disk(mount / "tier", slots=16)
audit(store)
found = get(store, keys(*range(20)))
durability = os.environ[MODE].split()[1]
assert sum(found) == 0 or durability != "none", found
assert all(found[4:12]) or durability != "batch", found
assert found == now or durability != "sync", found
assert put(store, keys(*range(100, 116))) == [True] * 16
assert get(store, keys(*range(100, 116))) == [True] * 16
audit(store)
store.close()
subprocess.run(["umount", str(mount)], check=True)
"""


@pytest.mark.fault
@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("durability", ["none", "batch", "sync"])
def test_a_power_cut(
    tmp_path: Path, io: str, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE, f"{io} {durability}")
    (tmp_path / "mount").mkdir()
    script = f'truncate -s 32M "{tmp_path}/image" && mkfs.ext4 -q "{tmp_path}/image"'
    run_mounted(script, POWER_CUT, tmp_path)
