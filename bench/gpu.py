"""Suite gpu: blocks between a CUDA device's paged KV and pinned slots, beside one pinned copy of
the same bytes; and what a compute stream notices of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch

from bench.blocks import both_ways, sizes
from bench.gpu_loads import load_cases
from bench.gpu_work import stand_in_cases, work_cases
from bench.main import Scale
from bench.report import Case, Measure
from tiers.contract.block_copier import Fence
from tiers.gpu.copier import open_copier
from tiers.host.slot_memory import SlotMemory

LAYERS = 32
BLOCKS = 64
"""Blocks of one batch, scattered over a paged KV of eight times as many."""
STEP_BLOCKS = 16
"""Blocks that requests complete in a step that decodes."""
STEPS = 8
LAUNCHES = 300
"""Of a step, about as many as an eager one of a small model has."""
WIDTH = 8192
"""Of the matrices whose products are a step's compute."""


class Shape(NamedTuple):
    """A model's block on one rank, of 16 tokens."""

    name: str
    layers: int
    page_bytes: int


SHAPES = (Shape("8B at TP 1", 32, 64 << 10), Shape("70B at TP 8", 80, 8 << 10))

_NAMES = (
    ("gather and scatter, slots in a row and fragmented", 0.9),
    ("compute during gathers, in steps", 1 / 1.05),
    ("compute during scatters, in steps", 1 / 1.05),
    ("a step's result to the host, beside a gather", 0.5),
    ("the engine's launches, behind a gather that waits", 0.9),
    ("whole loads, by tier", 0.9),
    ("a load beside the step that begins it", 0.8),
)


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Gather and scatter, their effect on compute, and both by block size."""
    if torch.cuda.is_available():
        yield from _all(scale, stack)
        return
    for name, target in _NAMES:
        yield Case("gpu", name, "", None, target=target, why="no CUDA device here")
    yield from stand_in_cases(SHAPES, 4 if scale.smoke else BLOCKS)


class Batch:
    """Blocks in a paged KV on the device and slots for them in pinned memory of the host, in a row
    as in a fresh pool, or anywhere among twice as many as in one that has been full."""

    def __init__(
        self,
        count: int,
        block_bytes: int,
        stack: ExitStack,
        layers: int = LAYERS,
        fragmented: bool = False,
    ) -> None:
        shape = (count * 8, block_bytes // layers)
        paged = {
            f"layer {i}": torch.ones(shape, dtype=torch.uint8, device="cuda") for i in range(layers)
        }
        self.num_bytes = count * block_bytes
        self.copier = open_copier(paged, count * 8)
        stack.callback(self.copier.close)
        memory = SlotMemory(count * 2, block_bytes, pin=True, touch=True)
        stack.callback(memory.close)
        self.rows = memory.rows
        self.slots = choose(random.Random(1), count, fragmented)
        self.blocks = random.Random(0).sample(range(count * 8), count)

    def gather(self) -> None:
        """Blocks to slots, and wait."""
        self.copier.gather(self.blocks, self.rows, self.slots).wait()

    def scatter(self, after: Fence | None = None) -> None:
        """Slots to blocks, behind a fence, and wait."""
        after = self.copier.fence() if after is None else after
        after.wait()
        self.copier.scatter(self.rows, self.slots, self.blocks, after).wait()

    def begin(self) -> float:
        """Microseconds for which a gather keeps the engine's thread."""
        began = time.perf_counter()
        copy = self.copier.gather(self.blocks, self.rows, self.slots)
        seconds = time.perf_counter() - began
        copy.wait()
        return seconds * 1e6

    def rate(self, move: Callable[[], object]) -> Measure:
        """GB/s until the device has nothing to do."""
        return rate(self.num_bytes, move)


def rate(num_bytes: int, move: Callable[[], object]) -> Measure:
    """GB/s of what moves so many bytes, until the device has nothing to do."""

    def run() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        move()
        torch.cuda.synchronize()
        return num_bytes / (time.perf_counter() - began) / 1e9

    return run


def contiguous(num_bytes: int, to_device: bool = True) -> Measure:
    """GB/s of one pinned copy of so many bytes."""
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if to_device else (host, device)
    return rate(num_bytes, lambda: target.copy_(source, non_blocking=True))


def choose(rng: random.Random, count: int, fragmented: bool) -> list[int]:
    """The slots of a batch, of twice as many."""
    return rng.sample(range(count * 2), count) if fragmented else list(range(count))


def _shapes(scale: Scale) -> Iterator[Case]:
    """Both ways for blocks of real models, and what a gather takes of the engine's thread."""
    for shape in SHAPES:
        block_bytes = shape.layers * shape.page_bytes >> (5 if scale.smoke else 0)
        of = f"{shape.name}: {{}} blocks of {block_bytes >> 10} KiB, {shape.layers} layers"
        for fragmented in (False, True):
            slots = "slots anywhere" if fragmented else "slots in a row"
            with ExitStack() as stack:
                batch = Batch(BLOCKS, block_bytes, stack, shape.layers, fragmented)
                for name, move, to_device in (
                    ("gather", batch.gather, False),
                    ("scatter", batch.scatter, True),
                ):
                    limit, ours = contiguous(batch.num_bytes, to_device), batch.rate(move)
                    case = f"{name}, {of.format(BLOCKS)}, {slots}"
                    yield Case("gpu", case, "GB/s", ours, limit, target=0.9)
                if fragmented:
                    yield from work_cases(batch, of.format(BLOCKS), BLOCKS)
            with ExitStack() as stack:
                batch = Batch(STEP_BLOCKS, block_bytes, stack, shape.layers, fragmented)
                case = f"the engine's thread, {of.format(STEP_BLOCKS)}, {slots}"
                yield Case("gpu", case, "us", batch.begin)


def _all(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    yield from _shapes(scale)
    block_bytes = 64 << 10 if scale.smoke else 2 << 20
    batch = Batch(BLOCKS, block_bytes, stack)
    of = f"{BLOCKS} blocks of {block_bytes >> 10} KiB, {LAYERS} layers"
    with ThreadPoolExecutor(1) as loader:
        work = Work(256 if scale.smoke else WIDTH, batch)
        for name, copies in (("gathers", _gathers(batch)), ("scatters", _scatters(batch, loader))):
            yield Case(
                "gpu",
                f"compute during {name}, {STEPS} steps, each with {of}",
                "ms",
                work.timed(copies),
                limit=work.timed(lambda: None),
                target=1 / 1.05,
            )
        beside = Batch(4 * BLOCKS, block_bytes, stack)
        yield from _tokens_copy(work, beside)
        yield from _launches(work, beside)
        yield from load_cases(scale, contiguous, work.queue)
    yield from _by_block_size(scale)


class Work:
    """Steps of matrix products on the current stream, each about as long as one gather, so that
    copies are under way all the time."""

    def __init__(self, width: int, batch: Batch) -> None:
        self._one = torch.ones((width, width), dtype=torch.float16, device="cuda")
        self._product = torch.empty_like(self._one)
        self._products = 1
        gather, step = batch.rate(batch.gather), self.timed(lambda: None)
        gather(), step()  # the first of each sets things up
        gather_ms = batch.num_bytes / gather() / 1e6
        self._products = max(1, int(gather_ms / (step() / STEPS)))

    def queue(self, milliseconds: float) -> Callable[[], object]:
        """What queues products that take so long."""
        step = self.timed(lambda: None)() / STEPS / self._products
        count = max(1, int(milliseconds / step))

        def launch() -> None:
            for _ in range(count):
                torch.mm(self._one, self._one, out=self._product)

        return launch

    def timed(self, between: Callable[[], Callable[[], object] | None]) -> Measure:
        """Milliseconds of all steps on the device. After each but the last `between` begins a copy
        behind it; what it returns waits for that copy, and is called when all steps are done."""

        def run() -> float:
            torch.cuda.synchronize()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            waits = []
            began.record()
            for step in range(STEPS):
                for _ in range(self._products):
                    torch.mm(self._one, self._one, out=self._product)
                if step < STEPS - 1:
                    waits.append(between())
            ended.record()
            for wait in waits:
                if wait is not None:
                    wait()
            torch.cuda.synchronize()
            return float(began.elapsed_time(ended))

        return run


def _gathers(batch: Batch) -> Callable[[], Callable[[], object]]:
    def begin() -> Callable[[], object]:
        copy = batch.copier.gather(batch.blocks, batch.rows, batch.slots)
        return copy.wait

    return begin


def _scatters(batch: Batch, loader: ThreadPoolExecutor) -> Callable[[], Callable[[], object]]:
    def begin() -> Callable[[], object]:
        copy: Future[None] = loader.submit(batch.scatter, batch.copier.fence())
        return copy.result

    return begin


def _tokens_copy(work: Work, batch: Batch) -> Iterator[Case]:
    """What an engine reads of a step's result, a few bytes, beside a gather of all of its blocks:
    both cross the bus the same way."""
    beside = torch.cuda.Stream()
    device = torch.zeros(16, dtype=torch.int64, device="cuda")
    host = torch.zeros(16, dtype=torch.int64, pin_memory=True)

    def arrives(begin: Callable[[], Callable[[], object]]) -> Measure:
        def run() -> float:
            torch.cuda.synchronize()
            work.queue(1.0)()
            computed, arrived = torch.cuda.Event(), torch.cuda.Event(blocking=True)
            computed.record()
            wait = begin()
            with torch.cuda.stream(beside):
                beside.wait_event(computed)
                host.copy_(device, non_blocking=True)
                arrived.record()
            computed.synchronize()
            began = time.perf_counter()
            arrived.synchronize()
            took = time.perf_counter() - began
            wait()
            return took * 1e6

        return run

    case = f"a step's result to the host, beside a gather of {4 * BLOCKS} blocks"
    alone = arrives(lambda: lambda: None)
    yield Case("gpu", case, "us", arrives(_gathers(batch)), limit=alone, target=0.5)


def _launches(work: Work, batch: Batch) -> Iterator[Case]:
    """The next step's launches, by the engine's thread, while the step is computed that a gather
    waits for: the thread that queues the gather has the driver and the interpreter, too."""
    small, compute = torch.ones(8, device="cuda"), work.queue(20.0)

    def takes(begin: Callable[[], Callable[[], object]]) -> Measure:
        def run() -> float:
            torch.cuda.synchronize()
            compute()
            wait = begin()
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                small.add_(1)
            took = time.perf_counter() - began
            wait()
            return took * 1e6

        return run

    case = f"the engine's launches, {LAUNCHES}, behind a gather of {4 * BLOCKS} blocks that waits"
    alone = takes(lambda: lambda: None)
    yield Case("gpu", case, "us", takes(_gathers(batch)), limit=alone, target=0.9)


def _by_block_size(scale: Scale) -> Iterator[Case]:
    for size, count in sizes(scale):
        with ExitStack() as stack:
            batch = Batch(count, size, stack)
            store, load = batch.rate(batch.gather), batch.rate(batch.scatter)
            yield from both_ways("gpu", "gpu", size, store, load)
