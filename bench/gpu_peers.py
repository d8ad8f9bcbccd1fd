"""Copies of blocks beside what else could copy them: one large copy of the same bytes, a batched
copy of the driver (cuMemcpyBatchAsync), and vLLM's own (`swap_blocks_batch`) where vLLM is.

    python -m bench.gpu_peers FILE

Each way moves the same pages between the same paged KV and the same slots, queues a wave of 32 MiB
at a time, as loads do, and is looked at byte for byte before it is measured. Rows are written after
each case, in the form of `python -m bench --json`.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu import BLOCKS, SHAPES, Shape
from bench.report import Case, Measure, Row, measure, write_json
from tiers.contract.block_copier import Copy as Queued
from tiers.gpu.bus import BATCHED, Batch
from tiers.gpu.copier import open_copier
from tiers.host.slot_memory import SlotMemory

SUITE = "gpu"
WAVE_BYTES = 32 << 20
"""What a load puts into the paged KV at a time."""
ROUNDS = 3
OF_VLLM = "vLLM's swap_blocks_batch"


class Pages(NamedTuple):
    """Copies of one wave: where each begins, where it goes, and its bytes; int64 on the host."""

    sources: torch.Tensor
    targets: torch.Tensor
    sizes: torch.Tensor


Copy = Callable[[Pages], None]
"""Queues the copies of a wave on the current stream."""


def batched(batch: Batch, stream: Callable[[], int]) -> Copy:
    """Copies by the driver's batched copy, on the stream of a handle."""

    def copy(pages: Pages) -> None:
        places = pages.targets.data_ptr(), pages.sources.data_ptr(), pages.sizes.data_ptr()
        if code := batch.queue(places, len(pages.sizes), stream()):
            raise RuntimeError(f"{BATCHED}: error {code}")

    return copy


def _peers() -> dict[str, Copy | str]:
    """The ways to copy pages that are here; of others why they are not."""
    found: dict[str, Copy | str] = {}
    beside = torch.cuda.Stream()  # the driver refuses batches on the default one
    try:
        batch = Batch(ctypes.CDLL("libcuda.so.1"))
        found[BATCHED] = batched(batch, lambda: beside.cuda_stream)
    except (OSError, AttributeError) as error:
        found[BATCHED] = str(error)
    try:
        import vllm._C_stable_libtorch  # noqa: F401 - registers the operators

        swap = torch.ops._C_cache_ops.swap_blocks_batch
        found[OF_VLLM] = _on(beside, lambda pages: swap(*pages, False))
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        found[OF_VLLM] = str(error)
    return found


def _on(stream: torch.cuda.Stream, copy: Copy) -> Copy:
    def run(pages: Pages) -> None:
        with torch.cuda.stream(stream):
            copy(pages)

    return run


class Blocks:
    """Blocks of a shape anywhere in a paged KV, and slots for them, a wave after the other."""

    def __init__(self, shape: Shape, count: int, device: str) -> None:
        self._device = device
        self.num_bytes = count * shape.layers * shape.page_bytes
        paged_blocks = count * 4
        self._paged = {
            f"layer {i}": torch.zeros(
                (paged_blocks, shape.page_bytes), dtype=torch.uint8, device=device
            )
            for i in range(shape.layers)
        }
        self._copier = open_copier(self._paged, paged_blocks)
        block_bytes = shape.layers * shape.page_bytes
        self._memory = SlotMemory(count, block_bytes, pin=device != "cpu", touch=True)
        self._slots = self._memory.rows[:, :block_bytes]
        self._blocks = random.Random(0).sample(range(paged_blocks), count)
        step = max(1, WAVE_BYTES // block_bytes)
        self._waves = [range(at, min(at + step, count)) for at in range(0, count, step)]
        self._pages = {way: [self._of(wave, way) for wave in self._waves] for way in (False, True)}
        self._here = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        self._there = torch.zeros(self.num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")

    def _of(self, wave: range, to_device: bool) -> Pages:
        """Every page of a wave's blocks."""
        layers = list(self._paged.values())
        size = layers[0].shape[1]
        pairs = [
            (self._slots[slot].data_ptr() + i * size, layer[self._blocks[slot]].data_ptr())
            for slot in wave
            for i, layer in enumerate(layers)
        ]
        slots, paged = torch.tensor(pairs, dtype=torch.int64).t().contiguous()
        sizes = torch.full_like(slots, size)
        return Pages(slots, paged, sizes) if to_device else Pages(paged, slots, sizes)

    def ours(self, to_device: bool) -> None:
        """Copy all blocks by our copier."""
        queued: list[Queued] = []
        for wave in self._waves:
            blocks, slots = [self._blocks[slot] for slot in wave], list(wave)
            if to_device:
                (fence := self._copier.fence()).wait()
                queued.append(self._copier.scatter(self._memory.rows, slots, blocks, fence))
            else:
                queued.append(self._copier.gather(blocks, self._memory.rows, slots))
        for one in queued:
            one.wait()

    def by(self, copy: Copy, to_device: bool) -> None:
        """Copy all blocks another way."""
        for pages in self._pages[to_device]:
            copy(pages)
        self._settle()

    def at_once(self, to_device: bool) -> None:
        """One copy of as many bytes."""
        target, source = (self._here, self._there) if to_device else (self._there, self._here)
        target.copy_(source, non_blocking=True)

    def check(self, move: Callable[[bool], None], seed: int) -> None:
        """Let bytes go there, and back. Raises ValueError if others arrive."""
        made = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 256, self._slots.shape, dtype=torch.uint8, generator=made)
        self._slots.copy_(drawn)
        move(True)
        self._settle()
        there = [layer[self._blocks].cpu() for layer in self._paged.values()]
        self._slots.zero_()
        move(False)
        self._settle()
        for which, found in (("there", torch.cat(there, 1)), ("back", self._slots)):
            if not torch.equal(found, drawn):
                raise ValueError(f"on the way {which} other bytes arrived than were sent")

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def rate(self, move: Callable[[], object]) -> Measure:
        """GB/s until the device has nothing to do."""

        def run() -> float:
            self._settle()
            began = time.perf_counter()
            move()
            self._settle()
            return self.num_bytes / (time.perf_counter() - began) / 1e9

        return run

    def close(self) -> None:
        self._copier.close()
        self._memory.close()


def cases(
    device: str,
    peers: dict[str, Copy | str],
    shapes: Sequence[Shape] = SHAPES,
    count: int = 4 * BLOCKS,
) -> Iterator[Case]:
    """Each shape both ways, beside each peer; a peer that copies wrong ends it with ValueError."""
    for shape in shapes:
        blocks = Blocks(shape, count, device)
        try:
            yield from _of_shape(blocks, shape, count, peers)
        finally:
            blocks.close()


def _of_shape(
    blocks: Blocks, shape: Shape, count: int, peers: dict[str, Copy | str]
) -> Iterator[Case]:
    blocks.check(blocks.ours, seed=1)
    kib = shape.layers * shape.page_bytes >> 10
    for name, peer in peers.items():
        for verb, to_device in (("gather", False), ("scatter", True)):
            case = f"{verb} in waves, {shape.name}: {count} blocks of {kib} KiB, beside {name}"
            if isinstance(peer, str):
                yield Case(SUITE, case, "GB/s", None, why=f"{name}: {peer}", target=1, of="peer")
                continue
            copy = peer
            blocks.check(lambda way, copy=copy: blocks.by(copy, way), seed=2)  # type: ignore[misc]
            yield Case(
                SUITE,
                case,
                "GB/s",
                blocks.rate(lambda way=to_device: blocks.ours(way)),  # type: ignore[misc]
                limit=blocks.rate(lambda way=to_device: blocks.at_once(way)),  # type: ignore[misc]
                peer=blocks.rate(lambda copy=copy, way=to_device: blocks.by(copy, way)),  # type: ignore[misc]
                peer_name=name,
                target=1,
                of="peer",
            )


def main(file: Path) -> None:
    """Measure all cases; without a device, say so in one row."""
    rows: list[Row] = []
    if not torch.cuda.is_available():
        why = "no CUDA device here"
        rows = [measure(Case(SUITE, "gather and scatter in waves", "", None, why=why), ROUNDS)]
        write_json(file, rows)
        return
    for case in cases("cuda", _peers()):
        rows.append(measure(case, ROUNDS))
        write_json(file, rows)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
