"""A directory of packs: whole files that nobody replaces, and what its file system can do to it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.disk.audit import run_mounted
from tests.support.clock import wait_for
from tiers import paths
from tiers.errors import (
    TierError,
    TierFull,
    TierNotOpen,
    TierRefused,
    TierUnavailable,
    TierUnusable,
)
from tiers.remote.packs.pack import INDEX_BYTES, name_of
from tiers.remote.packs.pack_store import PackStore
from tiers.remote.shared.directory_bucket import DirectoryBucket
from tiers.remote.shared.examine import examine
from tiers.remote.shared.files import TEMPORARY
from tiers.store import TierStore
from tiers.testing import Memory, make_key
from tiers.wrappers.guard import Guarded

PAYLOAD = 4096
NAME = name_of(bytes(20))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir(0o700)
    return path


@contextmanager
def opened(place: Path, threads: int = 4) -> Iterator[PackStore]:
    """A store without upkeep, whose calls would fail in place of ours."""
    store = PackStore(DirectoryBucket(place), PAYLOAD, timeout=10, connections=threads)
    try:
        yield store
    finally:
        store.close()


def put(store: TierStore, *keys: bytes) -> list[bool]:
    return store.put(Memory(keys, PAYLOAD).fill().blocks)


def get(store: TierStore, *keys: bytes) -> list[bool]:
    """Load; every hit must be what was stored."""
    memory = Memory(keys, PAYLOAD)
    hits = store.get(memory.blocks)
    assert all(memory.holds(index) for index, hit in enumerate(hits) if hit)
    return hits


def files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def _threads() -> int:
    """Threads of this process, without those that wait to log."""
    return sum(not isinstance(thread, threading.Timer) for thread in threading.enumerate())


def fail(monkeypatch: pytest.MonkeyPatch, call: str, *numbers: int) -> list[int]:
    """Let the next calls of `os` fail with these; what is left to fail."""
    left, real = list(numbers), getattr(os, call)

    def failing(*args: Any, **more: Any) -> Any:
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    monkeypatch.setattr(os, call, failing)
    return left


# ---- files


def test_reads_of_any_range_fill_views_of_any_length(place: Path) -> None:
    bucket, data = DirectoryBucket(place), bytes(range(256)) * 64
    assert bucket.put(NAME, [data[:100], memoryview(data)[100:101], b"", data[101:]])
    for start, lengths in ((0, [16384]), (5, [1, 0, 7, 4096]), (16000, [300, 300]), (20000, [8])):
        views = [memoryview(bytearray(length)) for length in lengths]
        expected = data[start : start + sum(lengths)]
        assert bucket.read(NAME, start, views) == len(expected)
        assert b"".join(views)[: len(expected)] == expected
    assert bucket.read(name_of(make_key()), 0, [memoryview(bytearray(8))]) is None


def test_a_call_that_moves_few_bytes_is_gone_on_with(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems may read and write less than they are asked for."""
    bucket, data = DirectoryBucket(place), os.urandom(3000)
    write, read = os.writev, os.preadv

    def writev(handle: int, views: Sequence[memoryview]) -> int:
        return write(handle, [views[0][:700]])

    def preadv(handle: int, views: Sequence[memoryview], at: int) -> int:
        return read(handle, [views[0][:700]], at)

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "preadv", preadv)
    assert bucket.put(NAME, [data[:1000], data[1000:]])
    into = bytearray(3000)
    views = [memoryview(into)[:1500], memoryview(into)[1500:]]
    assert bucket.read(NAME, 0, views) == 3000 and into == data


def test_a_listing_has_packs_alone(place: Path) -> None:
    bucket = DirectoryBucket(place)
    keys = [make_key() for _ in range(5)]
    for number, key in enumerate(keys):
        bucket.put(name_of(key), [bytes(number)])
    folder = place / os.path.dirname(name_of(keys[0]))
    (folder / f"{TEMPORARY}0123").write_bytes(b"x")
    (folder / "notes").write_bytes(b"x")
    (place / "README").write_bytes(b"x")
    found = {name: size for some in bucket.list(_never) for name, size, _ in some}
    assert found == {name_of(key): number for number, key in enumerate(keys)}
    bucket.delete([name_of(keys[1]), name_of(make_key())])
    left = {each.name for some in bucket.list(_never) for each in some}
    assert left == {*map(name_of, keys)} - {name_of(keys[1])}


def _never(error: TierRefused) -> None:
    raise error


def test_a_group_that_has_the_directory_has_its_packs(place: Path) -> None:
    """Whatever the umask of the process that stores: engines of other users read and evict them."""
    place.chmod(0o2770)
    before = os.umask(0o077)
    try:
        DirectoryBucket(place).put(NAME, [b"x"])
    finally:
        os.umask(before)
    pack = place / NAME
    modes = [path.stat().st_mode & 0o7777 for path in (pack, pack.parent, pack.parent.parent)]
    assert modes == [0o660, 0o2770, 0o2770]


def test_a_directory_of_one_user_stays_closed_to_others(place: Path) -> None:
    before = os.umask(0)
    try:
        DirectoryBucket(place).put(NAME, [b"x"])
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in place.rglob("*"))


# ---- writers


@pytest.mark.fault
def test_of_two_writers_of_one_pack_the_first_stays(place: Path) -> None:
    buckets = [DirectoryBucket(place) for _ in range(4)]
    for _ in range(20):
        name, barrier = name_of(make_key()), threading.Barrier(4)

        def write(number: int, name: str = name, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return buckets[number].put(name, [bytes([number]) * 5000])

        with ThreadPoolExecutor(4) as threads:
            stored = list(threads.map(write, range(4)))
        assert sorted(stored) == [False, False, False, True]
        assert (place / name).read_bytes() == bytes([stored.index(True)]) * 5000
        assert len(list((place / name).parent.iterdir())) == 1, "no temporary name is left"


DIES = """
import os, signal, sys
from pathlib import Path
from tiers.remote.shared.directory_bucket import DirectoryBucket

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, sys.argv[3], die)
DirectoryBucket(Path(sys.argv[1])).put(sys.argv[2], [b"half" * 1000])
"""


@pytest.mark.fault
@pytest.mark.parametrize("call", ["fsync", "link", "unlink"])
def test_a_writer_that_dies_leaves_a_whole_pack_or_none(place: Path, call: str) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(place), NAME, call], check=False)
    assert died.returncode == -9
    bucket = DirectoryBucket(place)
    assert (place / NAME).exists() == (call == "unlink")
    if call == "unlink":
        assert (place / NAME).read_bytes() == b"half" * 1000
    assert bucket.put(NAME, [b"whole"]) == (call != "unlink")
    assert sum(len(some) for some in bucket.list(_never)) == 1


# ---- the file system


@pytest.mark.fault
def test_what_another_host_removed_is_opened_again_or_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key()
    with opened(place) as store:
        assert put(store, key) == [True]
        left = fail(monkeypatch, "preadv", errno.ESTALE)
        assert get(store, key) == [True] and not left
        left = fail(monkeypatch, "open", errno.ESTALE, errno.ENOENT)
        assert store.has([key]) == [False] and not left
        # On GlusterFS, where two hosts remove and store one pack at once.
        left = fail(monkeypatch, "open", *[errno.ESTALE] * 2)
        assert store.has([key]) == [False] and not left
        assert store.has([key]) == [True]
        fail(monkeypatch, "open", *[errno.ESTALE] * 2)
        fail(monkeypatch, "stat", errno.ESTALE)  # of the directory itself
        with pytest.raises(TierUnavailable, match="shared: Stale"):
            store.has([key])
        fail(monkeypatch, "unlink", errno.ESTALE)
        store.drop([key])


@pytest.mark.fault
def test_a_folder_that_another_host_removed_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(place) as store:
        key = make_key()
        put(store, key)
        shutil.rmtree(place / name_of(key).partition("/")[0])
        assert put(store, key) == [True] and get(store, key) == [True]
    fail(monkeypatch, "open", errno.ESTALE)
    assert DirectoryBucket(place).put(NAME, [b"x"])


@pytest.mark.fault
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_directory_that_fails_is_a_miss_and_serves_when_it_works(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    key = make_key()
    with opened(place) as store:
        put(store, key)
        guarded = Guarded(store, "shared", retry_after=1e-6)
        fail(monkeypatch, call, errno.EIO)
        assert get(guarded, key) == [False]
        assert guarded.failures.by_kind() == {"TierUnavailable": 1}
        wait_for(lambda: get(guarded, key) == [True])


@pytest.mark.fault
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "writev", "fsync", "close", "link"])
def test_a_write_that_fails_stores_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """An NFS says at the sync or the close what it could not write."""
    keys = make_key(), make_key()
    with opened(place) as store:
        put(store, keys[0])
        fail(monkeypatch, call, number)
        with pytest.raises(TierUnavailable):
            DirectoryBucket(place).put(name_of(keys[1]), [b"x"])
        assert len(files(place)) == 1
        assert put(store, keys[1]) == [True] and get(store, *keys) == [True, True]


@pytest.mark.fault
@pytest.mark.parametrize("call", ["open", "writev", "fsync", "close"])
def test_a_quota_that_is_reached_is_no_failure(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    bucket = DirectoryBucket(place)
    for number in (errno.EDQUOT, errno.ENOSPC):
        fail(monkeypatch, call, number)
        with pytest.raises(TierFull):
            bucket.put(NAME, [b"x"])
    assert not files(place) and bucket.put(NAME, [b"x"])


FULL = """
import sys
from pathlib import Path
from tests.remote.shared.test_directory_bucket import *

place = Path(sys.argv[1])
with opened(place) as store:
    keys = []
    while True:
        key = make_key()
        try:
            assert put(store, key) == [True]
        except TierFull:
            break
        keys.append(key)
    assert 100 < len(keys) <= 256, len(keys)
    assert len(files(place)) == len(keys)
    assert get(store, *keys) == [True] * len(keys)
    store.drop(keys[:50])
    assert put(store, key) == [True] and get(store, key) == [True]
"""


@pytest.mark.fault
def test_a_shared_directory_that_fills_and_empties(tmp_path: Path) -> None:
    run_mounted(f'mount -t tmpfs -o size=2m,mode=700 none "{tmp_path}"', FULL, tmp_path)


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from tests.remote.shared.test_directory_bucket import *

place = Path(sys.argv[1])
keys = [make_key() for _ in range(4)]
with opened(place) as store:
    assert put(store, *keys) == [True] * 4
    for key, at in ((keys[2], 0), (keys[3], INDEX_BYTES)):  # an index, and a record
        data = bytearray((place / name_of(key)).read_bytes())
        data[at] ^= 1
        (place / name_of(key)).write_bytes(data)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    for some in (store, PackStore(DirectoryBucket(place), PAYLOAD, timeout=10, connections=2)):
        assert some.has(keys) == [True, True, False, True]
        assert get(some, *keys) == [True, True, True, False]
        try:
            put(some, make_key())
        except TierUnavailable as error:
            assert "Read-only" in str(error), error
        else:
            raise SystemExit("stored")
    subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
    assert get(store, keys[3]) == [False] and len(files(place)) == 3
    assert put(store, *keys) == [True] * 4 and get(store, *keys) == [True] * 4
"""


@pytest.mark.fault
def test_a_shared_directory_that_turns_read_only(tmp_path: Path) -> None:
    run_mounted(f'mount -t tmpfs -o size=2m,mode=700 none "{tmp_path}"', READ_ONLY, tmp_path)


@pytest.mark.fault
def test_a_shared_directory_that_hangs_keeps_its_threads_and_no_more(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, let_go, asked = make_key(), threading.Event(), threading.Event()
    real = os.preadv

    def hang(*args: Any) -> int:
        asked.set()
        let_go.wait()
        return real(*args)

    with opened(place, threads=2) as store:
        put(store, key)
        now = [0.0]
        guarded = Guarded(store, "shared", deadline=5, clock=lambda: now[0])
        monkeypatch.setattr(os, "preadv", hang)
        hung = threading.Thread(target=get, args=(guarded, key))
        hung.start()
        asked.wait()
        before = _threads()
        for _ in range(20):  # each would hang this test if it were asked
            now[0] += 1000
            assert guarded.has([key]) == get(guarded, key) == [False]
        assert _threads() == before
        let_go.set()
        hung.join()
        now[0] += 1000
        assert get(guarded, key) == [True]


# ---- the directory itself


@pytest.mark.fault
def test_a_directory_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    place = tmp_path / "mount" / "kv"
    with pytest.raises(TierNotOpen, match="is not there; mount"), opened(place):
        pass
    assert not place.parent.exists()
    place.mkdir(0o700, parents=True)
    with opened(place) as store:
        key = make_key()
        assert put(store, key) == [True]
        place.parent.rename(tmp_path / "away")
        assert get(store, key) == [False]
        with pytest.raises(TierNotOpen):
            put(store, key)
        assert not place.parent.exists()
        (tmp_path / "away").rename(place.parent)
        assert get(store, key) == [True]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.chmod(0o777), "mode 0777, so others can write to it; chmod it to 0770"),
        (lambda path: (path.rmdir(), path.write_bytes(b"")), "is a file; name a directory"),
    ],
)
def test_a_directory_that_is_not_the_tiers_own_is_refused(
    place: Path, spoil: Callable[[Path], Any], says: str
) -> None:
    spoil(place)
    with pytest.raises(TierUnusable, match=says), opened(place):
        pass


@pytest.mark.fault
@pytest.mark.parametrize("depth", [1, 2])
def test_a_member_of_the_group_leads_no_pack_elsewhere(
    place: Path, tmp_path: Path, depth: int
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for missing in (False, True):
        folder = Path(*(place / NAME).parts[: len(place.parts) + depth])
        folder.parent.mkdir(0o700, exist_ok=True)
        folder.symlink_to(elsewhere)
        if not missing:
            (elsewhere / NAME).parent.mkdir(parents=True)
        with pytest.raises(TierUnavailable, match=f"{folder} is a link"):
            DirectoryBucket(place).put(NAME, [b"pack"])
        assert not files(elsewhere)
        shutil.rmtree(elsewhere, ignore_errors=True)
        folder.unlink()
        assert DirectoryBucket(place).put(NAME, [b"pack"])
        shutil.rmtree(place / NAME[:32])


@pytest.mark.fault
def test_a_pipe_in_the_place_of_a_pack_holds_up_no_thread(place: Path) -> None:
    bucket = DirectoryBucket(place)
    assert bucket.put(NAME, [b"pack"])
    (place / NAME).unlink()
    os.mkfifo(place / NAME)
    with pytest.raises(TierUnavailable):
        bucket.read(NAME, 0, [memoryview(bytearray(4))])


@pytest.mark.fault
def test_a_pack_that_a_host_has_from_an_nfs_server_here_is_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, into = DirectoryBucket(place), bytearray(4)
    assert bucket.put(NAME, [b"pack"])
    left = fail(monkeypatch, "open", errno.EWOULDBLOCK)
    assert bucket.read(NAME, 0, [memoryview(into)]) == 4
    assert into == b"pack" and not left


@pytest.mark.fault
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EPERM, TierUnusable), (errno.EIO, TierUnavailable)]
)
def test_a_file_system_without_links_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TierError]
) -> None:
    with opened(place) as store:
        fail(monkeypatch, "link", number)
        with pytest.raises(kind, match="makes no hard links"):
            put(store, make_key())
        assert not files(place)


@pytest.mark.fault
@pytest.mark.parametrize("at", [0, INDEX_BYTES, INDEX_BYTES + 1000])
def test_a_damaged_pack_is_a_miss_and_goes(place: Path, at: int) -> None:
    key = make_key()
    with opened(place) as store:
        put(store, key)
        pack = place / name_of(key)
        data = bytearray(pack.read_bytes())
        data[at] ^= 1
        pack.write_bytes(data)
        assert store.has([key]) == [at > 0]
        assert get(store, key) == [False] and not files(place)
        assert put(store, key) == [True] and get(store, key) == [True]


# ---- before the start


def test_damaged_packs_of_one_load_all_go(place: Path) -> None:
    with opened(place) as store:
        keys = [make_key() for _ in range(3)]
        assert put(store, *keys) == [True] * 3
        for path in files(place):
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert get(store, *keys) == [False] * 3
        assert not files(place)


def test_doctor_tries_the_directory_and_leaves_nothing(place: Path) -> None:
    whole = os.statvfs(place).f_blocks * os.statvfs(place).f_frsize
    found = {
        capacity: [(finding.gravity, finding.found) for finding in examine(place, capacity)]
        for capacity in (None, 1 << 20, 2 * whole)
    }
    assert [each[0][0] for each in found.values()] == ["warning", "fine", "warning"]
    assert "nothing is evicted" in found[None][0][1]
    assert "more than its file system has" in found[2 * whole][0][1]
    assert all("a file is found in" in each[-1][1] for each in found.values())
    assert not [*place.iterdir()]
    with pytest.raises(TierNotOpen, match="make the directory once"):
        list(examine(place / "none", None))


@pytest.mark.parametrize(
    ("mounted", "noted"),
    [("nfs4 h:/kv rw,vers=4.2", 1), ("nfs h:/kv rw,lookupcache=pos", 0), ("ext4 /dev/vdb rw", 0)],
)
def test_doctor_names_what_nfs_remembers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: str, noted: int
) -> None:
    rows = Path("/proc/self/mountinfo").read_text()
    (tmp_path / "mountinfo").write_text(re.sub(" - .*", f" - {mounted}", rows))
    monkeypatch.setattr(paths, "_MOUNTS", tmp_path / "mountinfo")
    assert sum("lookupcache=positive" in f.change for f in examine(place, None)) == noted
