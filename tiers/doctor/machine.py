"""The machine: memory for the host pool, and the system's settings that it depends on."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from spec.chain import ChainSpec
from spec.fields import format_size
from spec.findings import DoctorFinding
from spec.offloading import HostSpec
from tiers.concurrency.numa import NVIDIA, devices_of, near, nodes
from tiers.contract.pool_size import PoolSize
from tiers.host.spare_memory import for_slots, left_of_limits, spare_memory

LEAST_SHM = 1 << 30
"""vLLM's ranks hand their messages over in it; a container has 64 MiB by default."""

_DEVICES = ("dev/nvidiactl", "dev/kfd")


def examine_machine(chain: ChainSpec | None, root: Path = Path("/")) -> Iterator[DoctorFinding]:
    """Findings about this machine for a chain. `root`: the folder that holds /proc, /sys, /dev."""
    pool = None if chain is None else _pool(chain)
    yield from _memory(pool, root)
    has_device = any((root / device).exists() for device in _DEVICES)
    if has_device:
        yield _locked_memory(pool)
        yield from _nodes(root)
    yield _huge_pages(root)
    yield _shared_memory(root)


def _pool(chain: ChainSpec) -> PoolSize:
    hosts = tuple((t.tier_name, t.capacity) for t in chain.tiers if isinstance(t, HostSpec))
    return PoolSize(sum(size for _, size in hosts), chain.staging, 0, 1, hosts)


def _memory(pool: PoolSize | None, root: Path) -> Iterator[DoctorFinding]:
    spare = spare_memory(root)
    where = f"{format_size(spare)} of memory can be had"
    limits = list(left_of_limits(root))
    if limits and min(limits) <= spare:
        where += ", all that the control group's limit leaves"
    if pool is None:
        yield DoctorFinding("fine", where)
        return
    room = for_slots(spare)
    left_out: set[str] = set()
    for size in (pool, *pool.smaller()):
        left_out |= {name for name, _ in pool.hosts} - {name for name, _ in size.hosts}
        if size.num_bytes <= room:
            break
    need = f"the chain takes {format_size(pool.num_bytes)}: capacity and staging"
    if not left_out and pool.num_bytes <= room:
        yield DoctorFinding("fine", f"{where}, and {need}, for each replica on this host")
        return
    higher = ", or raise the container's limit" if limits else ""
    names = ", ".join(sorted(left_out))
    who, lower, cost = "staging gets fewer slots", f"staging, to {format_size(room)}", "in flight"
    if names:
        who, cost = f"tier {names} would be left out", "in memory"
        lower = f"capacity, to {format_size(room)} with staging"
    yield DoctorFinding(
        "error" if names else "warning",
        f"{where}, a sixteenth of which stays free, and {need}: {who}",
        f"lower {lower}{higher}",
        f"fewer blocks {cost}, and nothing else; the engine's own memory comes on top",
    )


def _locked_memory(pool: PoolSize | None) -> DoctorFinding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    need = 0 if pool is None else pool.num_bytes
    if limit == resource.RLIM_INFINITY or need <= limit:
        return DoctorFinding("fine", "locked memory is not limited below what is pinned")
    return DoctorFinding(
        "warning",
        f"locked memory is limited to {format_size(limit)} (ulimit -l), and {format_size(need)} "
        "are pinned for the device: a driver that counts pinned memory refuses it",
        "start it with ulimit -l unlimited (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity)",
        "nothing",
    )


def _nodes(root: Path) -> Iterator[DoctorFinding]:
    """Of the devices of a machine of several NUMA nodes. Says nothing where none are known."""
    try:
        known = nodes(root)
    except (OSError, ValueError):
        return
    devices = sorted(folder.name for folder in devices_of(NVIDIA, root))
    if len(known) < 2 or not devices:
        return
    far = [device for device in devices if not near(device, root)]
    if not far:
        yield DoctorFinding("fine", f"NUMA: processors near each of {len(devices)} devices")
        return
    yield DoctorFinding(
        "note",
        f"NUMA: this process may use no processor that is known to be near {', '.join(far)}, so "
        "that host memory is pinned at any of the nodes",
        "give the container processors of the device's node (docker run --cpuset-cpus)",
        "nothing",
    )


def _huge_pages(root: Path) -> DoctorFinding:
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        setting = file.read_text().partition("[")[2].partition("]")[0]
    except OSError as error:
        return DoctorFinding("can't tell", f"whether there are huge pages ({error.strerror})")
    if setting != "never":
        return DoctorFinding("fine", f"transparent huge pages: {setting}")
    return DoctorFinding(
        "note",
        "transparent huge pages are off: providing host memory takes twice as long",
        f"echo madvise > {file}",
        "nothing: only who asks for them gets them",
    )


def _shared_memory(root: Path) -> DoctorFinding:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as error:
        why = str(error.strerror)
    else:
        size = found.f_blocks * found.f_frsize
        if size >= LEAST_SHM:
            return DoctorFinding("fine", f"/dev/shm has {format_size(size)}")
        why = format_size(size)
    return DoctorFinding(
        "warning",
        f"/dev/shm: {why}; an engine of several ranks needs more, and so does one whose "
        "OffloadingConnector hosts tiers",
        "docker run --shm-size 8g, or an emptyDir of medium Memory at /dev/shm",
        "memory that is used, and no more",
    )
