"""Who may share a folder: not two hosts, nor two containers whose processes have equal numbers; and
on what it may lie."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk.audit import Other, get, key, keys, open_disk, opened, put, refused, run_mounted
from tiers.disk.folder import folder, owner
from tiers.disk.folder.owner import Host, Owner
from tiers.errors import TierNotOpen, TierUnusable

THERE = Host("1" * 8 + "-0000-0000-0000-" + "1" * 12, "b" * 32, "node-b")
HERE_MACHINE = "a" * 32


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """This host, which has a name for its machine."""
    host = owner.this_host()._replace(machine=HERE_MACHINE)
    monkeypatch.setattr(owner, "this_host", lambda: host)
    yield host


def on(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the kernel say that every file system is of this kind."""
    rows = Path("/proc/self/mountinfo").read_text()
    doctored = tmp_path / "mountinfo"
    doctored.write_text(re.sub(r" - \S+ ", f" - {kind} ", rows))
    monkeypatch.setattr(folder, "_MOUNTS", doctored)


def left_by(host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier with a block, whose process on that host ended without a close, if it has ended."""
    child = Other("store = open_disk(path); put(store, keys(0)); say('open'); wait()", folder)
    assert child.hear() == "open"
    child.kill()
    (file,) = (folder / "owners").iterdir()
    _, one, _, pid, _ = file.name.split(".")
    file.rename(file.with_name(f"{host.boot}.{one}.{host.machine}.{pid}.{host.name}"))


@pytest.mark.fault
@pytest.mark.parametrize("alive", [True, False])
def test_another_hosts_folder_is_left_alone(
    tmp_path: Path, alive: bool, here: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tier"
    on("a-new-cluster-fs", monkeypatch, tmp_path)
    left_by(THERE, folder, monkeypatch)
    if alive:  # as where locks cross from host to host
        monkeypatch.setattr(owner, "this_host", lambda: THERE)
        locked = Owner(folder / "owners", synced=False)
        monkeypatch.setattr(owner, "this_host", lambda: here)
    before = {file: file.stat().st_ino for file in folder.iterdir()}
    with pytest.raises(TierNotOpen, match=r"'node-b'.*a folder of its own"):
        open_disk(folder)
    assert {file: file.stat().st_ino for file in folder.iterdir()} == before
    if alive:
        locked.leave(clean=True)


def test_a_host_of_a_live_owner_is_refused_on_any_file_system(
    tmp_path: Path, here: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    monkeypatch.setattr(owner, "this_host", lambda: THERE)
    locked = Owner(tmp_path / "owners", synced=False)
    monkeypatch.setattr(owner, "this_host", lambda: here)
    with pytest.raises(TierNotOpen, match="in use on host 'node-b'"):
        open_disk(tmp_path)
    locked.leave(clean=True)
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
def test_a_disk_that_moved_from_another_host(
    tmp_path: Path, here: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("ext4", monkeypatch, tmp_path)
    left_by(THERE, tmp_path / "tier", monkeypatch)
    with opened(tmp_path / "tier") as store:
        assert get(store, keys(0)) == [False]
        assert put(store, keys(0)) == [True]


def test_this_host_after_a_boot_is_no_other(
    tmp_path: Path, here: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("a-new-cluster-fs", monkeypatch, tmp_path)
    left_by(here._replace(boot=THERE.boot), tmp_path / "tier", monkeypatch)
    with opened(tmp_path / "tier") as store:
        assert get(store, keys(0)) == [False]


def test_hosts_without_a_name_are_told_apart_by_their_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most containers have no machine id: two without one are not the same machine."""
    nameless = owner.this_host()._replace(machine="-")
    monkeypatch.setattr(owner, "this_host", lambda: nameless)
    on("a-new-cluster-fs", monkeypatch, tmp_path)
    left_by(THERE._replace(machine="-"), tmp_path / "tier", monkeypatch)
    with pytest.raises(TierNotOpen, match="'node-b'"):
        open_disk(tmp_path / "tier")


@pytest.mark.parametrize("content", ["", "uninitialized\n", "c" * 32 + "\n", None])
def test_the_machines_name(
    tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_MACHINE", tmp_path / "machine-id")
    if content is not None:
        (tmp_path / "machine-id").write_text(content)
    assert owner.this_host().machine == ("c" * 32 if content and "c" in content[:1] else "-")


SHARED = ["nfs", "nfs4", "cifs", "ceph", "lustre", "9p", "virtiofs", "fuse", "fuse.s3fs"]


@pytest.mark.fault
@pytest.mark.parametrize("kind", SHARED)
def test_a_network_file_system(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(kind, monkeypatch, tmp_path)
    refused(tmp_path / "not" / "yet", rf"file system of type {kind}, .*a tier of type redis")
    assert not (tmp_path / "not").exists()
    with pytest.raises(TierUnusable) as caught:
        open_disk(tmp_path)
    assert not isinstance(caught.value, TierNotOpen), "trying again won't help"


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", "x"])
def test_a_file_system_of_this_host(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(kind, monkeypatch, tmp_path)
    with opened(tmp_path / "tier") as store:
        assert put(store, keys(0)) == [True]


def test_where_the_kernel_tells_no_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in ("", "garbage\n1 2 3\n - \n", None):
        if rows is not None:
            (tmp_path / "mountinfo").write_text(rows)
        monkeypatch.setattr(
            folder, "_MOUNTS", tmp_path / ("mountinfo" if rows is not None else "none")
        )
        assert folder.file_system(tmp_path) == ""
        with opened(tmp_path / "tier") as store:
            assert put(store, keys(0)) == [True]


REAL = """
import io, logging
from tiers.disk.folder.folder import file_system
assert file_system(path / "a b" / "not yet") == "tmpfs"
said = io.StringIO()
logging.getLogger("tiers").addHandler(logging.StreamHandler(said))
logging.getLogger("tiers").setLevel(logging.INFO)
store = open_disk(path / "a b" / "tier")
put(store, keys(0))
store.close()
assert "is on tmpfs, so its blocks take memory" in said.getvalue()
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


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")
TWIN = """
from tiers.errors import TierNotOpen
assert os.getpid() == 1
try:
    store = open_disk(path)
except TierNotOpen as error:
    say(error)
    wait()
    store = open_disk(path)
put(store, keys(int(args[1])))
found = get(store, keys(0, 1))
say(found)
wait()
store.close()
"""


@pytest.mark.fault
def test_containers_with_equal_process_numbers(tmp_path: Path) -> None:
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user can't make a namespace of process numbers")
    with opened(tmp_path) as store:  # a process of another number shares the path with either
        first = Other(TWIN, tmp_path, 0, within=CONTAINER)
        assert first.hear() == "[True, False]"
        second = Other(TWIN, tmp_path, 1, within=CONTAINER)
        assert re.search("another container.*same number.* 1; .*--pid=host", second.hear())
        assert get(store, keys(0, 1)) == [True, False]
        first.end()
        second.tell()
        assert second.hear() == "[True, True]"
        assert get(store, [key(1)]) == [True]
        second.end()
