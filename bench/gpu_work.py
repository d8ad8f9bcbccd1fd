"""What queuing copies takes of the host's processor, for each block: slots anywhere, all runs of a
wave by one call of the driver, beside a call for each run. On a device, and where there is none on
a stand-in that takes everything and does nothing: what is left is ours, without what the driver and
PyTorch's streams take."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch

from bench.report import Case, Measure
from tiers.gpu import cuda
from tiers.gpu.bus import Batch, Bus
from tiers.gpu.cuda import CudaCopier
from tiers.host.slots import slot_stride

REPEATS = 50
"""Copies of one round: one by itself takes less than the clock tells."""
PEER = "a call for each run"


class Counts:
    """Calls of the stand-in: batches of copies, launches, and waits of the host."""

    def __init__(self) -> None:
        self.batches = self.launches = self.waits = 0


class _Taken(Batch):
    """A function of C in the driver's place, which does nothing."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        function = ctypes.CDLL(None).pthread_condattr_destroy
        self._use(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def queue(self, places: tuple[int, int, int], count: int, stream: int) -> int:
        """Count it."""
        self._counts.batches += 1
        return super().queue(places, count, stream)


@contextmanager
def stand_in() -> Iterator[Counts]:
    """Put a device that does nothing in the place of `torch.cuda`; its memory is of torch's device
    `meta`, which has addresses and no bytes."""
    from tiers.gpu.page_kernel import KernelCopies

    counts = Counts()

    def wait() -> None:
        counts.waits += 1

    def launch(*args: Any, **options: Any) -> None:
        counts.launches += 1

    def copies(pages: Sequence[torch.Tensor]) -> KernelCopies:
        made = KernelCopies(pages, 8)
        made.copy = launch  # type: ignore[method-assign]
        return made

    def ignore(*args: Any) -> None:
        """Do nothing."""

    event = SimpleNamespace(record=ignore, synchronize=wait)
    stream = SimpleNamespace(cuda_stream=1, wait_event=ignore)
    with ExitStack() as stack:
        in_place: dict[str, Callable[..., Any]] = {
            "Event": lambda blocking=False: event,
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": lambda stream: nullcontext(),
            "device": lambda device: nullcontext(),
            "synchronize": ignore,
        }
        for name, one in in_place.items():
            stack.enter_context(patch.object(torch.cuda, name, one))
        stack.enter_context(patch.object(cuda, "open_copies", copies))
        stack.enter_context(patch.object(cuda, "open_bus", lambda *args: Bus(_Taken(counts))))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda self: self))
        yield counts


class Moves(Protocol):
    """Blocks and slots, and the copies between them."""

    copier: Any

    def gather(self) -> None:
        """Blocks to slots."""

    def scatter(self) -> None:
        """Slots to blocks."""


class Nowhere:
    """Blocks of the stand-in, anywhere in a paged KV, and slots anywhere among twice as many."""

    def __init__(self, layers: int, page_bytes: int, count: int) -> None:
        # Of one tensor, since each begins at address 0.
        whole = torch.empty(layers, 2 * count, page_bytes, dtype=torch.uint8, device="meta")
        paged = {f"layer {i}": layer for i, layer in enumerate(whole)}
        stride = slot_stride(layers * page_bytes)
        self._rows = torch.empty(2 * count, stride, dtype=torch.uint8, device="meta")
        self.copier = CudaCopier(paged, 2 * count)
        rng = random.Random(0)
        self._blocks, self._slots = (rng.sample(range(2 * count), count) for _ in range(2))

    def gather(self) -> None:
        """Blocks to slots."""
        self.copier.gather(self._blocks, self._rows, self._slots).wait()

    def scatter(self) -> None:
        """Slots to blocks."""
        (fence := self.copier.fence()).wait()
        self.copier.scatter(self._rows, self._slots, self._blocks, fence).wait()


def work_cases(moves: Moves, of: str, count: int) -> Iterator[Case]:
    """Both ways of `count` blocks. `of`: what they are."""
    bus, plain = moves.copier._bus, Bus(None)

    def measure(move: Callable[[], None], by: Bus) -> Measure:
        def run() -> float:
            moves.copier._bus = by
            move()
            began = time.process_time()
            for _ in range(REPEATS):
                move()
            moves.copier._bus = bus
            return (time.process_time() - began) / REPEATS / count * 1e6

        return run

    for name, move in (("gather", moves.gather), ("scatter", moves.scatter)):
        case = f"the host's work for a {name}, {of}"
        ours, peer = measure(move, bus), measure(move, plain)
        yield Case("gpu", case, "us/block", ours, peer=peer, peer_name=PEER, target=1, of="peer")


def stand_in_cases(shapes: Sequence[tuple[str, int, int]], count: int) -> Iterator[Case]:
    """The same without a device, for blocks of (name, layers, bytes of a page)."""
    if find_spec("triton") is None:
        why = "Triton is not installed"
        yield Case("gpu", "the host's work, without a device", "us/block", None, why=why)
        return
    for name, layers, page_bytes in shapes:
        with stand_in():
            moves = Nowhere(layers, page_bytes, count)
            kib = layers * page_bytes >> 10
            of = f"{name}, without a device: {count} blocks of {kib} KiB"
            yield from work_cases(moves, of, count)
            moves.copier.close()
