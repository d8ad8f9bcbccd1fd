"""What the disk tier says when it can't be used, and how it leaves its folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.disk.audit import (
    SLOT,
    folder_of,
    get,
    keys,
    open_disk,
    opened,
    put,
    refused,
    run_mounted,
)
from tiers.concurrency.file_locks import release, try_lock
from tiers.control.control_server import short_path
from tiers.disk.disk_store import DiskStore
from tiers.disk.folder import upkeep
from tiers.disk.folder.open_folder import OpenFolder
from tiers.disk.folder.open_folders import open_folders
from tiers.disk.index import mapped
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnusable


@pytest.mark.fault
def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("mine")
    refused(tmp_path / "tier", "is a file; name a folder")
    refused(tmp_path / "tier" / "below", "can't be made")
    assert (tmp_path / "tier").read_text() == "mine"


@pytest.mark.fault
def test_a_place_where_nothing_can_be_made() -> None:
    refused(Path("/proc/kvtiers"), "can't be made")
    refused(Path("/sys"), "others|belongs|written")


@pytest.mark.fault
def test_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refused(tmp_path / "link", "symbolic link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "dangling", "symbolic link")
    (tmp_path / "real" / "index.mdb").symlink_to(tmp_path / "victim")
    refused(tmp_path / "real", "index.mdb is a symbolic link")
    assert not (tmp_path / "victim").exists()


@pytest.mark.fault
def test_links_in_place_of_files(tmp_path: Path) -> None:
    with opened(tmp_path / "tier") as store:
        put(store, keys(0))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    names = [file.name for file in (tmp_path / "tier").iterdir() if file.is_file()]
    assert {"index.mdb", "index.mdb-lock", "index.seal", "lock"} < set(names)
    for name in [*names, "index.draft"]:
        file, kept = tmp_path / "tier" / name, tmp_path / "kept"
        if file.exists():
            file.rename(kept)
        file.symlink_to(victim)
        with pytest.raises(TierUnusable, match=f"{name} is a symbolic link"):
            open_disk(tmp_path / "tier")
        file.unlink()
        if kept.exists():
            kept.rename(file)
    assert victim.read_bytes() == b"precious"
    with opened(tmp_path / "tier") as store:
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
@pytest.mark.parametrize("name", ["index.mdb", "index.seal", "slab-65536.dat", "lock"])
def test_files_that_are_not_the_tiers_alone(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    (tmp_path / name).chmod(0o644)
    refused(tmp_path, f"{name} has mode 0644.*chmod it to 0600")
    (tmp_path / name).chmod(0o600)
    if os.geteuid() == 0:
        os.chown(tmp_path / name, 12345, 12345)
        refused(tmp_path, f"{name} is a symbolic link or belongs to another user")
        os.chown(tmp_path / name, 0, 0)
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
def test_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier").chmod(0o777)
    refused(tmp_path / "tier", "mode 0777")


@pytest.mark.fault
def test_a_folder_where_an_engine_listens(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, short_path(tmp_path / "engine-1.sock") as short:
        listener.bind(short)
    refused(tmp_path, "engine-1.sock is an engine's, .*; remove it .* folder of the tier's own")
    assert [file.name for file in tmp_path.iterdir()] == ["engine-1.sock"]


@pytest.mark.fault
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    os.chown(tmp_path / "tier", 12345, 12345)
    refused(tmp_path / "tier", "belongs to user 12345")


def test_a_capacity_below_one_block(tmp_path: Path) -> None:
    refused(tmp_path / "tier", f"set at least {SLOT}B", capacity=SLOT - 1)
    refused(tmp_path / "tier", f"set at least {4 * SLOT}B", capacity=3 * SLOT, shares=4)
    assert not (tmp_path / "tier").exists()
    with opened(tmp_path / "tier") as store:
        put(store, keys(0))
        with pytest.raises(TierUnusable, match=f"set at least {SLOT}B"):
            store.resize(SLOT - 1)
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
def test_a_read_only_mount(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    put(store, keys(0))
    store.close()
    body = """
for where in (path, path / "below"):
    try:
        open_disk(where)
    except TierNotOpen as error:
        assert "Read-only file system" in str(error), error
    else:
        raise SystemExit("opened")
"""
    run_mounted(f'mount --bind -r "{tmp_path}" "{tmp_path}"', body, tmp_path)
    store = open_disk(tmp_path)
    assert get(store, keys(0)) == [True]
    store.close()


@pytest.mark.fault
def test_a_full_file_system(tmp_path: Path) -> None:
    body = """
from contextlib import suppress
store = open_disk(path / "tier", slots=1000)
for n in range(400):
    assert put(store, keys(n)) == [True], n
held = store.usage().blocks
assert 10 < held < 300, held
assert get(store, keys(399, 0)) == [True, False]
audit(store)
with suppress(OSError):  # somebody else takes all that was left
    (path / "other").write_bytes(bytes(7 << 20))
for n in range(400, 500):
    assert put(store, keys(n)) == [True], n
stored = 0
for n in range(300):  # another size must grow: the tier shrinks until the disk has room again
    try:
        stored += put(store, [bytes([n % 256]) * 40], 1000)[0]
    except TierFull:
        audit(store)
assert stored > 50, stored
audit(store)
store.close()
"""
    run_mounted(f'mount -t tmpfs -o size=20m,mode=700 none "{tmp_path}"', body, tmp_path)


@pytest.mark.fault
def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    put(store, keys(0))
    child = os.fork()
    if child == 0:
        refusals = 0
        for verb in (
            lambda: store.peek(keys(0)),
            lambda: get(store, keys(0)),
            lambda: put(store, keys(1)),
            lambda: store.touch(keys(0)),
            lambda: open_disk(tmp_path),
        ):
            try:
                verb()
            except TierUnusable as error:
                refusals += "forked" in str(error)
        store.close()
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert get(store, keys(0)) == [True]
    assert len(list((tmp_path / "owners").iterdir())) == 1
    store.close()


def test_a_folder_that_is_lost_stays_open_for_a_verb_in_flight(tmp_path: Path) -> None:
    """Whichever stores on it were closed before."""
    first, store = open_disk(tmp_path), open_disk(tmp_path)
    first.close()
    folder = folder_of(store)
    with folder.in_use():
        folder._lose("it is gone")
        assert not folder.is_closed
    assert folder.is_closed
    with pytest.raises(TierNotOpen, match="it is gone"):
        store.has(keys(0))
    store.close()


class Overtaken:
    """A folder's lock: who waits for it first is overtaken by others."""

    def __init__(self, others: Callable[[], None]) -> None:
        self.lock, self.others = threading.Lock(), [others]

    def __enter__(self) -> None:
        if self.others:
            self.others.pop()()
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("closes", [False, True])
def test_who_opens_a_folder_as_it_is_closed_keeps_it_open(
    tmp_path: Path, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was closed again before the first one had its lock: then it is closed once."""
    first, later, closed = open_disk(tmp_path), list[DiskStore](), list[OpenFolder]()
    put(first, keys(0, 1))
    close = OpenFolder.close

    def count(folder: OpenFolder) -> None:
        closed.append(folder)
        close(folder)

    def others() -> None:
        later.append(open_disk(tmp_path))
        if closes:
            later[0].close()

    with monkeypatch.context() as patch:
        patch.setattr(OpenFolder, "close", count)
        # One thread closes both: the one inside waits for the other, as for a step that hangs.
        patch.setattr(upkeep, "_CLOSE_WAIT_S", 0.1)
        patch.setitem(open_folders._locks, os.path.realpath(tmp_path), Overtaken(others))
        first.close()
        assert len(closed) == closes
        if not closes:
            assert get(later[0], keys(0, 1)) == [True, True]
            later[0].close()
            assert len(closed) == 1
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1)) == [True, True]


def test_only_the_user_can_read_the_files(tmp_path: Path) -> None:
    store = open_disk(tmp_path / "tier")
    put(store, keys(0))
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "tier").rglob("*")}
    assert modes.pop("owners") == 0o700
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700
    store.close()


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    assert DiskSpec(path=Path("~/kv"), capacity=1).path == Path("/home/someone/kv")
    assert DiskSpec(path=Path("a/../b"), capacity=1).path == tmp_path / "b"


@pytest.mark.parametrize("path", ["", "~nobody-of-that-name/kv", "a\0b", 5])
def test_paths_that_mean_nothing(path: object) -> None:
    with pytest.raises(ValidationError):
        DiskSpec.model_validate({"type": "disk", "capacity": "1GiB", "path": path})


def test_the_spec_needs_no_lmdb() -> None:
    code = "import sys, tiers.disk.spec; raise SystemExit('lmdb' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_large_index_is_read_into_memory_while_others_may_open_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold one of 1.5 GB takes a second, and nobody waits longer for the folder's lock."""
    with opened(tmp_path, slots=400) as store:
        for number in range(0, 400, 50):
            put(store, keys(*range(number, number + 50)))
    held: list[tuple[int, bool]] = []

    def lock_memory(start: int, length: int) -> int:
        handle = os.open(tmp_path / "lock", os.O_RDWR)
        held.append((length, try_lock(handle)))
        release(handle)
        return 0

    monkeypatch.setattr(mapped, "_mlock", lock_memory)
    with opened(tmp_path, slots=400) as store:
        size = (tmp_path / "index.mdb").stat().st_size
        assert sum(length for length, is_free in held if is_free) >= size
        assert sum(length for length, is_free in held if not is_free) < size
        assert get(store, keys(*range(50))) == [True] * 50
