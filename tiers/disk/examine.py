"""The disk tier's findings before an engine starts: its folder, its file system, its device.

An index that is there is opened as an engine opens it, and left as it is. In a folder without one,
and beside one that is yet to be made, all is tried in a folder that is removed again.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from spec.fields import format_size
from spec.findings import DoctorFinding
from tiers.disk import device
from tiers.disk.folder import clean_close
from tiers.disk.folder.folder import MEMORY, ONE_HOST, Folder, require_suitable
from tiers.disk.folder.owner import scan_owners
from tiers.disk.index import mapped
from tiers.disk.index.edit import Edit
from tiers.disk.index.index import LEAST_AHEAD, Damaged, Index, translated
from tiers.disk.index.slot_allocator import INDEX_MARGIN, shortage
from tiers.disk.slab import Access, choose_direct
from tiers.errors import TierError, TierNotOpen
from tiers.host.spare_memory import spare_memory
from tiers.paths import mount_of
from tiers.store import Usage

LEAST_INODES = 64
"""The tier has a file for each size of its blocks, and one for each process that has it open."""

INDEX_SHARE = 1 / 2048
"""The index, of a capacity: 1 KiB for each block of 2 MiB."""

_LOST = "blocks that are there now are computed again"


def examine(path: Path, capacity: int, access: Access) -> Iterator[DoctorFinding]:
    """Findings about the folder `path` for this capacity, in bytes. Raises OSError."""
    folder = Folder(Path(os.path.realpath(path.parent), path.name))
    folder.kind = kind = mount_of(folder.path).kind
    beside = next(place for place in (folder.path, *folder.path.parents) if place.is_dir())
    there = "is" if os.path.lexists(folder.path) else "will be made"
    yield DoctorFinding("fine", f"{path} {there} on {kind or 'a file system without a name'}")
    usage = Usage(0, 0, None)
    try:
        require_suitable(folder.path, kind)
        if os.path.lexists(folder.path):
            folder.check()
        if folder.index.exists():
            usage = yield from _held(folder, capacity, access)
        else:
            yield from _try_out(path, beside, capacity, access)
    except TierError as error:
        yield DoctorFinding.of_line("error", str(error), "nothing that is stored")
    yield from _room(beside, usage, capacity, 0 if folder.index.exists() else LEAST_AHEAD)
    yield from _kind(path, kind)
    yield from _locked(capacity)
    yield from device.findings(beside)


def _try_out(path: Path, beside: Path, capacity: int, access: Access) -> Iterator[DoctorFinding]:
    """Do what an engine does first, in a folder that is removed again."""
    with ExitStack() as undo:
        try:
            made = undo.enter_context(TemporaryDirectory(prefix=".kvtiers-doctor-", dir=beside))
        except OSError as error:
            raise TierNotOpen(
                f"{beside} can't be written: {error.strerror}; make it writable for user "
                f"{os.geteuid()}, or name another folder"
            ) from error
        trial = Folder(Path(made) / path.name)
        try:
            trial.prepare()
            with trial.locked():
                yield from _try_direct(path, trial.lock, access, capacity)
            with translated(trial.path):
                Index(trial.index, access.synced).close()
        except TierError as error:
            raise type(error)(str(error).replace(str(trial.path), str(path))) from error


def _try_direct(path: Path, probe: Path, access: Access, capacity: int) -> Iterator[DoctorFinding]:
    direct, _ = choose_direct(path, probe, access.io, capacity)
    if direct or access.io == "buffered" or capacity <= spare_memory() // 2:
        yield DoctorFinding(
            "fine", f"io {access.io}: {'past' if direct else 'through'} the page cache"
        )
        return
    yield DoctorFinding(
        "warning",
        f"the file system has no direct I/O, and {format_size(capacity)} are more than half of the "
        "spare memory: blocks push each other out of the page cache",
        "use ext4 or XFS, or a lower capacity",
        "up to half of the speed of random loads, if it stays",
    )


def _held(folder: Folder, capacity: int, access: Access) -> Generator[DoctorFinding, None, Usage]:
    """Findings about an index that is there; returns what it holds. Raises TierError."""
    with clean_close.compared(folder) as compared, folder.locked():
        owners = scan_owners(folder.owners, folder.kind in ONE_HOST)
        if owners.refusal is not None:
            raise TierNotOpen(owners.refusal)
        yield from _try_direct(folder.path, folder.lock, access, capacity)
    is_ours = bool(owners.alive or owners.dead)
    try:
        if why := compared.why_wiped(owners):
            raise Damaged(why)
        with translated(folder.path), closing(Index(folder.index, is_ours=is_ours)) as index:
            with index.begin() as txn:
                lengths = Edit(txn, index.tables, b"").lengths()
            folder.cut_slabs(lengths, may_be=bool(owners.alive or owners.cut))
            usage = index.usage()
    except Damaged as error:
        yield DoctorFinding("note", f"it will start empty: {error}", "nothing", _LOST)
        return Usage(0, 0, None)
    size = format_size(usage.used)
    who = f", and {len(owners.alive)} processes have it open" if owners.alive else ""
    yield DoctorFinding("fine", f"it holds {usage.blocks} blocks, {size}{who}")
    if owners.alive and usage.capacity not in (None, capacity):
        yield DoctorFinding(
            "warning",
            f"capacity {format_size(capacity)} will replace the {format_size(usage.capacity or 0)} "
            "of engines that have it open, for all of them",
            "give all engines on the folder one capacity",
            "beyond the smaller one blocks are evicted",
        )
    elif usage.used > capacity:
        over = format_size(usage.used - capacity)
        yield DoctorFinding(
            "note", f"{over} beyond its capacity will be evicted", "raise capacity", over
        )
    return usage


def _room(place: Path, usage: Usage, capacity: int, ahead: int) -> Iterator[DoctorFinding]:
    """`ahead`: bytes that an engine will have allocated to the index."""
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if usage.used + free <= (index := INDEX_MARGIN + ahead):
        line = f"its file system has {format_size(free)} left, the index needs {format_size(index)}"
        yield DoctorFinding("error", line, "make room, or name another folder", "what is removed")
    elif short := shortage(Usage(usage.blocks, usage.used, capacity), capacity, free - ahead):
        yield DoctorFinding.of_line("warning", short, "fewer hits; the tier is degraded until then")
    else:
        yield DoctorFinding("fine", f"{format_size(free)} are free for {format_size(capacity)}")
    if found.f_files and found.f_favail < LEAST_INODES:
        yield DoctorFinding(
            "error",
            f"its file system has {found.f_favail} inodes left",
            "remove small files there, or name another file system",
            "what is removed",
        )


def _locked(capacity: int) -> Iterator[DoctorFinding]:
    limit = mapped.lockable()
    if limit is not None and limit < capacity * INDEX_SHARE:
        yield DoctorFinding(
            "note",
            f"this user may lock {format_size(limit)} of memory, less than the index may take: a "
            "device that goes where memory was short ends the engine",
            "raise RLIMIT_MEMLOCK: ulimit -l, LimitMEMLOCK= or --ulimit memlock=",
            "nothing",
        )


def _kind(path: Path, kind: str) -> Iterator[DoctorFinding]:
    if kind in MEMORY:
        spare = format_size(spare_memory())
        yield DoctorFinding(
            "warning",
            f"{path} is on {kind}: its blocks take memory, of which {spare} can be had",
            "name a folder on a disk, or give the memory to a cpu tier",
            "a cpu tier is faster, and lost when the engine ends",
        )
    elif kind == "overlay":
        yield DoctorFinding(
            "warning",
            f"{path} is in the container's own layer, which goes away with it",
            "mount a volume of this host there",
            "a volume; without one every new container starts empty",
        )
