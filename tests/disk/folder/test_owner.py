"""Who may share a folder: not two hosts, nor two containers whose processes have equal numbers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk.audit import (
    MODE,
    Other,
    get,
    image_made,
    key,
    keys,
    open_disk,
    opened,
    put,
    run_mounted,
    say_mounted,
)
from tiers.disk.folder import owner
from tiers.disk.folder.owner import Host, Owner
from tiers.errors import TierNotOpen

THERE = Host("1" * 8 + "-0000-0000-0000-" + "1" * 12, "b" * 32, "node-b")
HERE_MACHINE = "a" * 32


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """This host, which has a name for its machine."""
    host = owner.this_host()._replace(machine=HERE_MACHINE)
    monkeypatch.setattr(owner, "this_host", lambda: host)
    yield host


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
    say_mounted("a-new-cluster-fs", monkeypatch, tmp_path)
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
    say_mounted("ext4", monkeypatch, tmp_path)
    left_by(THERE, tmp_path / "tier", monkeypatch)
    with opened(tmp_path / "tier") as store:
        assert get(store, keys(0)) == [False]
        assert put(store, keys(0)) == [True]


def test_this_host_after_a_boot_is_no_other(
    tmp_path: Path, here: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_mounted("a-new-cluster-fs", monkeypatch, tmp_path)
    left_by(here._replace(boot=THERE.boot), tmp_path / "tier", monkeypatch)
    with opened(tmp_path / "tier") as store:
        assert get(store, keys(0)) == [False]


def test_hosts_without_a_name_are_told_apart_by_their_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most containers have no machine id: two without one are not the same machine."""
    nameless = owner.this_host()._replace(machine="-")
    monkeypatch.setattr(owner, "this_host", lambda: nameless)
    say_mounted("a-new-cluster-fs", monkeypatch, tmp_path)
    left_by(THERE._replace(machine="-"), tmp_path / "tier", monkeypatch)
    with pytest.raises(TierNotOpen, match="'node-b'"):
        open_disk(tmp_path / "tier")


REMOUNTED = """
import fcntl, io, logging, struct, subprocess
mount, bound = path / "mount", path / "bound"
run = lambda *command: subprocess.run(command, check=True)
for folder in (mount, bound):
    folder.mkdir()
run("mount", "-o", "loop", path / "image", mount)
tier, end = mount / "tier", args[1]
child = Other("store = open_disk(path); put(store, keys(0, 1)); say('open'); wait()", tier)
assert child.hear() == "open"
if end == "lost":
    handle = os.open(mount, os.O_RDONLY)
    fcntl.ioctl(handle, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN, log not flushed
    os.close(handle)
child.kill()
if end == "bound":
    run("mount", "--bind", mount, bound)
if end != "killed":
    run("umount", mount)
    run("mount", "-o", "loop", path / "image", mount)
if end == "cut":
    os.truncate(slab_path(tier), SLOT)
logging.getLogger("tiers").addHandler(logging.StreamHandler(said := io.StringIO()))
with opened(tier) as store:
    held = get(store, keys(0, 1))
assert str(held) == args[2], held
assert end != "lost" or "its file system was unmounted while it was in use" in said.getvalue()
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("end", "mode", "held"),
    [
        ("killed", "buffered none", [True, True]),
        ("bound", "buffered none", [True, True]),
        ("unmounted", "buffered none", [False, False]),
        ("lost", "buffered none", [False, False]),
        ("unmounted", "buffered batch", [True, True]),
        ("cut", "buffered batch", [True, False]),
    ],
)
def test_a_file_system_that_was_mounted_anew(
    tmp_path: Path, end: str, mode: str, held: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have lost what was not synced; as long as one mount of it is left, it has not."""
    monkeypatch.setenv(MODE, mode)
    run_mounted(image_made(tmp_path, "ext4", "32M"), REMOUNTED, tmp_path, end, held)


@pytest.mark.fault
def test_a_mount_that_the_kernel_tells_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be mounted. What a later version puts behind is not looked at."""
    device = tmp_path.stat().st_dev
    number = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    mounted = tmp_path / "sys" / "a-fs" / os.path.basename(os.path.realpath(number))
    for text, held in (
        (b"%d", True),
        (b"%d 1", False),
        (b"%d %d", True),
        (b"%d %d 1", True),
        (b"", True),
    ):
        left_by(owner.this_host(), tmp_path / "tier", monkeypatch)
        (file,) = (tmp_path / "tier" / "owners").iterdir()
        lock = (tmp_path / "tier" / "lock").stat().st_ino
        mounted.mkdir(parents=True, exist_ok=True)
        numbers = lock, mounted.stat().st_ino
        file.write_bytes(text % numbers[: text.count(b"%d")])
        with monkeypatch.context() as patch:
            patch.setattr(owner, "_MOUNTED", tmp_path / "sys")
            with opened(tmp_path / "tier") as store:
                assert get(store, keys(0)) == [held]


@pytest.mark.parametrize("content", ["", "uninitialized\n", "c" * 32 + "\n", None])
def test_the_machines_name(
    tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_MACHINE", tmp_path / "machine-id")
    if content is not None:
        (tmp_path / "machine-id").write_text(content)
    assert owner.this_host().machine == ("c" * 32 if content and "c" in content[:1] else "-")


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
