"""A device that fills, turns read-only or stalls: stores resume with it, without a restart."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.disk.audit import (
    MODE,
    PAYLOAD,
    SLOT,
    audit,
    folder_of,
    get,
    handles_of,
    image_made,
    keys,
    open_disk,
    opened,
    put,
    run_code,
    run_mounted,
)
from tests.support.clock import wait_for
from tiers.disk.folder import upkeep
from tiers.disk.index import fingerprint_index
from tiers.disk.index.edit import Edit, Slot
from tiers.disk.index.fingerprint_index import FingerprintTable
from tiers.disk.index.index import Index
from tiers.disk.slab import Slab
from tiers.errors import TierFull, TierUnavailable
from tiers.store import LocalIndex, capability
from tiers.testing import Memory

WAIT_S = 60.0
"""How long a test waits for what should come at once."""

FULL = """
import threading
from concurrent.futures import ThreadPoolExecutor
store = open_disk(path / "tier", slots=1000)
assert all(put(store, keys(0, 1, 2, 3)))
taken = 0
with open(path / "other", "wb", buffering=0) as other:
    try:
        while True:
            taken += other.write(bytes(4096))
    except OSError:
        pass
assert taken > 0
for n in range(10, 500):
    assert put(store, keys(n)) == [True], n
    get(store, keys(0, 1, 2, 3, n))
assert store.usage().blocks <= 4
with ThreadPoolExecutor(200) as threads:  # more readers than LMDB had to remember before
    barrier = threading.Barrier(200)
    def read(n):
        barrier.wait()
        return store.has(keys(n))
    list(threads.map(read, range(200)))
try:
    open_disk(path / "new")
except TierNotOpen as error:
    assert "No space left" in str(error), error
else:
    raise SystemExit("opened")
(path / "other").unlink()
for n in range(60, 100):
    assert put(store, keys(n)) == [True], n
assert store.usage().blocks >= 40
assert get(store, keys(*range(60, 100))) == [True] * 40
audit(store)
store.close()
store = open_disk(path / "tier", slots=1000)
assert get(store, keys(*range(60, 100))) == [True] * 40
store.close()
"""


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["buffered none", "buffered sync"])
def test_a_disk_that_fills_and_empties(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE, mode)
    run_mounted(f'mount -t tmpfs -o size=12m,mode=700 none "{tmp_path}"', FULL, tmp_path)


READ_ONLY = """
import subprocess
mount = path / "mount"
mount.mkdir()
subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(path / "image"), mount], check=True)
tier = mount / "tier"
store = open_disk(tier, slots=100)
assert all(put(store, keys(0, 1, 2)))

def attribute(flag):
    subprocess.run(["chattr", flag, tier / "index.mdb", *tier.glob("slab-*")], check=True)

def changes_fail(n):
    for change in (lambda: put(store, keys(n)), lambda: store.drop(keys(0))):
        try:
            change()
        except TierUnavailable:
            continue
        raise SystemExit("a change succeeded")
    assert put(store, keys(0, 1)) == [True, True]  # held already
    store.touch(keys(0))
    assert get(store, keys(0, 1, 2, n)) == [True, True, True, False]

attribute("+i")  # no process can write to these files now, open or not
changes_fail(10)
changes_fail(11)
attribute("-i")
assert all(put(store, keys(10, 11, 12)))
assert all(get(store, keys(0, 1, 2, 10, 11, 12)))
audit(store)
subprocess.run(["mount", "-o", "remount,abort", mount])  # as after an error of the device
changes_fail(20)
store.close()
subprocess.run(["umount", mount], check=True)
subprocess.run(["mount", "-o", "loop", str(path / "image"), mount], check=True)
store = open_disk(tier, slots=100)
hits = get(store, keys(0, 1, 2, 10, 11, 12))
assert put(store, keys(20)) == [True]
audit(store)
store.close()
subprocess.run(["umount", mount], check=True)
"""


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["buffered none", "direct sync"])
def test_a_path_that_turns_read_only(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE, mode)
    image = f'"{tmp_path}/image"'
    run_mounted(f"truncate -s 32M {image} && mkfs.ext4 -q {image}", READ_ONLY, tmp_path)


GOES = """
import ctypes, fcntl, struct, subprocess
from contextlib import suppress
from tiers.paths import mount_of
from tiers.errors import TierError
mount = path / "mount"
mount.mkdir()
subprocess.run(["mount", "-o", "loop", path / "image", mount], check=True)
store = open_disk(mount / "tier", slots=400)
for n in range(0, 400, 20):
    put(store, keys(*range(n, n + 20)))
get(store, keys(0))  # by then what was written last is held, too
subprocess.run(["sync", "-f", mount], check=True)
os.truncate(path / "image", 1 << 20)  # the device has lost what lies behind
madvise = ctypes.CDLL(None).madvise
madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
for name in ("index.mdb", "index.mdb-lock"):  # other memory is wanted
    for row in open("/proc/self/maps"):
        if row.endswith(f"/{name}\\n"):
            start, end = (int(part, 16) for part in row.split()[0].split("-"))
            madvise(start + 4096, min(end - start, 1 << 17) - 4096, 21)  # MADV_PAGEOUT
    for handle in handles_of(mount / "tier", name):
        os.posix_fadvise(handle, 4096, 0, os.POSIX_FADV_DONTNEED)
for n in range(40):
    with suppress(TierError):
        get(store, keys(*range(10 * n, 10 * n + 10)))
    with suppress(TierError):
        put(store, keys(1000 + n))
    if n == 20 and mount_of(mount).kind == "xfs":  # it gives up, as it does by itself in the end
        handle, sync = os.open(mount, os.O_RDONLY), ctypes.CDLL(None).syncfs
        sync(handle)
        fcntl.ioctl(handle, 0x8004587D, struct.pack("I", 2))  # XFS_IOC_GOINGDOWN, log not flushed
        sync(handle)  # of pages that have changed it lets nobody know
        os.close(handle)
store.close()
"""


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_device_that_goes_ends_no_process(tmp_path: Path, kind: str) -> None:
    """Though it takes pages with it that are mapped as memory, and XFS lets nobody write to one."""
    run_mounted(image_made(tmp_path, kind, "320M"), GOES, tmp_path)


LIMITED = """
import io, logging, mmap, resource
from tiers.disk.index.mapped import Mapped
page = mmap.PAGESIZE
with open(path / "file", "w+b") as file:
    file.truncate(100 * page)
    memory = mmap.mmap(file.fileno(), 0)
said = io.StringIO()
logging.getLogger("tiers").addHandler(logging.StreamHandler(said))
logging.getLogger("tiers").setLevel(logging.INFO)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (45 * page, 45 * page))
if os.geteuid() == 0:
    os.setuid(65534)  # who may lock any amount is under no limit
mapped, found = Mapped(path / "file"), []
for pages in (3, 80, 80, 90):
    mapped.hold(pages * page)
    (row,) = re.findall("^VmLck:\\s+([0-9]+) kB$", Path("/proc/self/status").read_text(), re.M)
    found.append(int(row) * 1024 // page)
assert found == [3, 45, 45, 45], found
assert said.getvalue().count("RLIMIT_MEMLOCK") == 1, said.getvalue()
"""


def test_of_memory_that_may_not_all_be_locked_a_part_is(tmp_path: Path) -> None:
    run_code(LIMITED, tmp_path)


@contextmanager
def commits_fail(path: Path) -> Iterator[None]:
    """By an error of the device in their end, which is synced, and so has a handle of its own."""
    (handle,) = (
        one for one in handles_of(path, "index.mdb") if fcntl.fcntl(one, fcntl.F_GETFL) & os.O_DSYNC
    )
    kept, broken = os.dup(handle), os.open("/dev/full", os.O_RDWR)
    os.dup2(broken, handle)
    yield
    os.dup2(kept, handle)
    os.close(kept)
    os.close(broken)


@pytest.mark.fault
def test_an_index_that_lmdb_gave_up_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MODE, "buffered sync")
    monkeypatch.setattr(upkeep, "EVERY_S", 0.02)
    with opened(tmp_path) as store, opened(tmp_path) as scheduler:
        put(store, keys(0, 1))
        with commits_fail(tmp_path), pytest.raises(TierFull):
            put(store, keys(2))
        end = time.monotonic() + WAIT_S
        while "opened anew" not in caplog.text and time.monotonic() < end:
            with suppress(TierUnavailable):
                get(scheduler, keys(0))
        assert get(store, keys(0, 1, 2)) == [True, True, False]
        assert put(store, keys(2, 3)) == [True, True]
        assert scheduler.peek(keys(0, 1, 2, 3, 4)) == [True, True, True, True, False]
        assert get(scheduler, keys(0, 1, 2, 3)) == [True] * 4
        audit(store)


@pytest.mark.fault
def test_a_table_that_could_not_be_made_then_is_made_once_the_index_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else an engine whose device failed as it started would look up behind its steps for ever."""
    monkeypatch.setenv(MODE, "buffered sync")
    monkeypatch.setattr(fingerprint_index, "_KEY_BATCH", 2)  # no table is made at once
    making, over = threading.Event(), threading.Event()
    original = FingerprintTable.add

    def add(table: FingerprintTable, some: bytes) -> None:
        making.set()
        assert over.wait(WAIT_S)
        original(table, some)

    monkeypatch.setattr(FingerprintTable, "add", add)
    with opened(tmp_path) as store:
        put(store, keys(*range(6)))
        assert capability(store, LocalIndex) is None
        assert making.wait(WAIT_S)
        with commits_fail(tmp_path), pytest.raises(TierFull):
            put(store, keys(6))
        with suppress(TierUnavailable):
            store.has(keys(0))
        over.set()
        wait_for(lambda: "opened anew" in caplog.text)
        wait_for(lambda: capability(store, LocalIndex) is not None)
        assert store.peek(keys(0, 5, 6)) == [True, True, False]


class Stall:
    """Reads or writes of slabs that wait until they are let go."""

    def __init__(self, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()
        original = getattr(Slab, verb)

        def stalled(*args: object) -> object:
            self.begun.set()
            assert self.over.wait(WAIT_S)
            return original(*args)

        self._patch = monkeypatch
        monkeypatch.setattr(Slab, verb, stalled)

    def only_those_begun(self) -> None:
        """Let new reads and writes through; those that wait go on waiting."""
        self._patch.undo()


@pytest.mark.fault
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_slow_disk_holds_up_no_lookup(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store, opened(tmp_path) as scheduler, ThreadPoolExecutor(1) as aside:
        put(store, keys(0, 1, 2))
        stall = Stall(verb, monkeypatch)
        slow = aside.submit(get if verb == "read" else put, store, keys(1 if verb == "read" else 3))
        assert stall.begun.wait(WAIT_S)
        stall.only_those_begun()
        assert scheduler.peek(keys(0, 1, 2, 3)) == [True, True, True, False]
        scheduler.touch(keys(0))
        assert scheduler.usage().blocks == 3
        assert get(store, keys(0, 2)) == [True, True]
        assert put(store, keys(5)) == [True]
        scheduler.close()
        stall.over.set()
        assert slow.result(WAIT_S) == [True]
        audit(store)


def reads_fail(monkeypatch: pytest.MonkeyPatch, slots: set[int], error: int) -> None:
    """Let the device refuse to read these slots."""
    original = Slab.read

    def read(self: Slab, number: int, payloads: Sequence[memoryview]) -> list[tuple[bytes, bytes]]:
        if slots & {*range(number, number + len(payloads))}:
            raise OSError(error, os.strerror(error))
        return original(self, number, payloads)

    monkeypatch.setattr(Slab, "read", read)


@pytest.mark.fault
@pytest.mark.parametrize("error", [errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EUCLEAN])
def test_a_block_on_a_bad_sector_goes(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2, 3))
        with monkeypatch.context() as patch:
            reads_fail(patch, {1, 3}, error)
            assert get(store, keys(0, 1, 2)) == [True, False, True]
            assert store.has(keys(0, 1, 2, 3)) == [True, False, True, True]
            with pytest.raises(TierUnavailable):  # or the device: the guard leaves it alone
                get(store, keys(3))
            assert store.has(keys(0, 1, 2, 3)) == [True, False, True, False]
        assert store.damaged() == 2
        audit(store)
        assert put(store, keys(0, 1, 2, 3)) == [True] * 4
        assert get(store, keys(0, 1, 2, 3)) == [True] * 4


def test_what_is_whole_is_served_while_what_is_damaged_can_t_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
        with monkeypatch.context() as patch:
            reads_fail(patch, {1}, errno.EIO)
            patch.setattr(Index, "_try_alone", lambda index: False)  # another process is stopped
            patch.setattr(folder_of(store).index, "wait", 0.0)
            assert get(store, keys(0, 1, 2)) == get(store, keys(0, 1, 2)) == [True, False, True]
            assert (store.damaged(), store.has(keys(1))) == (0, [True])
            assert sum("can't be dropped" in line for line in caplog.messages) == 1
        reads_fail(monkeypatch, {1}, errno.EIO)
        assert get(store, keys(0, 1)) == [True, False]
        assert (store.damaged(), store.has(keys(1))) == (1, [False])


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT])
def test_an_error_that_may_pass_drops_no_block(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1))
        with monkeypatch.context() as patch:
            reads_fail(patch, {1}, error)
            assert get(store, keys(0, 1)) == [True, False]
        assert get(store, keys(0, 1)) == [True, True]
        assert store.damaged() == 0


@pytest.mark.fault
def test_a_load_overtaken_by_an_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, slots=4) as store, ThreadPoolExecutor(1) as aside:
        put(store, keys(0, 1, 2, 3))
        stall = Stall("read", monkeypatch)
        slow = aside.submit(get, store, keys(0))
        assert stall.begun.wait(WAIT_S)
        stall.only_those_begun()
        assert all(put(store, keys(10, 11, 12, 13)))
        stall.over.set()
        assert slow.result(WAIT_S) == [False]
        assert get(store, keys(10, 11, 12, 13)) == [True] * 4
        audit(store)


@pytest.mark.fault
def test_a_load_that_was_refused_threads_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
        stall, threads = Stall("read", monkeypatch), folder_of(store).threads
        submit, taken = threads.submit, list[Future[None]]()

        def one_is_taken(run: Callable[[], None]) -> Future[None]:
            if taken:
                threading.Timer(0.1, stall.over.set).start()
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            taken.append(submit(run))
            return taken[0]

        monkeypatch.setattr(threads, "submit", one_is_taken)
        memory = Memory(keys(0, 1, 2), PAYLOAD)
        with pytest.raises(RuntimeError, match="new futures"):
            store.get(memory.blocks)
        then = [bytes(block.payload) for block in memory.blocks]
        taken[0].result(WAIT_S)
        assert [bytes(block.payload) for block in memory.blocks] == then


@pytest.mark.fault
def test_what_an_edit_that_failed_had_claimed_is_left_to_who_has_it_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be freed under that one's write, and the index found damaged."""
    save, write = Edit.save_state, Slab.write
    begun: list[Future[list[bool]]] = []
    is_writing, may_write = threading.Event(), threading.Event()

    def fails(edit: Edit) -> None:
        monkeypatch.setattr(Edit, "save_state", save)
        raise lmdb.DiskError("no space")

    def waits(*args: Any) -> None:
        is_writing.set()
        assert may_write.wait(WAIT_S)
        write(*args)

    class Late(deque[Slot]):
        def extend(self, slots: Iterable[Slot]) -> None:
            if not begun:
                begun.append(threads.submit(put, store, keys(2)))
                assert is_writing.wait(WAIT_S)
            super().extend(slots)

    with opened(tmp_path) as store, ThreadPoolExecutor(1) as threads:
        folder = folder_of(store)
        with folder.upkeep.held_back():
            folder._leaked = Late()
            monkeypatch.setattr(Slab, "write", waits)
            monkeypatch.setattr(Edit, "save_state", fails)
            with pytest.raises(TierFull):
                put(store, keys(1))
        may_write.set()
        assert begun[0].result() == [True]
        audit(store)


@pytest.mark.fault
def test_what_a_commit_that_failed_has_reserved_all_the_same_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB takes a commit back whose last write failed, unless the device fails at that, too: a
    tier of 8 blocks would keep 5 until its process ends."""
    edit = Index.edit

    @contextmanager
    def takes_effect_and_fails(index: Index, owner: bytes) -> Iterator[Edit]:
        with edit(index, owner) as one:
            yield one
        monkeypatch.setattr(Index, "edit", edit)
        raise lmdb.Error(f"mdb_txn_commit: {os.strerror(errno.EIO)}")

    with opened(tmp_path) as store:
        put(store, keys(0, 1))
        with folder_of(store).upkeep.held_back():
            monkeypatch.setattr(Index, "edit", takes_effect_and_fails)
            with pytest.raises(TierUnavailable):
                put(store, keys(2, 3, 4))
        assert store.usage().used == 5 * SLOT
        assert put(store, keys(*range(10, 18))) == [True] * 8
        audit(store)


@pytest.mark.fault
def test_a_close_waits_for_no_hung_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk(tmp_path)
    put(store, keys(0))
    stall = Stall("read", monkeypatch)
    with ThreadPoolExecutor(1) as aside:
        slow = aside.submit(store.get, Memory(keys(0), PAYLOAD).blocks)
        assert stall.begun.wait(WAIT_S)
        store.close()
        stall.over.set()
        assert slow.result(WAIT_S) == [True]
    assert (tmp_path / "index.seal").exists()


@pytest.mark.fault
def test_locks_that_can_not_be_freed_end_with_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open that failed for that would leave the folder open, to nobody's use, in this process.
    Asked for as a file system outside of the kernel may answer it."""
    with opened(tmp_path) as store:
        put(store, keys(0))
    flock = fcntl.flock

    def fails(handle: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            raise OSError(errno.EIO, "Input/output error")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", fails)
    for _ in range(2):
        with opened(tmp_path) as store:
            assert get(store, keys(0)) == [True]
        assert not handles_of(tmp_path, "*")
