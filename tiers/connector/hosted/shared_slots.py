"""SlotRegion: one worker's host slots, in memory shared with the scheduler's process.

Under the engine's own connector a hit must be in host memory already. So the scheduler's side
promotes blocks of a store into the very slots that workers load from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from tiers.contract.messages import WorkerHandshake
from tiers.errors import TierUnusable
from tiers.host.slot_memory import ALIGNMENT, SlotMemory, slot_stride

FOLDER = Path("/dev/shm")
"""Memory that processes of one host share by name."""

_PREFIX = "kvtiers-"

_MARK = struct.Struct("<Q16s8x")
"""Per slot: how many of the worker's transfers have ended, and the stamp of the key it holds."""

_PAIR = struct.Struct("<16s16s")
_STAMP = struct.Struct("<16s")
_NAME = struct.Struct("<16s16s16s")
"""At the end of the last page: the worker's namespace and its stamp, zeros until it is known; and
the stamp of the generation whose weights the worker saw change last."""


def stamp(key: bytes) -> bytes:
    """Return what a worker writes beside a slot that holds all bytes of the block of `key`."""
    return hashlib.blake2b(key, digest_size=16).digest()


class SlotRegion:
    """Slots, a mark for each, and a last page that describes the worker.

    The worker creates it, as a file until the scheduler has attached it, and alone writes marks.
    The scheduler's bookkeeping decides who writes a slot's bytes: the worker, for a gather, or the
    scheduler's threads, for a promotion.
    """

    def __init__(self, file: int, handshake: WorkerHandshake, num_slots: int, pin: bool) -> None:
        self.handshake = handshake
        """Without the namespace, which may be known later."""
        self.memory = SlotMemory(num_slots, handshake.payload_bytes, pin, file=file)
        _, marks, size = _sizes(num_slots, handshake.payload_bytes)
        self._map = mmap.mmap(file, size, flags=mmap.MAP_SHARED)
        self._marks = memoryview(self._map)[marks : marks + num_slots * _MARK.size]
        self._name = memoryview(self._map)[size - _NAME.size : size]
        # Two transfers of one slot may end at once: both would read the same count.
        self._marking = threading.Lock()

    @property
    def num_slots(self) -> int:
        return self.memory.rows.shape[0]

    @property
    def namespace(self) -> bytes:
        """The namespace of the worker's blocks; empty until the worker knows it."""
        name, its_stamp, _ = _NAME.unpack(self._name)
        return bytes(name) if its_stamp == stamp(name) else b""

    def name(self, namespace: bytes) -> None:
        """Write the worker's namespace. Only for the worker."""
        _PAIR.pack_into(self._name, 0, namespace, stamp(namespace))

    def ends(self, generation: bytes) -> None:
        """Write that the weights of a generation are others now. Only for the worker."""
        _STAMP.pack_into(self._name, _PAIR.size, stamp(generation))

    def has_ended(self, generation: bytes) -> bool:
        """Whether the worker saw the weights of this generation change."""
        return bool(_STAMP.unpack_from(self._name, _PAIR.size)[0] == stamp(generation))

    def ended(self, slot: int) -> int:
        """Return how many transfers to or from `slot` the worker has ended."""
        count: int = _MARK.unpack_from(self._marks, slot * _MARK.size)[0]
        return count

    def holds(self, slot: int, key: bytes) -> bool:
        """Return whether the worker has stamped `slot` with `key`: it holds the whole block."""
        return bool(_MARK.unpack_from(self._marks, slot * _MARK.size)[1] == stamp(key))

    def end(self, slots: Sequence[int], stamps: Sequence[bytes] = ()) -> None:
        """Count an ended transfer of each slot. `stamps`: new ones, one a slot; none: unchanged."""
        with self._marking:
            for place, slot in enumerate(slots):
                ended, held = _MARK.unpack_from(self._marks, slot * _MARK.size)
                self._mark(slot, ended + 1, stamps[place] if stamps else held)

    def clear(self, slots: Sequence[int]) -> None:
        """Remove the stamps of slots that are about to be gathered into."""
        with self._marking:
            for slot in slots:
                self._mark(slot, self.ended(slot), b"")

    def _mark(self, slot: int, ended: int, held: bytes) -> None:
        _MARK.pack_into(self._marks, slot * _MARK.size, ended, held)

    def close(self) -> None:
        """Unpin the memory. It is freed with its last view, in the last process."""
        self.memory.close()


def create_region(
    engine_id: str, handshake: WorkerHandshake, num_slots: int, pin: bool, folder: Path = FOLDER
) -> SlotRegion:
    """Create a worker's region, which the caller owns, and take all of its memory; `pin` it for the
    device. Raises TierUnusable without room."""
    path = folder / _file_name(engine_id, handshake.rank)
    _remove_abandoned(folder)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise TierUnusable(
            f"another engine on this machine starts with engine_id {engine_id!r}; leave it out, "
            "or give each its own"
        ) from error
    # The lock lasts as long as the memory is mapped: `_remove_abandoned` of others sees it.
    fcntl.flock(file, fcntl.LOCK_SH)
    about, _, size = _sizes(num_slots, handshake.payload_bytes)
    text = json.dumps([num_slots, handshake.rank, handshake.payload_bytes])
    region: SlotRegion | None = None
    try:
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, text.encode().ljust(ALIGNMENT - _NAME.size), about)
        region = SlotRegion(file, handshake, num_slots, pin)
        if handshake.namespace:
            region.name(handshake.namespace)
        return region
    except OSError as error:
        raise TierUnusable(
            f"{num_slots} slots need {size} bytes in {folder} and got {error.strerror}; give "
            "that file system more room, or the chain's host memory less"
        ) from error
    finally:
        if region is None:
            path.unlink()
        os.close(file)


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of engines that were killed while they started."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone, or another user's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_uid == os.getuid():
                path.unlink(missing_ok=True)
        except OSError:
            continue  # in use
        finally:
            os.close(file)


def attach_region(engine_id: str, rank: int, folder: Path = FOLDER) -> SlotRegion:
    """Attach the region of a worker, for the caller to own, and remove its file. Raises
    TierUnusable."""
    path = folder / _file_name(engine_id, rank)
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TierUnusable(
            f"worker {rank} has no memory in {folder} that this process can share "
            f"({error.strerror}): a hosted tier needs all workers on the scheduler's machine"
        ) from error
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise TierUnusable(f"{path} belongs to another user")
        size = os.fstat(file).st_size
        text = os.pread(file, ALIGNMENT - _NAME.size, size - ALIGNMENT)
        num_slots, rank, payload = json.loads(text)
        return SlotRegion(file, WorkerHandshake(rank, b"", payload), num_slots, pin=False)
    finally:
        os.close(file)
        path.unlink()


def _file_name(engine_id: str, rank: int) -> str:
    return f"{_PREFIX}{hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()}-{rank}"


def _sizes(num_slots: int, payload_bytes: int) -> tuple[int, int, int]:
    """Return the offsets of the last page and of the marks, and the whole size, in bytes."""
    marks = num_slots * slot_stride(payload_bytes)
    about = marks + slot_stride(num_slots * _MARK.size)
    return about, marks, about + ALIGNMENT
