"""Whole loads into a device: lookup, orders, the loader's thread and its waves, to the report that
all blocks are there. `bench gpu`'s scatters are one call each, and can't show what lies between."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import ClassVar

import torch

from bench.chain_load import ChainLoads
from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import OffloadingSpec
from tiers.cpu.spec import CpuSpec
from tiers.testing import GivenSpec, MemoryStore

LOAD_BYTES = 1 << 30
LAYERS = 32
STEP_MS = 100.0
"""The compute of the step that begins a load: a prompt of another request."""


class AtOnce(GivenSpec):
    """A tier whose lookups are answered at once."""

    is_prompt: ClassVar[bool] = True


class WholeLoad:
    """A prompt's blocks in one tier, and the paged KV of a device that they are loaded into."""

    def __init__(
        self, tier: OffloadingSpec, device: str, count: int, block_bytes: int, stack: ExitStack
    ) -> None:
        shape = (count * 2, block_bytes // LAYERS)
        self.paged = {
            f"layer {i}": torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
            for i in range(LAYERS)
        }
        self.num_bytes = count * block_bytes
        self.table = random.Random(0).sample(range(count * 2), count)
        self._loads = ChainLoads(tier, self.paged, self.table, block_bytes)
        stack.callback(self._loads.close)

    def seconds(self, launch: Callable[[], object] = int) -> float:
        """Of one load; see `ChainLoads.load`."""
        began = time.perf_counter()
        self._loads.load(launch)
        return time.perf_counter() - began

    def rate(self) -> float:
        """GB/s of one load."""
        return self.num_bytes / self.seconds() / 1e9


def tiers(count: int, block_bytes: int) -> list[OffloadingSpec]:
    """Tiers that hold so many blocks: host memory, and a store that takes no time."""
    return [
        CpuSpec(type="cpu", capacity=2 * count * (block_bytes + 4096)),
        AtOnce(type="given", name="memory", max_inflight=2 * count * block_bytes).over(
            MemoryStore()
        ),
    ]


def load_cases(
    scale: Scale, limit: Callable[[int], Measure], queue: Callable[[float], Callable[[], object]]
) -> Iterator[Case]:
    """Loads by tier beside one pinned copy of as many bytes, and beside the step that begins them.
    `limit`: GB/s of a copy of so many bytes. `queue`: makes what queues compute of so many ms."""
    block_bytes = 64 << 10 if scale.smoke else 2 << 20
    count = 16 if scale.smoke else LOAD_BYTES // block_bytes
    of = f"{count} blocks of {block_bytes >> 10} KiB"
    for tier in tiers(count, block_bytes):
        with ExitStack() as stack:
            load = WholeLoad(tier, "cuda", count, block_bytes, stack)
            case = f"whole load from {tier.tier_name}, {of}"
            yield Case("gpu", case, "GB/s", load.rate, limit(load.num_bytes), target=0.9)
    small = max(1, count // 16)
    with ExitStack() as stack:
        load = WholeLoad(tiers(small, block_bytes)[0], "cuda", small, block_bytes, stack)
        launch = queue(STEP_MS)
        yield Case(
            "gpu",
            f"whole load of {small} blocks, begun by a step that computes {STEP_MS:.0f} ms",
            "ms",
            _quiet(lambda: load.seconds(launch) * 1e3),
            limit=_quiet(lambda: load.seconds() * 1e3),
            target=0.8,
        )


def _quiet(measure: Measure) -> Measure:
    """The same, on a device that has nothing to do before."""

    def run() -> float:
        torch.cuda.synchronize()
        return measure()

    return run
