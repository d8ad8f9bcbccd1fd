"""How much memory can be had: the machine's, within the limits of all control groups."""

from __future__ import annotations

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
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(limit: object, used: int, **stat: int) -> dict[str, str]:
    lines = "".join(f"{name} {size}\n" for name, size in {"anon": 7, **stat}.items())
    return {"max": f"{limit}\n", "current": f"{used}\n", "stat": lines}


def v2(name: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{name}memory.{file}": text for file, text in files.items()}


def v1(name: str, files: dict[str, str]) -> dict[str, str]:
    names = {"max": "limit_in_bytes", "current": "usage_in_bytes", "stat": "stat"}
    return {f"memory/{name}memory.{names[file]}": text for file, text in files.items()}


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


def test_of_this_machine_it_is_something() -> None:
    assert 0 < spare_memory() < 1 << 60
