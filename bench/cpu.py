"""Suite cpu: blocks between an engine's paged KV and the host pool, beside memcpy.

The limit is one memcpy of all bytes. The peer moves the same pieces, of one layer and block each,
by a memcpy each, and does nothing else: what is between the two is the C library's choice, which
writes past the processor's caches only in copies of some hundred KiB (docs/operations.md).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from bench.blocks import both_ways, sizes
from bench.chain_load import ChainLoads
from bench.main import Scale
from bench.report import Case, Measure, rate
from tiers.cpu.spec import CpuSpec
from tiers.gpu.copier import open_copier
from tiers.host.slot_memory import SlotMemory
from tiers.host.slots import slot_stride

LAYERS = 32
BLOCKS = 64
"""Blocks of one batch, scattered over a paged KV of eight times as many."""


class Batch:
    """Blocks in a paged KV, and slots for them."""

    def __init__(self, count: int, block_bytes: int, stack: ExitStack) -> None:
        self.piece_bytes = block_bytes // LAYERS
        shape = (count * 8, self.piece_bytes)
        self.paged = {f"layer {i}": torch.ones(shape, dtype=torch.uint8) for i in range(LAYERS)}
        self.blocks = random.Random(0).sample(range(count * 8), count)
        self.num_bytes = count * block_bytes
        self._copier = open_copier(self.paged, count * 8)
        stack.callback(self._copier.close)
        memory = SlotMemory(count, block_bytes, pin=False, touch=True)
        stack.callback(memory.close)
        self._rows, self._slots = memory.rows, list(range(count))
        self._pieces = self._addresses(memory)

    def _addresses(self, memory: SlotMemory) -> list[tuple[int, int]]:
        """Where each piece is in the paged KV, and in its slot."""
        size = self.piece_bytes
        slots = [memory.rows[slot].data_ptr() for slot in self._slots]
        layers = [layer.data_ptr() for layer in self.paged.values()]
        return [
            (layer + block * size, slot + number * size)
            for block, slot in zip(self.blocks, slots, strict=True)
            for number, layer in enumerate(layers)
        ]

    def pieces_out(self) -> None:
        """A memcpy of each piece to its slot."""
        for paged, slot in self._pieces:
            ctypes.memmove(slot, paged, self.piece_bytes)

    def pieces_in(self) -> None:
        """A memcpy of each piece from its slot."""
        for paged, slot in self._pieces:
            ctypes.memmove(paged, slot, self.piece_bytes)

    def gather(self) -> None:
        """Blocks to slots."""
        self._copier.gather(self.blocks, self._rows, self._slots).wait()

    def scatter(self) -> None:
        """Slots to blocks."""
        copier = self._copier
        copier.scatter(self._rows, self._slots, self.blocks, copier.fence()).wait()

    def rate(self, move: Callable[[], object]) -> Measure:
        """GB/s of moving all."""
        return rate(self.num_bytes, move)


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Gather and scatter of 64 scattered blocks from 32 layers, and a whole load of them; then
    gather and scatter by block size."""
    block_bytes = 64 << 10 if scale.smoke else 2 << 20
    batch = Batch(BLOCKS, block_bytes, stack)
    room = 2 * BLOCKS * slot_stride(block_bytes)
    loads = ChainLoads(CpuSpec(capacity=room), batch.paged, batch.blocks, block_bytes)
    stack.callback(loads.close)
    of = f"64 blocks of {block_bytes >> 10} KiB, 32 layers"
    copy, gather = memcpy(batch.num_bytes), batch.rate(batch.gather)
    out, into = batch.rate(batch.pieces_out), batch.rate(batch.pieces_in)
    name = "memcpy by pieces"
    yield Case("cpu", f"gather {of}", "GB/s", gather, copy, out, name, target=0.8)
    scatter = batch.rate(batch.scatter)
    yield Case("cpu", f"scatter {of}", "GB/s", scatter, copy, into, name, target=0.8)
    yield Case(
        "cpu",
        f"CPU tier load end to end, {of} (limit: gather)",
        "GB/s",
        batch.rate(loads.load),
        limit=gather,
        target=0.9,
    )
    yield from _by_block_size(scale)


def _by_block_size(scale: Scale) -> Iterator[Case]:
    for size, count in sizes(scale):
        with ExitStack() as stack:
            batch = Batch(count, size, stack)
            store, load = batch.rate(batch.gather), batch.rate(batch.scatter)
            yield from both_ways("cpu", "cpu", size, store, load)


def memcpy(num_bytes: int) -> Measure:
    """One thread's copy of so many bytes, at once."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.ones(num_bytes, dtype=torch.uint8)
    return rate(num_bytes, lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes))
