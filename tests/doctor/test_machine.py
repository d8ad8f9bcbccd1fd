"""Memory, locked memory, huge pages and /dev/shm, of machines and containers that are not ours."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from spec.findings import DoctorFinding
from spec.load import load_chain
from tiers.doctor.machine import LEAST_SHM, examine_machine

GIB = 1 << 30
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Make the files by which a system describes itself; sizes are in GiB."""

    def make(free: int, limit: int | None = None, used: int = 0, pages: str = "madvise") -> Path:
        files = {
            "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {free << 20} kB\n",
            "proc/self/cgroup": "0::/pod\n",
            "sys/kernel/mm/transparent_hugepage/enabled": f"always [{pages}] never\n",
        }
        if limit is not None:
            files["sys/fs/cgroup/pod/memory.max"] = f"{limit * GIB}\n"
            files["sys/fs/cgroup/pod/memory.current"] = f"{used * GIB}\n"
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "dev" / "shm").mkdir(parents=True, exist_ok=True)
        return tmp_path

    return make


def findings(root: Path, *sizes: str) -> list[DoctorFinding]:
    tiers = [{"type": "cpu", "name": f"ram{size}", "capacity": size} for size in sizes]
    chain = load_chain({"version": 1, "tiers": tiers}) if tiers else None
    return list(examine_machine(chain, root))


def test_a_chain_that_fits(machine: Machine) -> None:
    memory, *rest = findings(machine(64), "48GiB")
    assert memory.gravity == "fine" and "64GiB of memory can be had" in memory.found
    assert "takes 48.25GiB" in memory.found
    assert {each.gravity for each in rest} == {"fine"}


def test_a_control_group_that_leaves_too_little(machine: Machine) -> None:
    """As an engine does, it leaves the largest tier out first."""
    (memory, *_) = findings(machine(64, limit=12, used=2), "2GiB", "40GiB")
    assert memory.gravity == "error"
    assert "10GiB of memory can be had, all that the control group's limit leaves" in memory.found
    assert "takes 42.25GiB" in memory.found and "tier ram40GiB would be left out" in memory.found
    assert "to 9.375GiB with staging, or raise the container's limit" in memory.change
    (memory, *_) = findings(machine(8, limit=12, used=2), "2GiB")
    assert "8GiB of memory can be had, and" in memory.found, "it is not the limit that decides"


def test_a_sixteenth_stays_free(machine: Machine) -> None:
    assert findings(machine(16), "15GiB")[0].gravity == "error"
    assert findings(machine(16), "14GiB")[0].gravity == "fine"


def test_staging_alone(machine: Machine) -> None:
    chain = {"version": 1, "staging": "4GiB", "tiers": [{"type": "disk", "capacity": "1TB"}]}
    chain["tiers"][0]["path"] = "/nowhere"  # type: ignore[index]
    (memory, *_) = examine_machine(load_chain(chain), machine(2))
    assert memory.gravity == "warning" and "staging gets fewer slots" in memory.found
    assert memory.change == "lower staging, to 1.875GiB", "no capacity is of memory"
    assert memory.cost.startswith("fewer blocks in flight")


def test_pinned_memory_is_counted_where_there_is_a_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(64)
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        assert not any("locked" in each.found for each in findings(root, "8GiB"))
        (root / "dev" / "nvidiactl").touch()
        (locked,) = [each for each in findings(root, "8GiB") if "locked" in each.found]
        assert locked.gravity == "warning" and "64KiB" in locked.found
        assert "8.25GiB are pinned" in locked.found and "ulimit -l unlimited" in locked.change
        (locked,) = [each for each in findings(root) if "locked" in each.found]
        assert locked.gravity == "fine"
        monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)
        (locked,) = [each for each in findings(root, "8GiB") if "locked" in each.found]
        assert locked.gravity == "fine"
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_huge_pages(machine: Machine) -> None:
    root = machine(64)
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    file.write_text("always madvise [never]\n")
    (note,) = [each for each in findings(root) if each.gravity == "note"]
    assert note.change == f"echo madvise > {file}"
    file.unlink()
    assert any(each.gravity == "can't tell" for each in findings(root))


def test_shared_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(64)
    monkeypatch.setattr("tiers.doctor.machine.LEAST_SHM", 1 << 60)
    (warning,) = [each for each in findings(root) if each.gravity == "warning"]
    assert warning.found.startswith("/dev/shm: ") and "--shm-size" in warning.change
    monkeypatch.setattr("tiers.doctor.machine.LEAST_SHM", LEAST_SHM)
    (root / "dev" / "shm").rmdir()
    assert any("No such file" in each.found for each in findings(root))


@pytest.mark.parametrize(
    ("second", "gravity", "found"),
    [
        ("0-999", "fine", "processors near each of 1 devices"),
        ("900-907", "note", "near 0000:3b:00.0"),
    ],
)
def test_processors_near_a_device(machine: Machine, second: str, gravity: str, found: str) -> None:
    """Of a machine with two sockets; a sound card of the same vendor is none."""
    root = machine(64)
    for name, text in {
        "dev/nvidiactl": "",
        "sys/devices/system/node/node0/cpulist": "908-915\n",
        "sys/devices/system/node/node1/cpulist": f"{second}\n",
        "sys/bus/pci/devices/0000:3b:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:3b:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:3b:00.1/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:3b:00.1/class": "0x040300\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (said,) = (one for one in findings(root) if "NUMA" in one.found)
    assert said.gravity == gravity and found in said.found and "3b:00.1" not in said.found
