"""What copies between a GPU and its host depend on beside the code: driver, link, memory."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

ASKED = (
    "name",
    "driver_version",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "memory.total",
    "clocks.max.memory",
    "power.limit",
    "compute_mode",
    "mig.mode.current",
)
"""Of each GPU, by nvidia-smi's names."""


def facts(root: Path = Path("/")) -> dict[str, Any]:
    """The facts by name; one that this machine does not tell is None. `root`: the folder that holds
    /proc, /sys and /dev."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "gpus": [{**one, **_link(root, str(one["pci.bus_id"]))} for one in _gpus()],
        "driver": _first_line(root / "proc/driver/nvidia/version"),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "huge_pages": _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        "locked_memory_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "shm_bytes": _size(root / "dev/shm"),
    }


def _gpus() -> list[dict[str, Any]]:
    """What nvidia-smi tells of each; nothing where it is not, or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [re.split(r",\s*", line) for line in said.stdout.splitlines() if line.strip()]
    return [dict(zip(ASKED, row, strict=True)) for row in rows if len(row) == len(ASKED)]


def _link(root: Path, bus: str) -> dict[str, Any]:
    """What the kernel tells of a device on the bus: the NUMA node that it is at, and its link."""
    domain, _, rest = bus.lower().partition(":")
    folder = root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"
    files = ("numa_node", "current_link_speed", "current_link_width", "local_cpulist")
    return {name: _first_line(folder / name) for name in files}


def _first_line(file: Path) -> str | None:
    try:
        return file.read_text().partition("\n")[0].strip() or None
    except OSError:
        return None


def _chosen(file: Path) -> str | None:
    """The word in brackets, as the kernel marks a setting that is in force."""
    found = re.search(r"\[(\w+)\]", _first_line(file) or "")
    return found and found[1]


def _size(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
