"""The disk tier's findings, on real folders and file systems that are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spec.offloading import StoreContext
from tiers.disk.device import findings as device_findings
from tiers.disk.device import percent_used
from tiers.disk.index import index, mapped
from tiers.disk.spec import DiskSpec
from tiers.errors import TierError
from tiers.store import Block

CAPACITY = "64MiB"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts and gives away")


def spec(path: Path, **settings: str) -> DiskSpec:
    return DiskSpec.model_validate({"capacity": CAPACITY, "path": str(path), **settings})


def findings(path: Path, **settings: str) -> dict[str, list[str]]:
    """The texts by their gravity, without those about the device."""
    by_gravity: dict[str, list[str]] = {}
    there = next(place for place in (path, *path.parents) if place.is_dir())
    device = {each.found for each in device_findings(there)}
    for each in spec(path, **settings).examine():
        if each.found not in device:
            by_gravity.setdefault(each.gravity, []).append(each.found)
    return by_gravity


@contextmanager
def stored(path: Path, count: int = 4, **settings: str) -> Iterator[None]:
    """Some blocks in an open tier."""
    store = spec(path, **settings).open(StoreContext(1 << 20))
    blocks = [Block(os.urandom(48), memoryview(bytes(1 << 20))) for _ in range(count)]
    try:
        assert store.put(blocks) == [True] * count
        yield
        assert store.has([each.key for each in blocks]) == [True] * count
    finally:
        store.close()


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(folder)): (
            file.stat().st_mode,
            b"" if file.is_dir() else file.read_bytes(),
        )
        for file in sorted(folder.rglob("*"))
        if file.name != "index.mdb-lock"  # LMDB's table of readers
    }


ASK = """
import sys
from spec.load import load_chain
from tiers.doctor.examine import examine
chain = {"version": 1, "tiers": [{"type": "disk", "capacity": sys.argv[2], "path": sys.argv[1]}]}
for each in examine(load_chain(chain), None, {}, seconds=float(sys.argv[3])):
    print(each.about, each.finding.gravity, each.finding.found, flush=True)
"""


def examined(path: Path, capacity: str, seconds: float = 5.0) -> list[str]:
    """What the doctor prints of it, in a process of its own, which ends with its output."""
    command = [sys.executable, "-c", ASK, str(path), capacity, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("there", [True, False])
def test_a_good_place_is_left_as_it_was(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "kv" if there else tmp_path / "not" / "there"
    if there:
        path.mkdir(mode=0o700)
    found = findings(path)
    assert set(found) == {"fine"}, found
    assert f"{path} {'is' if there else 'will be made'} on " in found["fine"][0]
    assert list(tmp_path.rglob("*")) == ([path] if there else [])


def test_a_tier_with_blocks_is_left_as_it_was(tmp_path: Path) -> None:
    with stored(tmp_path / "kv"):
        pass
    before = everything(tmp_path)
    assert "it holds 4 blocks, 4.016MiB" in findings(tmp_path / "kv")["fine"]
    assert everything(tmp_path) == before
    (tmp_path / "kv" / "owners").rmdir()  # as in a copy that leaves empty folders out
    assert "it holds 4 blocks, 4.016MiB" in findings(tmp_path / "kv")["fine"]


def test_beside_an_engine(tmp_path: Path) -> None:
    """Its blocks stay, although the chain would evict them."""
    with stored(tmp_path / "kv"):
        found = examined(tmp_path / "kv", "2MiB")
        assert "disk fine it holds 4 blocks, 4.016MiB, and 1 processes have it open" in found
        (warning,) = [line for line in found if "replace" in line]
        assert "disk warning capacity 2MiB will replace the 64MiB of engines" in warning
    (note,) = findings(tmp_path / "kv", capacity="2MiB")["note"]
    assert note == "2.016MiB beyond its capacity will be evicted"


def test_a_folder_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    (error,) = findings(tmp_path / "kv")["error"]
    assert "has mode 0777, so others can write to it" in error


@as_root
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    os.chown(tmp_path / "kv", 12345, 12345)
    (error,) = findings(tmp_path / "kv")["error"]
    assert f"belongs to user 12345, this process runs as {os.geteuid()}" in error


def test_a_file_and_a_link_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert "is a file" in findings(tmp_path / "file")["error"][0]
    assert "is a symbolic link" in findings(tmp_path / "link")["error"][0]


def test_an_index_of_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_FORMAT", b"kvtiers index 1, records 1")
    with stored(tmp_path / "kv"):
        pass
    monkeypatch.undo()
    (error,) = findings(tmp_path / "kv")["error"]
    assert "has the format 'kvtiers index 1, records 1'" in error


def test_a_damaged_index(tmp_path: Path) -> None:
    with stored(tmp_path / "kv"):
        pass
    file = tmp_path / "kv" / "index.mdb"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "it will start empty" in findings(tmp_path / "kv")["note"][0]


def test_a_slab_that_was_cut(tmp_path: Path) -> None:
    """What the next engine empties is not said to be held."""
    with stored(tmp_path / "kv"):
        assert not any("cut" in line for line in findings(tmp_path / "kv").get("note", []))
        (slab,) = (tmp_path / "kv").glob("slab-*.dat")
        os.truncate(slab, slab.stat().st_size // 2)
        beside = examined(tmp_path / "kv", CAPACITY)
        assert any("it holds" in line for line in beside), "as long as another has it open"
    before = everything(tmp_path / "kv")
    found = findings(tmp_path / "kv")
    assert "it will start empty" in found["note"][0] and "are cut or gone" in found["note"][0]
    assert not any("it holds" in line for line in found["fine"])
    slab.unlink()
    assert "are cut or gone" in findings(tmp_path / "kv")["note"][0]
    assert not slab.exists() and [*before][:-1] == [*everything(tmp_path / "kv")]


def test_a_slab_that_a_power_cut_shortened(tmp_path: Path) -> None:
    """The next engine lengthens it, and serves what is left."""
    with stored(tmp_path / "kv", durability="batch"):
        (mark,) = (tmp_path / "kv" / "owners").iterdir()
        text = mark.read_bytes()
    (slab,) = (tmp_path / "kv").glob("slab-*.dat")
    os.truncate(slab, slab.stat().st_size // 2)
    (tmp_path / "kv" / "index.seal").unlink()  # of a clean close
    boot = "0" * 8 + mark.name[8:]
    mark.with_name(boot).write_bytes(text)
    found = findings(tmp_path / "kv", durability="batch")
    assert "it holds 4 blocks, 4.016MiB" in found["fine"] and "note" not in found, found


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file system on a folder until the test ends."""
    places: list[Path] = []

    def mount(*words: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", *words, str(place)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this container can't mount: {done.stderr}")
        places.append(place)
        return place

    yield mount
    for place in places:
        # A process that was left behind on it may have yet to end.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@as_root
def test_a_small_file_system_in_memory(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=32m,nr_inodes=40", "none")
    found = findings(place / "kv")
    (inodes,) = found["error"]
    assert "inodes left" in inodes
    room, memory = found["warning"]
    assert "has room for 24MiB of its capacity 64MiB" in room
    assert "on tmpfs: its blocks take memory" in memory
    assert list(place.iterdir()) == []


@as_root
def test_a_full_and_a_read_only_file_system(mounted: Callable[..., Path]) -> None:
    full = mounted("-t", "tmpfs", "-o", "size=4m", "none")
    (full / "other").write_bytes(bytes(4 << 20))
    assert any("full" in text or "No space" in text for text in findings(full / "kv")["error"])
    small = mounted("-t", "tmpfs", "-o", "size=6m", "none")
    (error,) = findings(small / "kv")["error"]
    assert "6MiB left, the index needs 8MiB" in error, "it is not full, it is empty"
    closed = mounted("-t", "tmpfs", "-o", "ro", "none")
    (error,) = findings(closed / "kv")["error"]
    assert "can't be written: Read-only file system" in error


@pytest.fixture
def frozen(tmp_path: Path, mounted: Callable[..., Path]) -> Iterator[Path]:
    """A file system on which every write hangs, for the kernel as well."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True).returncode:
        pytest.skip("no mkfs.ext4")
    place = mounted("-o", "loop", str(image))
    subprocess.run(["fsfreeze", "-f", str(place)], check=True)
    yield place
    subprocess.run(["fsfreeze", "-u", str(place)], check=True)


@as_root
def test_a_file_system_that_hangs(frozen: Path) -> None:
    """Neither the command hangs nor who waits for the end of its output, although no signal ends
    the process that asked."""
    found = examined(frozen / "kv", CAPACITY, 2.0)
    assert any("disk error its place did not answer within 2 s" in line for line in found)
    assert any("disk fine" in line for line in found)  # what it found before


def test_memory_that_may_not_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("may lock" in note for note in notes(tmp_path))
    monkeypatch.setattr(mapped, "lockable", lambda: 8 << 20)
    assert not any("may lock" in note for note in notes(tmp_path, capacity="16GiB"))
    assert any("may lock 8MiB" in note for note in notes(tmp_path, capacity="17GiB"))


def notes(path: Path, **settings: str) -> list[str]:
    return findings(path / "tier", **settings).get("note", [])


def test_the_endurance_that_a_tool_shows() -> None:
    nvme = {"nvme_smart_health_information_log": {"percentage_used": 7, "critical_warning": 0}}
    assert percent_used(nvme) == (7, "")
    nvme["nvme_smart_health_information_log"]["critical_warning"] = 4
    assert percent_used(nvme) == (7, ", and reports a critical warning")
    assert percent_used({"endurance_used": {"current_percent": 93}}) == (93, "")
    refused = {"smartctl": {"messages": [{"string": "Permission denied", "severity": "error"}]}}
    assert percent_used(refused) == (None, ": Permission denied")


def test_a_device_as_the_system_shows_it(tmp_path: Path) -> None:
    """An eMMC behind a partition, with its life in tenths."""
    number = os.stat(tmp_path).st_dev
    if os.major(number) == 0:
        pytest.skip("the test's own file system is of no device")
    whole = tmp_path / "devices" / "mmcblk0"
    (whole / "mmcblk0p1").mkdir(parents=True)
    (whole / "mmcblk0p1" / "partition").write_text("1\n")
    (whole / "device").mkdir()
    (whole / "device" / "life_time").write_text("0x01 0x09\n")
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    name = f"{os.major(number)}:{os.minor(number)}"
    (links / name).symlink_to(whole / "mmcblk0p1")
    (life,) = device_findings(tmp_path, tmp_path)
    assert life.gravity == "warning" and "mmcblk0 has used 90% of its endurance" in life.found


def test_errors_are_those_of_an_engine(tmp_path: Path) -> None:
    """Where the doctor finds none, the tier opens; and the other way round."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for path in (tmp_path / "open", tmp_path / "good"):
        wrong = "error" in findings(path)
        try:
            spec(path).open(StoreContext(1 << 20)).close()
        except TierError:
            assert wrong
        else:
            assert not wrong
