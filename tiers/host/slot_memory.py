"""The bytes of the host pool: its slots, through which every block passes, and their pages."""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from math import lcm

import torch

from spec.fields import format_size
from tiers.concurrency.numa import bind
from tiers.errors import TierUnusable
from tiers.host.slots import slot_stride

logger = logging.getLogger(__name__)

REGISTER_BYTES = 64 << 20
"""Most bytes that are provided or pinned by one call, but for a slot that is larger: what is
unpinned and given back at once. Drivers refuse calls of 512 GiB, and on some hosts of 96."""
STEP = 1 << 30
"""Bytes provided and pinned between two checks of the memory left."""
PROVIDERS = 4
SAY_SECONDS = 5.0
MAP_NORESERVE = 0x4000
"""Of Linux on most processors; Python names it from 3.13 on. On others `mmap` may refuse."""
MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python has no name for it."""
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def pinned_together(stride: int) -> int:
    """How many slots are pinned by one call, as whole pages. A device's copy ends before the next
    multiple of these: CUDA refuses one that crosses from one call's memory into another's."""
    whole = lcm(stride, mmap.PAGESIZE) // stride
    return max(1, REGISTER_BYTES // stride // whole) * whole


class SlotMemory:
    """One worker's slots: page-aligned host memory, pinned when `pin` is set.

    With `touch` the system provides all of it now, not at first use. Huge pages, where it has any,
    halve what that takes (0.38 s per GiB instead of 0.73, measured in a virtual machine).
    What is pinned is provided in steps, before each of which `check` hears its bytes and may raise.
    A forked child has none of it. With `reserve`, a number of slots, it can grow to as many: their
    addresses are set aside, and `rows` keeps its own. What is pinned is then whole pieces of
    `REGISTER_BYTES`, the last of which may go beyond the last slot. With `cpus` it is provided by
    those processors, and so at their node. It is pinned for `device`; None: the calling thread's.
    Owner of the bytes until `close`; views handed out must not outlive it.
    """

    def __init__(
        self,
        num_slots: int,
        payload_bytes: int,
        pin: bool,
        touch: bool = False,
        check: Callable[[int], None] = lambda size: None,
        reserve: int = 0,
        cpus: frozenset[int] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        self.payload_bytes = payload_bytes
        self._stride = stride = slot_stride(payload_bytes)
        self._piece = pinned_together(stride) * stride
        self._pin, self._cpus = pin, cpus
        # Threads that change a chain have none set: a context on the first one is another rank's.
        self._on_device = nullcontext if device is None else partial(torch.cuda.device, device)
        self._map = _map(max(1, num_slots) * stride, reserve * stride)
        # After a fork a slot's next write would go to a new page, while a device still copies the
        # old one; or, with newer kernels, the fork itself copies all that is pinned.
        self._map.madvise(mmap.MADV_DONTFORK)
        _prefer_huge_pages(self._map, touch and not pin)
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = flat.data_ptr()
        self._all_rows = flat[: len(flat) // stride * stride].view(-1, stride)
        self._view = memoryview(self._map)
        self._pinned: list[int] = []
        self._end = 0
        """Bytes that there are, from the start; all are provided if they are pinned."""
        self.rows = self._all_rows[:0]
        """All slots: uint8, shape (num_slots, slot_stride); a payload and then padding."""
        self.grow(num_slots, check)

    def _whole(self, size: int) -> int:
        """Bytes to have for `size`: of pinned memory whole pieces, as far as it can grow."""
        pieces = -(-size // self._piece) * self._piece
        return min(pieces, self._all_rows.nbytes) if self._pin else size

    def grow(self, num_slots: int, check: Callable[[int], None] = lambda size: None) -> None:
        """Have so many slots, provided and pinned in steps. Raises TierUnusable, and what `check`
        raises; then nothing has changed. Copies in flight go on."""
        if num_slots > len(self._all_rows):
            room = format_size(self._all_rows.nbytes)
            raise TierUnusable(f"{room} of addresses were set aside for it when the engine began")
        before, end = self._end, self._whole(num_slots * self._stride)
        if self._pin and end > before:
            try:
                self._provide(before, end, check)
            except (TierUnusable, OSError):
                with suppress(TierUnusable):  # a device that has failed unpins nothing
                    self._release(before, end)
                raise
        self._end = max(before, end)
        self.rows = self._all_rows[:num_slots]

    def _provide(self, start: int, end: int, check: Callable[[int], None]) -> None:
        """Have the system provide all pages of a range, on several threads, and pin them, in steps:
        a device that pins nothing says so within the first. Pinning alone would provide them, too,
        on one thread, for a minute without a log line."""
        log, step = PinningLog(end - start), max(1, STEP // self._piece) * self._piece
        with ThreadPoolExecutor(PROVIDERS, "kvtiers-provide", bind, (self._cpus,)) as pool:
            for first in range(start, end, step):
                last = min(first + step, end)
                check(last - first)
                starts = range(first, last, self._piece)
                places = [self._address + at for at in starts]
                sizes = [min(self._piece, last - at) for at in starts]
                list(pool.map(_populate, places, sizes))
                log.reached(last - start, "provided")
                for place, size in zip(places, sizes, strict=True):
                    with self._on_device():
                        register(place, size)
                    self._pinned.append(place)
                    log.reached(place + size - self._address - start, "pinned")
        log.ended()

    def shrink(self, num_slots: int) -> bool:
        """Give back a piece of the memory behind the first `num_slots` slots, which nothing uses
        any more; return whether there may be more. Raises TierUnusable if it can't be unpinned."""
        self.rows = self._all_rows[: min(num_slots, len(self.rows))]
        end = self._whole(num_slots * self._stride)
        if self._end <= end:
            return False
        start = max(end, (self._end - 1) // self._piece * self._piece)
        self._release(start, self._end)
        self._end = start
        return start > end

    def _release(self, start: int, end: int) -> None:
        """Unpin what is pinned of a range, and give back the pages that begin in it."""
        while self._pinned and self._pinned[-1] >= self._address + start:
            with self._on_device():
                unregister(self._pinned[-1])
            self._pinned.pop()
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # slots before it may share a page
        # By ctypes, which lets other threads run meanwhile.
        _madvise(self._address + start, max(0, end - start), mmap.MADV_DONTNEED)

    def move(self, slot: int, target: int) -> None:
        """Copy one slot's payload to another; other threads run meanwhile."""
        ctypes.memmove(self.address(target), self.address(slot), self.payload_bytes)

    def address(self, slot: int) -> int:
        """Where the bytes of one slot begin."""
        return self._address + slot * self._stride

    def payload(self, slot: int) -> memoryview:
        """The bytes of one slot, writable."""
        start = slot * self._stride
        return self._view[start : start + self.payload_bytes]

    def close(self) -> None:
        """Unpin. The memory goes back with the last view of it. Idempotent."""
        while self._pinned:
            # A device that has failed unpins nothing; what is closed next must be, all the same.
            address = self._pinned.pop()
            with suppress(TierUnusable, RuntimeError), self._on_device():
                unregister(address)


def _map(length: int, reserve: int) -> mmap.mmap:
    """Fresh memory of `length` bytes, or of `reserve` if those are more and can be had."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if reserve > length:
        with suppress(OSError):
            return mmap.mmap(-1, reserve, flags | MAP_NORESERVE)
    return mmap.mmap(-1, length, flags)


def _prefer_huge_pages(memory: mmap.mmap, touch: bool) -> None:
    # Kernels without huge pages, or before 5.14, can't: then pages come one by one, at first use.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    if touch:
        with suppress(OSError):
            memory.madvise(MADV_POPULATE_WRITE)


def register(address: int, size: int) -> None:
    """Pin memory for CUDA. Raises TierUnusable."""
    _cuda_check(torch.cuda.cudart().cudaHostRegister(address, size, 0))


def unregister(address: int) -> None:
    """Unpin what was pinned from this address on."""
    _cuda_check(torch.cuda.cudart().cudaHostUnregister(address))


class NotPinned(TierUnusable):
    """A driver refuses to pin memory, and not for want of any: less of it would not help."""


def _cuda_check(status: int) -> None:
    if int(status) != 0:
        # CUDA tells the error once more to who checks next: the engine, behind its next kernel.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        kind = TierUnusable if int(status) == 2 else NotPinned  # cudaErrorMemoryAllocation
        raise kind(f"pinning host memory failed with CUDA error {int(status)}")


class PinningLog:
    """Says how far pinning is: its begin, each five seconds and its end, from 1 GiB on."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._speaks = length >= STEP
        self._began = self._said = time.monotonic()
        if self._speaks:
            logger.info("pinning %s of host memory", format_size(length))

    def reached(self, done: int, what: str) -> None:
        """So many bytes are provided, or pinned."""
        if self._speaks and time.monotonic() - self._said >= SAY_SECONDS:
            self._said = time.monotonic()
            sizes = format_size(done), format_size(self._length)
            logger.info("pinning host memory: %s of %s are %s", *sizes, what)

    def ended(self) -> None:
        if self._speaks:
            logger.info("pinning host memory: done after %.1f s", time.monotonic() - self._began)


def _populate(address: int, size: int) -> None:
    if _madvise(address, size, MADV_POPULATE_WRITE) != 0:
        ctypes.memset(address, 0, size)  # an older kernel; fresh memory is zero already
