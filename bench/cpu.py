"""Suite cpu: blocks between an engine's paged KV and the host pool, beside memcpy."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.cpu_load import CpuLoads
from bench.main import Scale
from bench.report import Case, Measure
from tiers.gpu.copier import open_copier
from tiers.pool import SlotMemory

LAYERS = 32
BLOCKS = 64
"""Blocks of one batch, scattered over a paged KV of eight times as many."""


@dataclass
class _Batch:
    paged: dict[str, torch.Tensor]
    blocks: list[int]
    memory: SlotMemory
    num_bytes: int


def _batch(block_bytes: int) -> _Batch:
    page = block_bytes // LAYERS
    shape = (BLOCKS * 8, page)
    paged = {f"layer {i}": torch.ones(shape, dtype=torch.uint8) for i in range(LAYERS)}
    blocks = random.Random(0).sample(range(BLOCKS * 8), BLOCKS)
    memory = SlotMemory(BLOCKS, block_bytes, pin=False, touch=True)
    return _Batch(paged, blocks, memory, BLOCKS * block_bytes)


@contextmanager
def cases(scale: Scale) -> Iterator[Iterator[Case]]:
    """Gather and scatter of 64 scattered blocks from 32 layers, and a whole load of them."""
    batch = _batch(64 << 10 if scale.smoke else 2 << 20)
    copier = open_copier(batch.paged, BLOCKS * 8)
    loads = CpuLoads(batch.paged, batch.blocks, batch.num_bytes // BLOCKS)
    rows, slots = batch.memory.rows, list(range(BLOCKS))
    copy = memcpy(batch.num_bytes)
    name = f"64 blocks of {batch.num_bytes // BLOCKS >> 10} KiB, 32 layers"
    gather = _rate(batch, lambda: copier.gather(batch.blocks, rows, slots).wait())
    try:
        yield iter(
            [
                Case(
                    "cpu",
                    f"gather {name}",
                    "GB/s",
                    gather,
                    limit=copy,
                    target=0.8,
                ),
                Case(
                    "cpu",
                    f"scatter {name}",
                    "GB/s",
                    _rate(batch, lambda: copier.scatter(rows, slots, batch.blocks, copier.fence())),
                    limit=copy,
                    target=0.8,
                ),
                Case(
                    "cpu",
                    f"CPU tier load end to end, {name} (limit: gather)",
                    "GB/s",
                    _rate(batch, loads.load),
                    limit=gather,
                    target=0.9,
                ),
            ]
        )
    finally:
        loads.close()
        copier.close()
        batch.memory.close()


def _rate(batch: _Batch, move: Callable[[], object]) -> Measure:
    def run() -> float:
        began = time.perf_counter()
        move()
        return batch.num_bytes / (time.perf_counter() - began) / 1e9

    return run


def memcpy(num_bytes: int) -> Measure:
    """One thread's copy of so many bytes, at once."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.ones(num_bytes, dtype=torch.uint8)

    def run() -> float:
        began = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        return num_bytes / (time.perf_counter() - began) / 1e9

    return run
