"""How much memory can be had: the machine's, within the limits of all nodes and control groups."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tiers.host.spare_memory import spare_memory

GIB = 1 << 30


def system(root: Path, own: str, files: dict[str, str]) -> Path:
    """A root with 100 GiB available, whose process is in the group that `own` names."""
    files = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 << 20} kB\n",
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    return written(root, files)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(limit: object, used: int, high: object = "max", **stat: int) -> dict[str, str]:
    lines = "".join(f"{name} {size}\n" for name, size in {"anon": 7, **stat}.items())
    return {"max": f"{limit}\n", "high": f"{high}\n", "current": f"{used}\n", "stat": lines}


def v2(name: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{name}memory.{file}": text for file, text in files.items()}


def v1(name: str, files: dict[str, str]) -> dict[str, str]:
    names = {"max": "limit_in_bytes", "current": "usage_in_bytes", "stat": "stat"}
    return {f"memory/{name}memory.{names[file]}": files[file] for file in names}


@pytest.mark.parametrize(
    ("own", "files", "gib"),
    [
        ("0::/\n", {}, 100),
        ("0::/\n", v2("", group("max", 90 * GIB)), 100),
        ("0::/pod\n", v2("pod/", group(16 * GIB, 6 * GIB)), 10),
        ("0::/pod/c\n", v2("pod/", group(16 * GIB, 6 * GIB)), 10),
        # Seen from within a container, whose own group is the root under a name of outside.
        ("0::/../gone\n", v2("", group(8 * GIB, 6 * GIB)), 2),
        (
            "0::/pod\n",
            v2("pod/", group(16 * GIB, 14 * GIB, inactive_file=3 * GIB, active_file=GIB)),
            6,
        ),
        ("0::/pod\n", v2("pod/", group(GIB, 2 * GIB)), 0),
        # Beyond which the kernel would slow the engine down.
        ("0::/pod\n", v2("pod/", group("max", 40 * GIB, high=64 * GIB)), 24),
        ("0::/pod\n", v2("pod/", group(50 * GIB, 40 * GIB, high=64 * GIB)), 10),
        ("3:cpu:/x\n5:memory:/pod\n", v1("pod/", group(9 * GIB, 4 * GIB)), 5),
        (
            "5:memory:/pod\n",
            v1("pod/", group(9 * GIB, 9 * GIB, inactive_file=GIB, total_inactive_file=4 * GIB)),
            4,
        ),
        ("5:memory:/pod\n", v1("pod/", group(2**63 - 4096, 9 * GIB)), 100),
    ],
)
def test_the_least_of_machine_and_limits_counts(
    tmp_path: Path, own: str, files: dict[str, str], gib: int
) -> None:
    assert spare_memory(system(tmp_path, own, files)) == gib * GIB


NODES = "sys/devices/system/node/node"


def meminfo(node: int, free: int, cached: int = 0) -> str:
    """In GiB. What is used is named, too."""
    sizes = {
        "MemTotal": 300,
        "MemFree": free,
        "MemUsed": 300 - free,
        "Active": 50 + cached,
        "Active(file)": cached,
        "Inactive(file)": cached,
        "FilePages": 2 * cached + 9,
        "KReclaimable": cached,
        "SReclaimable": cached,
        "SUnreclaim": 3,
    }
    return "\n".join(f"Node {node} {name}: {size << 20} kB" for name, size in sizes.items())


def bound(root: Path, allowed: str, policy: str, nodes: int = 2) -> Path:
    """With 30 GiB free at node 0, of which each other has ten more, and cached all of them."""
    files = {f"{NODES}{n}/cpulist": f"{n}\n" for n in range(nodes)}
    files |= {f"{NODES}{n}/meminfo": meminfo(n, 30 + 10 * n, n) for n in range(nodes)}
    files["proc/self/status"] = f"Name: worker\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n"
    maps = [f"55ce95a3c000 {policy} file=/usr/bin/python3.11 mapped=1 N0=1 kernelpagesize_kB=4"]
    files["proc/self/numa_maps"] = "\n".join([*maps, f"55ce{'0' * 4000}00 bind:1", ""])
    return written(system(root, "0::/\n", {}), files)


@pytest.mark.parametrize(
    ("allowed", "policy", "nodes", "gib"),
    [
        ("0-1", "default", 2, 100),
        ("0-7", "bind:0-1", 2, 100),
        ("0-1", "prefer:0", 2, 100),
        ("0-1", "interleave:0", 2, 100),
        ("0-1", "bind:0", 2, 30),
        ("0-1", "bind=static:1", 2, 43),
        ("0-2", "bind:0,2", 3, 86),
        ("0", "default", 2, 30),
        ("0", "bind:0", 1, 100),
        ("0,2", "bind:2", 3, 56),
    ],
)
def test_of_nodes_that_alone_may_give_memory_what_they_have_counts(
    tmp_path: Path, allowed: str, policy: str, nodes: int, gib: int
) -> None:
    """The kernel ends who asks for more, though other nodes have it."""
    assert spare_memory(bound(tmp_path, allowed, policy, nodes)) == gib * GIB


def test_ranks_have_nodes_of_their_own_by_their_policies_alone(tmp_path: Path) -> None:
    assert spare_memory(bound(tmp_path / "policy", "0-2", "bind:0", 3), 2) == 60 * GIB
    assert spare_memory(bound(tmp_path / "most", "0-2", "bind:0", 3), 4) == 100 * GIB
    assert spare_memory(bound(tmp_path / "cpuset", "0", "default", 3), 2) == 30 * GIB
    assert spare_memory(bound(tmp_path / "both", "0-1", "bind:1", 3), 1) == 43 * GIB


def test_one_node_costs_no_look_at_what_it_is_bound_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = bound(tmp_path, "0", "bind:0", 1)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read"))
    assert spare_memory(root) == 100 * GIB


def test_nodes_that_can_not_be_told_bound_nothing(tmp_path: Path) -> None:
    root = bound(tmp_path, "0-1", "bind:0-", 2)
    assert spare_memory(root) == 100 * GIB
    (root / "proc/self/numa_maps").unlink()
    assert spare_memory(root) == 100 * GIB


BINDS = """
import ctypes, os, pathlib, sys
from tiers.concurrency.numa import memory_nodes
root = pathlib.Path(sys.argv[1])
before = memory_nodes(root)
mask = ctypes.c_ulong(1)
if ctypes.CDLL(None).syscall(238, 2, ctypes.byref(mask), 64):
    sys.exit("may not")
print([sorted(nodes) for nodes, _ in (before, memory_nodes(root))])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls have other numbers elsewhere")
def test_the_kernel_says_to_which_nodes_a_process_is_bound(tmp_path: Path) -> None:
    """By set_mempolicy with MPOL_BIND, as vLLM's workers for the CPU do."""
    root = bound(tmp_path, "0-1", "default")
    (root / "proc/self/numa_maps").unlink()
    (root / "proc/self/numa_maps").symlink_to("/proc/self/numa_maps")
    command = [sys.executable, "-c", BINDS, str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "may not" in done.stderr:
        pytest.skip("this sandbox binds no memory")
    assert done.stdout == "[[], [0]]\n", done.stderr


def test_of_this_machine_it_is_something() -> None:
    assert 0 < spare_memory() < 1 << 60
