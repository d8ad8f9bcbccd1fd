"""NUMA nodes, as the kernel tells of them: whose processors are near, whose memory may be used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/")
_NODES = "sys/devices/system/node"
_DEVICES = "sys/bus/pci/devices"
_ALLOWED = re.compile(rb"^Mems_allowed_list:\s+(\S+)$", re.M)
_BOUND = re.compile(rb"\S+ bind\S*:(\S+)\s")
NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""How the class of a display controller begins."""


def nodes(root: Path = ROOT) -> dict[int, set[int]]:
    """The processors of each node; empty where the kernel tells of none. `root`: the folder that
    holds /sys. Raises OSError and ValueError."""
    files = (root / _NODES).glob("node[0-9]*/cpulist")
    return {int(file.parent.name.removeprefix("node")): _listed(file.read_text()) for file in files}


def memory_nodes(root: Path = ROOT) -> tuple[frozenset[int], bool]:
    """The nodes that alone may give this process memory, none if all may; and whether it is bound
    to them by itself (numactl, vLLM's workers for the CPU), not with its control group. Where there
    is one node nothing else is read."""
    try:
        known = frozenset(nodes(root))
        if len(known) < 2:
            return frozenset(), False
        allowed = _ALLOWED.search((root / "proc/self/status").read_bytes())
        with (root / "proc/self/numa_maps").open("rb", buffering=0) as maps:
            # The kernel walks the pages of each mapping that it tells of: of few, for so little.
            bound = _BOUND.match(maps.read(256))
        found = bound or allowed
        some = known & _listed(found[1].decode()) if found else known
    except (OSError, ValueError):
        return frozenset(), False
    return (some, bool(bound)) if some < known else (frozenset(), False)


def near(address: str, root: Path = ROOT) -> frozenset[int]:
    """The processors that this thread may use of the node that a PCI device is at, such as
    `0000:3b:00.0`. Empty: there is one node, or the device's is unknown, or all are elsewhere."""
    domain, _, rest = address.lower().partition(":")
    folder = root / _DEVICES / f"{domain[-4:]}:{rest}"
    try:
        known, node = nodes(root), int((folder / "numa_node").read_text())
        allowed = os.sched_getaffinity(0)
    except (OSError, ValueError):
        return frozenset()
    return frozenset(known.get(node, set()) & allowed) if len(known) > 1 else frozenset()


def devices_of(vendor: str, root: Path = ROOT) -> Iterator[Path]:
    """The folders of a vendor's display controllers, those without a display too, on the bus."""
    for folder in (root / _DEVICES).glob("*"):
        with suppress(OSError):
            is_theirs = (folder / "vendor").read_text().strip() == vendor
            if is_theirs and (folder / "class").read_text().startswith(_DISPLAY):
                yield folder


def bind(cpus: frozenset[int], thread_id: int = 0) -> None:
    """Let a thread, by its native id, or the calling one run on these processors alone; anywhere
    if there are none. Memory that it is the first to touch is at their node."""
    if cpus:
        with suppress(OSError):  # it has ended, or may not be bound: then it works elsewhere
            os.sched_setaffinity(thread_id, cpus)


@contextmanager
def bound(cpus: frozenset[int]) -> Iterator[None]:
    """Bind the calling thread meanwhile. Threads that begin within stay there."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    bind(cpus)
    try:
        yield
    finally:
        bind(frozenset(before))


def _listed(text: str) -> set[int]:
    """The kernel's list of numbers and ranges, such as `0-3,8`. Raises ValueError."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
