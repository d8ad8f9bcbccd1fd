"""The bytes of the host pool: slots of host memory through which every block enters and leaves."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch

from tiers.errors import TierUnusable
from tiers.host.prefault import MADV_POPULATE_WRITE, PinningLog, provide

ALIGNMENT = 4096
"""Slots start at multiples of this: what direct I/O asks of addresses, to be safe everywhere."""

REGISTER_BYTES = 16 << 30
"""Most bytes that are pinned by one call, but for a slot that is larger. Drivers refuse calls of
512 GiB, and on some hosts of 96."""


def slot_stride(payload_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-payload_bytes // ALIGNMENT) * ALIGNMENT


def slots_within(budget: int, payload_bytes: int, world_size: int) -> int:
    """How many slots each of `world_size` ranks gets of a budget in bytes for all of them."""
    return budget // world_size // slot_stride(payload_bytes)


def pinned_together(stride: int) -> int:
    """How many slots are pinned by one call. A copy between a device and slots ends before the next
    multiple of these: CUDA refuses one that crosses from one call's memory into another's."""
    return max(1, REGISTER_BYTES // stride)


class SlotMemory:
    """One worker's slots: page-aligned host memory, pinned when `pin` is set.

    With `touch` the system provides all of it now, not at first use. Huge pages, where it has any,
    halve what that takes (0.38 s per GiB instead of 0.73, measured in a virtual machine).
    What is pinned is provided in steps, before each of which `check` hears its bytes and may raise.
    With `file`, a descriptor of the caller's, it is the start of that file, shared with others;
    else a forked child has none of it.
    Owner of the bytes until `close`; views handed out must not outlive it.
    """

    def __init__(
        self,
        num_slots: int,
        payload_bytes: int,
        pin: bool,
        touch: bool = False,
        file: int | None = None,
        check: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.payload_bytes = payload_bytes
        stride = slot_stride(payload_bytes)
        length = max(1, num_slots) * stride
        if file is None:
            self._map = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # After a fork a slot's next write would go to a new page, while a device still copies
            # the old one; or, with newer kernels, the fork itself copies all that is pinned.
            self._map.madvise(mmap.MADV_DONTFORK)
            _prefer_huge_pages(self._map, touch)
        else:
            self._map = mmap.mmap(file, length, mmap.MAP_SHARED)
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self.rows = flat.view(-1, stride)[:num_slots]
        """All slots: uint8, shape (num_slots, slot_stride); a payload and then padding."""
        self._view = memoryview(self._map)
        self._stride = stride
        self._pinned: list[int] = []
        if pin:
            self._pin(flat.data_ptr(), flat.nbytes, pinned_together(stride) * stride, check)

    def _pin(self, address: int, length: int, step: int, check: Callable[[int], None]) -> None:
        log = PinningLog(length)
        provide(address, length, check, log)
        for start in range(0, length, step):
            size = min(step, length - start)
            try:
                register(address + start, size)
            except TierUnusable:
                self.close()
                raise
            self._pinned.append(address + start)
            log.reached(start + size, "pinned")
        log.ended()

    def payload(self, slot: int) -> memoryview:
        """The bytes of one slot, writable."""
        start = slot * self._stride
        return self._view[start : start + self.payload_bytes]

    def close(self) -> None:
        """Unpin. The memory goes back with the last view of it. Idempotent."""
        while self._pinned:
            # A device that has failed unpins nothing; what is closed next must be, all the same.
            with suppress(TierUnusable, RuntimeError):
                unregister(self._pinned.pop())


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


def _cuda_check(status: int) -> None:
    if int(status) != 0:
        # CUDA tells the error once more to who checks next: the engine, behind its next kernel.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        raise TierUnusable(f"pinning host memory failed with CUDA error {int(status)}")
