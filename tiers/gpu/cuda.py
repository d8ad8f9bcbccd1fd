"""Batched copies between paged KV on a CUDA device and rows of pinned host memory.

    gather     engine's stream -fence-> packing ----filled----> leaving -done-> whoever waits
                      ^-----packed---------| ^----emptied----------|
    scatter    arriving ----filled----> unpacking -done-> whoever waits
               (once the device has come to the fence)
                  ^------emptied-----------|

Each direction has two streams and a fixed ring of staging memory on the device between them. A
copy crosses it in waves: `filled` keeps the second stream from a wave that is not whole, `emptied`
the first from memory that is still read. So the next wave is put together while the last crosses
the bus, and the device memory taken is known at the start. Compute waits for a copy only where it
must, by `hold_engine`, and then for `packed`, when the blocks were read: for the bus if they are
more than the ring holds. The host does not wait.
`tests/gpu/test_streams.py` takes away each of the waits, and sees bytes go wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from typing import NamedTuple

import torch

from tiers.concurrency.executors import IoExecutor
from tiers.gpu.bus import near_device, open_bus
from tiers.gpu.pages import Copies, PageCopies, PagedKV
from tiers.host.slots import slot_stride

logger = logging.getLogger(__name__)

WAVE_BYTES = 16 << 20
"""Staging of one wave, or a block's bytes if those are more."""
WAVES = 2
"""Waves of a ring: one is filled while the other is emptied."""
MOST_QUEUED = 256
"""Operations of a ring from one mark to the next, or those of a wave if they are more; the device
is never two marks behind. A stream takes a thousand: queuing more holds up all threads that launch
anything, the engine's too, until the step has been computed that a gather waits for."""
MOST_BYTES = 32 << 20
"""Bytes of a gather from one mark to the next. What the engine copies the same way, as a step's few
bytes of results, comes behind two marks' at most, 1.4 ms at 45 GB/s, and not behind a whole prompt:
vLLM's own connector stores a step later for that reason (its `prepare_store_kv`)."""
Move = Callable[[int, int, torch.Tensor], None]
"""Queues the copies of items first to last (exclusive) into, or out of, as many staged rows."""


class _Gathered(NamedTuple):
    """A gather that is queued: when its blocks were read, and when all is in its rows."""

    packed: torch.cuda.Event
    end: _Place


class _Queued:
    """A gather that the copier's thread queues on its streams."""

    def __init__(self, queued: Future[_Gathered], ring: Ring, device: torch.device) -> None:
        self._queued = queued
        self._ring = ring
        self._device = device

    def wait(self) -> None:
        self._queued.result().end.wait()

    def hold_engine(self) -> None:
        self._ring.is_paced = False
        if self._queued.exception() is None:  # once it is queued
            packed = self._queued.result().packed
            torch.cuda.current_stream(self._device).wait_event(packed)


class _Place:
    """A place in a stream. In the engine's it is the fence of a load, whose thread sleeps until the
    device has come there, and queues its copies then: on the streams that all loads share they
    would keep the others waiting. Behind a gather or scatter that is queued it is the end of that.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device
        self.has_passed = False

    def wait(self) -> None:
        if not self.has_passed:
            wait_for([self._event], self._device)
            self.has_passed = True


class CudaCopier:
    """Copies for paged KV on a CUDA device, beside the engine's compute. Rows must be pinned.

    Gathers are queued by a thread of their own: the engine's thread records an event and goes on.
    What is queued for a gather does not depend on which slots it fills, but for the copies over the
    bus, see `Bus`.
    """

    pin = True

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self._paged = PagedKV(kv_caches, num_blocks)
        self.layout = self._paged.layout
        self.payload_bytes = self._paged.payload_bytes
        self._device = self._paged.pages[0].device
        self._copies = open_copies(self._paged.pages)
        self._stride = slot_stride(self.payload_bytes)
        with torch.cuda.device(self._device):
            self._out, self._in = (Ring(self._device, self._stride) for _ in range(2))
            self._out.is_paced = True
            # The engine's stream may still zero that memory, and use what it was before.
            torch.cuda.synchronize(self._device)
            self._bus = open_bus(self._device, self._out.emptying)
        # Two loaders between each other's waves would fill memory that the other has not emptied.
        self._loading = threading.Lock()
        self._thread = IoExecutor(1, "gather")

    def warning(self) -> str:
        """Why copies over the bus take longer than they should; see `Copier`."""
        return self._bus.warning

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def cpus(self) -> frozenset[int]:
        """The processors of the NUMA node that the device is at."""
        return near_device(self._device)

    def fence(self) -> _Place:
        """The place after all that the engine queued on its stream."""
        return _Place(mark(torch.cuda.current_stream(self._device)), self._device)

    def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> _Queued:
        """Begin copying behind the engine's work so far; the engine fences the blocks' reuse."""
        after = mark(torch.cuda.current_stream(self._device))
        queued = self._thread.submit(self._gather, list(blocks), rows, list(slots), after)
        return _Queued(queued, self._out, self._device)

    def _gather(
        self, blocks: list[int], rows: torch.Tensor, slots: list[int], after: torch.cuda.Event
    ) -> _Gathered:
        self._paged.require_in_range(blocks, rows, slots)
        ring = self._out
        with torch.cuda.device(self._device):
            ring.filling.wait_event(after)
            try:
                self._move(blocks, rows, slots, to_host=True)
            except RuntimeError:
                # What was queued must not arrive when the slots are another's.
                wait_for(ring.marks(), self._device)
                raise
            return _Gathered(mark(ring.filling), _Place(mark(ring.emptying), self._device))

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: object
    ) -> _Place:
        """Queue the copies; the caller has waited for `after`."""
        self._paged.require_in_range(blocks, rows, slots)
        assert isinstance(after, _Place) and after.has_passed, "wait for the fence before"
        with torch.cuda.device(self._device), self._loading:
            try:
                self._move(blocks, rows, slots, to_host=False)
                return _Place(mark(self._in.emptying), self._device)
            except BaseException:
                # Of a failed load, too, nothing may arrive when the engine has its blocks back.
                wait_for(self._in.marks(), self._device)
                raise

    def _move(
        self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int], to_host: bool
    ) -> None:
        """Queue the copies of a gather (`to_host`) or a scatter."""
        order = sorted(range(len(slots)), key=slots.__getitem__)  # neighbours cross together
        places, ring = [slots[i] for i in order], self._out if to_host else self._in
        paged_on = ring.filling if to_host else ring.emptying
        numbers = self._send([blocks[i] for i in order], paged_on)

        def copy(first: int, last: int, staged: torch.Tensor) -> None:
            self._copies.copy(numbers, first, last, staged, to_rows=to_host)

        def cross(first: int, last: int, staged: torch.Tensor) -> None:
            self._bus.cross(rows, places[first:last], staged, self._stride, to_host)

        fill, empty = (copy, cross) if to_host else (cross, copy)
        ring.pass_through(len(order), self._copies.launches, fill, empty)

    def _send(self, blocks: list[int], stream: torch.cuda.Stream) -> torch.Tensor:
        """The blocks' numbers on the device, made and used on `stream`, whose memory it is."""
        with torch.cuda.stream(stream):
            # From pageable memory the copy would make this thread wait for the stream.
            numbers = self._copies.numbers(blocks).pin_memory()
            return numbers.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Finish the gathers in flight, of which nobody may have waited for the last: the memory of
        their slots goes away."""
        self._thread.shutdown(wait=True)
        with suppress(RuntimeError):  # a device that has failed copies no more
            wait_for(self._out.marks(), self._device)


def open_copies(pages: Sequence[torch.Tensor]) -> Copies:
    """Copies by one kernel, if it compiles and copies here what PyTorch copies; else by PyTorch."""
    if find_spec("triton") is None:
        logger.info("Triton is not installed: blocks are copied by a launch a layer")
        return PageCopies(pages)
    why = "it copied other bytes than PyTorch"
    try:
        # Here, since it needs Triton, which few machines without a device have.
        from tiers.gpu.page_kernel import KernelCopies, agrees, unit_of

        unit = unit_of(pages)
        if agrees(pages, unit):
            return KernelCopies(pages, unit)
    except Exception as error:  # noqa: BLE001 - a compiler of any version fails in its own ways
        why = f"{type(error).__name__}: {error}"
    logger.warning("blocks are copied by a launch a layer, since Triton's kernel failed: %s", why)
    return PageCopies(pages)


class _Wave:
    """Staging memory, and the last events at which it was filled and emptied. An event that was
    never recorded holds nobody back."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.filled = torch.cuda.Event()
        self.emptied = torch.cuda.Event()


class Ring:
    """The waves of one direction. Called by one thread at a time. One that `is_paced` has little
    queued; where the engine's thread waits until all is queued, that would take it longer."""

    is_paced = False

    def __init__(self, device: torch.device, stride: int) -> None:
        made = _memory(min(MOST_QUEUED, max(1, WAVE_BYTES // stride)), stride, device)
        self._device = device
        self._waves = [_Wave(made[i]) for i in range(WAVES)]
        self._turn = self._queued = self._bytes = 0
        self._last_mark = torch.cuda.Event(blocking=True)
        self.filling = torch.cuda.Stream(device)
        self.emptying = torch.cuda.Stream(device)

    def pass_through(self, count: int, launches: int, fill: Move, empty: Move) -> None:
        """Queue `fill` on the one stream and `empty` on the other, for waves of `count` items.
        `launches`: what gathers or scatters a wave on the device."""
        step = len(self._waves[0].rows)
        for first in range(0, count, step):
            last = min(first + step, count)
            wave = self._waves[self._turn]
            self._turn = (self._turn + 1) % WAVES
            rows = wave.rows[: last - first]
            self._keep_behind(max(last - first, launches) + 2, rows.nbytes)
            with torch.cuda.stream(self.filling):
                self.filling.wait_event(wave.emptied)
                fill(first, last, rows)
                wave.filled.record(self.filling)
            with torch.cuda.stream(self.emptying):
                self.emptying.wait_event(wave.filled)
                try:
                    empty(first, last, rows)
                finally:
                    # What failed midway may read the wave still.
                    wave.emptied.record(self.emptying)

    def _keep_behind(self, operations: int, size: int) -> None:
        """Count what the next wave queues on a stream at most, and its bytes; of much, wait for
        what precedes."""
        self._queued += operations
        self._bytes += size
        is_long = self.is_paced and self._bytes > MOST_BYTES
        if self._queued > MOST_QUEUED or is_long:
            before, self._last_mark = self._last_mark, mark(self.emptying)
            self._queued, self._bytes = operations, size
            wait_for([before], self._device)

    def marks(self) -> list[torch.cuda.Event]:
        """Events after all that is queued on both streams."""
        return [mark(self.filling), mark(self.emptying)]


def _memory(rows: int, stride: int, device: torch.device) -> torch.Tensor:
    """Memory for the waves of a ring, of `rows` each, or fewer where the engine has left less."""
    with torch.inference_mode(False):  # else other threads may not write it
        while True:
            try:
                return torch.zeros(WAVES, rows, stride, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
                rows //= 2


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after all that is queued on a stream. Whoever waits for it sleeps, rather than take
    a core from the engine."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def wait_for(marks: Sequence[torch.cuda.Event], device: torch.device) -> None:
    # A thread that no device was set for would make a context on the first one, of half a gigabyte,
    # which is another rank's: seven ranks would take what that one has left.
    with torch.cuda.device(device):
        for mark in marks:
            mark.synchronize()
