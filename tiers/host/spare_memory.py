"""How much more memory this process can use: by the machine, its nodes and control groups."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

from tiers.concurrency.numa import memory_nodes

_AVAILABLE = re.compile(r"^MemAvailable:\s+([0-9]+) kB$", re.M)
_TOTAL = re.compile(r"^MemTotal:\s+([0-9]+) kB$", re.M)
_RECLAIMABLE = re.compile(r"^(?:(?:total_)?(?:in)?active_file|slab_reclaimable) ([0-9]+)$", re.M)
_OF_NODE = re.compile(
    r"^Node [0-9]+ (?:MemFree|(?:Ina|A)ctive\(file\)|SReclaimable): +([0-9]+) kB$", re.M
)
_V2: tuple[str, ...] = ("memory.current", "memory.max", "memory.high")
"""Beyond the last the kernel slows a group down instead of ending one of its processes."""
_V1: tuple[str, ...] = ("memory.usage_in_bytes", "memory.limit_in_bytes")

KEPT_FREE = 16
"""A sixteenth of the spare memory is left free for others."""


def for_slots(spare: int) -> int:
    """Return how much of so much spare memory a host pool may take."""
    return spare - spare // KEPT_FREE


def spare_memory(root: Path = Path("/"), ranks: int = 1) -> int:
    """Return the bytes that this process can still use: free or reclaimable memory, bounded by what
    each of its control groups has left, and the nodes that it is bound to. `root`: the folder that
    holds /proc and /sys. `ranks`: who shares it; each is bound to other nodes, if this one is."""
    found = _AVAILABLE.search((root / "proc/meminfo").read_text())
    available = int(found[1]) * 1024 if found else 0
    left = [available, *left_of_limits(root)]
    nodes, is_own = memory_nodes(root)
    files = (root / f"sys/devices/system/node/node{node}/meminfo" for node in nodes)
    if sizes := _OF_NODE.findall("\n".join(map(_read, files))):
        left.append(sum(map(int, sizes)) * 1024 * (ranks if is_own else 1))
    return max(0, min(left))


def reservable_memory(root: Path = Path("/")) -> int:
    """Return how many bytes of addresses can be reserved for memory that is taken later: as many
    as the machine has memory; 0 where addresses themselves are limited, by the process's limit
    (ulimit -v) or since the kernel counts what is reserved as used (vm.overcommit_memory 2)."""
    is_counted = _read(root / "proc/sys/vm/overcommit_memory") == "2"
    if is_counted or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return 0
    found = _TOTAL.search((root / "proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


def left_of_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the bytes that each control group with a limit leaves to this process."""
    groups = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = groups, _V2
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", _V1
        else:
            continue
        place = top / group.lstrip("/")
        # A container may see its own group as the root, under a name it can't look up.
        for folder in {top, place, *(p for p in place.parents if p.is_relative_to(top))}:
            usage, *limits = (_read(folder / name) for name in names)
            used = int(usage) if usage.isdecimal() else 0
            for limit in filter(str.isdecimal, limits):
                yield int(limit) - max(0, used - _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Return the file cache of a group and its subgroups, which the kernel can reclaim."""
    stat = _read(folder / "memory.stat")
    if "total_inactive_file" in stat:  # version 1, where fields without total_ leave out subgroups
        stat = "\n".join(line for line in stat.splitlines() if line.startswith("total_"))
    return sum(map(int, _RECLAIMABLE.findall(stat)))


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
