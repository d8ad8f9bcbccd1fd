"""A folder whose processes come and go at once: none holds the others up for longer than a moment;
and the file systems that it may lie on."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest

from spec.offloading import StoreContext
from tests.disk.audit import (
    MODE,
    PAYLOAD,
    SLOT,
    Other,
    audit,
    fill_index,
    folder_of,
    get,
    image_made,
    key,
    keys,
    open_disk,
    opened,
    put,
    put_row,
    refused,
    run_code,
    run_mounted,
    say_mounted,
    settled,
)
from tests.support.clock import wait_for
from tiers import paths
from tiers.disk.folder import clean_close, folder
from tiers.disk.folder.folder import Folder
from tiers.disk.index.edit import index_key
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnusable
from tiers.testing import Memory
from tiers.wrappers import reopening
from tiers.wrappers.opening import open_guarded


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.5)


STOPPING = """
store = open_disk(path)
put(store, keys(0))
say("open")
wait()
with folder_of(store).edit():
    say("edits")
    os.kill(os.getpid(), signal.SIGSTOP)
store.close()
"""

SERVING = """
store = open_disk(path)
say("open")
wait()
try:
    put(store, keys(1))
except TierUnavailable:
    say(get(store, keys(0)))
wait()
store.close()
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[Other, Other]]:
    """Two others on the folder: one is stopped inside an edit, one serves."""
    others = Other(STOPPING, tmp_path), Other(SERVING, tmp_path)
    try:
        assert [other.hear() for other in others] == ["open"] * 2
        others[0].tell()
        assert others[0].hear() == "edits"
        yield others
    finally:
        for other in others:
            other.kill()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that did not open is tried again soon."""
    monkeypatch.setattr(reopening, "RETRY_AFTER", 0.1)


@pytest.mark.fault
@pytest.mark.usefixtures("soon")
def test_a_process_that_is_stopped_in_an_edit(tmp_path: Path, stopped: tuple[Other, Other]) -> None:
    """Each step hung for as long as the process was stopped."""
    peer, serving = stopped
    run_code(STARTING, tmp_path, timeout=40)
    serving.tell()
    assert serving.hear() == "[True]"
    serving.end(40)
    guarded = open_guarded(DiskSpec(path=tmp_path, capacity=8 * SLOT), StoreContext(60_000))
    assert guarded.has(keys(0)) == [False]
    peer.go_on()
    peer.end()
    while guarded.has(keys(0)) == [False]:  # as soon as it is tried again
        time.sleep(0.01)
    guarded.close()
    with opened(tmp_path) as store:
        assert put(store, keys(1)) == [True]
        audit(store)


STARTING = """
try:
    open_disk(path)
except TierNotOpen as error:
    assert "lslocks" in str(error)
else:
    sys.exit("it has opened")
"""


CHECKING = """
from tiers.disk.folder import clean_close
digest = clean_close.compute
def slow(index):
    say("digests")
    wait()
    return digest(index)
clean_close.compute = slow
"""


@pytest.mark.fault
def test_the_folder_is_not_locked_while_its_index_is_checked(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    code = "store = open_disk(path); say(get(store, keys(0))); wait(); store.close()"
    first = Other(CHECKING + code, tmp_path)
    assert first.hear() == "digests"
    with Folder(tmp_path).locked():
        pass
    with pytest.raises(TierNotOpen, match="has been checking the tier's index"):
        open_disk(tmp_path)
    first.tell()
    assert first.hear() == "[True]"
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]
    first.tell()
    assert first.hear() == "digests"
    first.end()
    assert (tmp_path / "index.seal").exists()


STOPPED_CHECKING = """
from tiers.disk.folder import clean_close
digest = clean_close.compute
def stops(index):
    clean_close.compute = digest
    say("digests")
    os.kill(os.getpid(), signal.SIGSTOP)
    return digest(index)
clean_close.compute = stops
open_disk(path).close()
"""


@pytest.mark.fault
@pytest.mark.usefixtures("soon")
def test_a_process_that_is_stopped_while_it_checks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    peer = Other(STOPPED_CHECKING, tmp_path)
    try:
        assert peer.hear() == "digests"
        caplog.set_level(logging.INFO)
        guarded = open_guarded(DiskSpec(path=tmp_path, capacity=8 * SLOT), StoreContext(60_000))
        assert "has been checking the tier's index" in caplog.text, "else a start waits longer"
        assert guarded.has(keys(0)) == [False]
        guarded.close()
        guarded = open_guarded(DiskSpec(path=tmp_path, capacity=8 * SLOT), StoreContext(60_000))
        peer.go_on()
        peer.end()
        while guarded.has(keys(0)) == [False]:
            time.sleep(0.01)
        guarded.close()
    finally:
        peer.kill()


def test_another_folder_opens_while_one_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiers of one chain."""
    begun, over = threading.Event(), threading.Event()
    original = clean_close.compute

    def slow(index: Path) -> bytes:
        begun.set()
        assert over.wait(60)
        return original(index)

    with opened(tmp_path / "large"):
        pass
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as threads:
        patched.setattr(clean_close, "compute", slow)
        large = threads.submit(open_disk, tmp_path / "large")
        assert begun.wait(60)
        with ThreadPoolExecutor(1) as others:
            small = others.submit(open_disk, tmp_path / "small")
            try:
                assert put(small.result(20), keys(0)) == [True]
            finally:
                over.set()
            small.result().close()
        large.result().close()


def test_a_checker_that_dies_leaves_the_check_to_the_next(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    first = Other(CHECKING + "open_disk(path)", tmp_path)
    assert first.hear() == "digests"
    first.kill()
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]


@pytest.mark.parametrize("stays", [True, False])
def test_a_tier_opens_while_the_last_one_out_seals_it(tmp_path: Path, stays: bool) -> None:
    """What came in meanwhile is never under the seal of what was there before."""
    last = Other(CHECKING + "store = open_disk(path); put(store, keys(0)); store.close()", tmp_path)
    assert last.hear() == "digests"
    store = open_disk(tmp_path)
    assert get(store, keys(0)) == [True]
    put(store, keys(1))
    if not stays:
        store.close()
        last.tell()
        assert last.hear() == "digests", "of what is there now"
    last.end()
    assert (tmp_path / "index.seal").exists() == (not stays)
    store.close()
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1)) == [True, True]
        audit(store)


def test_somebody_comes_and_goes_while_the_index_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked is not what is there once the lock is had: it is checked again."""
    with opened(tmp_path) as store:
        put(store, keys(0))
    original, calls = clean_close.compute, 0

    def meanwhile(index: Path) -> bytes:
        nonlocal calls
        calls += 1
        found = original(index)
        if calls == 1:
            with (tmp_path / "index.mdb").open("ab") as file:
                file.write(bytes(4096))
            (tmp_path / "index.seal").write_bytes(original(index))
        return found

    monkeypatch.setattr(clean_close, "compute", meanwhile)
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]
        assert calls == 2


CROWD = """
from tiers.disk.folder import folder
from tiers.disk.spec import DiskSpec
from spec.offloading import StoreContext
from tiers.errors import TierNotOpen, TierUnusable
import time
folder.LOCK_SECONDS = 1.0
me, count = int(args[1]), int(args[2])
spec = DiskSpec(path=path, capacity=count * 8192)
store = None
while store is None:
    try:
        store = spec.open(StoreContext(4096))
    except TierNotOpen:  # as the engine does
        time.sleep(0.1)
mine = [b"namespace-of-me%dxyz" % me + bytes(8)]
assert put(store, mine, 4096) == [True]
assert get(store, mine, 4096) == [True]
say("open")
wait()
store.close()
"""


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.fault
def test_nine_processes_open_at_once(tmp_path: Path) -> None:
    count = 40_000
    fill_index(tmp_path, count)
    crowd = [Other(CROWD, tmp_path, n, count // 2) for n in range(9)]
    assert [one.hear() for one in crowd] == ["open"] * 9
    spec = DiskSpec(path=tmp_path, capacity=count // 2 * 8192)
    store = settled(spec.open(StoreContext(4096)))
    assert store.usage().blocks == count // 2
    newest = [key(n) for n in range(count // 2 + 9, count)]
    assert all(store.has(newest))
    for one in crowd:
        one.end()
    audit(store)
    store.close()
    assert os.listdir(tmp_path / "owners") == []
    assert (tmp_path / "index.seal").exists()


def test_what_the_dead_had_reserved_is_freed_once(tmp_path: Path) -> None:
    """Two processes that open at once find the same slots; by then they may be somebody's again."""
    dead = Other("store = open_disk(path)\n" + RESERVING, tmp_path)
    assert dead.hear() == "reserved"
    (file,) = (tmp_path / "owners").iterdir()
    owner = bytes.fromhex(file.name.split(".")[1])
    dead.kill()
    with opened(tmp_path) as store:
        assert store.usage().used == 0
        reserved = folder_of(store).reserve({key(n): SLOT for n in range(2)})
        stale = [(slot, owner) for slot in reserved.slots.values()]
        assert folder_of(store).reclaim(stale) == 0
        assert store.usage().used == 2 * SLOT
        audit(store)


RESERVING = """
folder_of(store).reserve({key(n): SLOT for n in range(2)})
say("reserved")
wait()
"""


@pytest.mark.fault
def test_files_of_a_wiped_tier_go_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    (tmp_path / "index.seal").write_bytes(b"another")
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "remove_gone", lambda self: None)
        with opened(tmp_path) as store:
            assert get(store, keys(0)) == [False]
            put(store, keys(1))
    assert len(list(tmp_path.glob("slab-*.gone"))) == 1
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1)) == [False, True]
        assert list(tmp_path.glob("*.gone")) == []


def test_damage_that_shows_after_the_lock_is_let_go(tmp_path: Path) -> None:
    """In what opening reads last: the tier starts empty, as where it shows at once."""
    before = set(threading.enumerate())
    with opened(tmp_path) as store:
        put(store, keys(0, 1))
        put_row(tmp_path, "free", b"no slot", b"")
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [False]
        assert put(store, keys(0)) == [True]
        audit(store)
        wait_for(lambda: len(tables_but(before)) == 1)


@pytest.mark.fault
@pytest.mark.usefixtures("soon")
def test_a_tier_whose_index_is_damaged_joins_again_without_a_restart(tmp_path: Path) -> None:
    guarded = open_guarded(DiskSpec(path=tmp_path, capacity=8 * SLOT), StoreContext(PAYLOAD))
    some, other = Memory(keys(0, 1), PAYLOAD).fill(), Memory(keys(2), PAYLOAD).fill()
    assert guarded.put(some.blocks) == [True, True]
    put_row(tmp_path, "blocks", index_key(key(1)), b"a row of another length")
    assert guarded.get(some.blocks) == [False, False]
    wait_for(lambda: guarded.put(other.blocks) == [True])
    wait_for(lambda: guarded.has(keys(0, 1, 2)) == [False, False, True])
    guarded.close()
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1, 2)) == [False, False, True]
        audit(store)


def tables_but(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that make tables, without those of before; one that has no work ends soon."""
    return [one for one in threading.enumerate() if "disk-table" in one.name and one not in before]


SHARED = ["nfs", "nfs4", "cifs", "ceph", "lustre", "9p", "virtiofs", "fuse", "fuse.s3fs"]


@pytest.mark.fault
@pytest.mark.parametrize("kind", SHARED)
def test_a_network_file_system(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say_mounted(kind, monkeypatch, tmp_path)
    refused(tmp_path / "not" / "yet", rf"file system of type {kind}, .*a tier of type redis")
    assert not (tmp_path / "not").exists()
    with pytest.raises(TierUnusable) as caught:
        open_disk(tmp_path)
    assert not isinstance(caught.value, TierNotOpen), "trying again won't help"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "release"),
    [("bcachefs", "6.18.1"), ("nilfs2", "6.18.1"), ("btrfs", "6.8.0-60-generic")],
)
def test_a_file_system_that_kills_where_it_is_full(
    tmp_path: Path, kind: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_mounted(kind, monkeypatch, tmp_path)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    refused(tmp_path / "not", rf"is on {kind}, which kills .* Btrfs with Linux 6.16")
    assert not (tmp_path / "not").exists()


IN_PLACE = """
import subprocess
from contextlib import suppress
from tiers.errors import TierError, TierUnusable
mount = path / "mount"
mount.mkdir()
subprocess.run(["mount", "-o", "loop,compress-force=zstd", path / "image", mount], check=True)
tier = mount / "tier"

def write():
    store = open_disk(tier, slots=200)
    for round in range(20):
        for n in range(0, 200, 10):
            try:
                put(store, keys(*range(n, n + 10)))
            except TierError as error:
                assert "pace" in str(error), error
        get(store, keys(*range(200)))
        if round in (0, 9):
            with open(mount / "other", "wb") as other, suppress(OSError):
                while round == 0:
                    other.write(os.urandom(1 << 20))
        os.sync()
    assert get(store, keys(*range(190, 200))) == [True] * 10
    audit(store)
    store.close()

write()
subprocess.run(["chattr", "-R", "-C", tier], check=True)
(tier / "index.mdb-lock").unlink()
(tier / "index.mdb-lock").touch(0o600)
try:
    open_disk(tier)
except TierUnusable as error:
    assert "index.mdb-lock is not marked" in str(error), error
else:
    raise SystemExit("opened")
(tier / "index.mdb-lock").unlink()
write()
"""


@pytest.mark.fault
def test_a_file_system_that_copies_what_is_written_fills(tmp_path: Path) -> None:
    """Where Btrfs can't copy a page of LMDB's lock file, the kernel kills who writes it."""
    run_mounted(image_made(tmp_path, "btrfs", "128M"), IN_PLACE, tmp_path)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", "x"])
def test_a_file_system_of_this_host(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_mounted(kind, monkeypatch, tmp_path)
    with opened(tmp_path / "tier") as store:
        assert put(store, keys(0)) == [True]


def test_where_the_kernel_tells_no_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in ("", "garbage\n1 2 3\n - \n", None):
        if rows is not None:
            (tmp_path / "mountinfo").write_text(rows)
        monkeypatch.setattr(
            paths, "_MOUNTS", tmp_path / ("mountinfo" if rows is not None else "none")
        )
        assert paths.mount_of(tmp_path) == ("", "", "")
        with opened(tmp_path / "tier") as store:
            assert put(store, keys(0)) == [True]


REAL = """
import io, logging
from tiers.disk.folder import open_folders
from tiers.paths import mount_of
from tiers.errors import TierNotOpen
assert mount_of(path / "a b" / "not yet").kind == "tmpfs"
said = io.StringIO()
logging.getLogger("tiers").addHandler(logging.StreamHandler(said))
logging.getLogger("tiers").setLevel(logging.INFO)
files = open_folders._open_files
def refuse(*args):
    raise TierNotOpen("for now")
open_folders._open_files = refuse
for _ in range(2):  # as an engine tries again
    try:
        open_disk(path / "a b" / "tier")
    except TierNotOpen:
        pass
open_folders._open_files = files
store = open_disk(path / "a b" / "tier")
put(store, keys(0))
store.close()
assert said.getvalue().count("is on tmpfs, so its blocks take memory") == 1
"""


@pytest.mark.parametrize("bound", [False, True])
def test_the_type_of_a_real_mount(tmp_path: Path, bound: bool) -> None:
    (tmp_path / "a b").mkdir()
    where = f'"{tmp_path}/a b"'
    mount = f"mount -t tmpfs -o size=20m,mode=700 none {where}"
    if bound:  # the one that lies over the other counts
        (tmp_path / "below").mkdir()
        mount = (
            f'mount -t tmpfs -o size=20m,mode=700 none "{tmp_path}/below" && '
            f'mount --bind "{tmp_path}/below" {where}'
        )
    run_mounted(mount, REAL, tmp_path)


def test_files_that_another_process_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the digest, which goes when the tier is opened."""
    with opened(tmp_path):
        pass
    found = os.path.lexists

    def lexists(path: Path) -> bool:
        is_there = found(path)
        if path.name == "index.seal":
            path.unlink(missing_ok=True)
        return is_there

    monkeypatch.setattr(os.path, "lexists", lexists)
    with opened(tmp_path) as store:
        assert put(store, keys(0)) == [True]


def test_a_folder_that_can_not_be_looked_at_is_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As others remove it meanwhile, or its device fails: whoever opens it gets a tier's error."""

    def fails(folder: Folder) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Folder, "_files", fails)
    refused(tmp_path, "No such file or directory")


def test_how_a_folder_is_read_is_said_once_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again for ever, as where address space for the index can't be had."""

    def fails(*_: object, **__: object) -> None:
        raise lmdb.MemoryError("Cannot allocate memory")

    caplog.set_level(logging.INFO)
    monkeypatch.setenv(MODE, "auto none")
    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", fails)
        refused(tmp_path, "Cannot allocate memory")
    assert "io is" not in caplog.text
    with opened(tmp_path):
        assert caplog.text.count("io is") == 1
