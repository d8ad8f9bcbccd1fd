"""Batched copies between paged KV on a CUDA device and rows of pinned host memory.

    gather     engine's stream -fence-> packing ----filled----> leaving -done-> whoever waits
                                           ^------emptied----------|
    scatter    arriving ----filled----> unpacking (behind the fence) -done-> the calling thread
                  ^------emptied-----------|

Each direction has two streams and a fixed ring of staging memory on the device between them. A
copy crosses it in waves: `filled` keeps the second stream from a wave that is not whole, `emptied`
the first from memory that is still read. So compute never waits for copies, the next wave is put
together while the last crosses the bus, and the device memory taken is known at the start.
`tests/gpu/test_streams.py` takes away each of the waits, and sees bytes go wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib.util import find_spec

import torch

from tiers.gpu.page_copies import Copies, PageCopies
from tiers.gpu.pages import PagedKV
from tiers.gpu.staging import Staging, mark, wait_for
from tiers.host.slot_memory import pinned_together, slot_stride

logger = logging.getLogger(__name__)

_Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Queues a copy between rows and staged ones."""


class _Queued:
    """A gather that the copier's thread queues on its streams."""

    def __init__(self, queued: Future[torch.cuda.Event], device: torch.device) -> None:
        self._queued = queued
        self._device = device
        self._has_ended = False

    def wait(self) -> None:
        if not self._has_ended:
            wait_for([self._queued.result()], self._device)
            self._has_ended = True


class CudaCopier:
    """Copies for paged KV on a CUDA device, beside the engine's compute. Rows must be pinned.

    Gathers are queued by a thread of their own: the engine's thread records an event and goes on.
    What is queued for a gather does not depend on which slots it fills, but for the copies over the
    bus: those are one a run of neighbouring slots.

    `in_step`: `gather` returns when all is queued, for an engine that gives its paged KV away as
    soon as its device has nothing to do. `staging`: what it shares with other copiers.
    """

    pin = True

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        in_step: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self._paged = PagedKV(kv_caches, num_blocks)
        self.layout = self._paged.layout
        self.payload_bytes = self._paged.payload_bytes
        self._in_step = in_step
        self._device = self._paged.pages[0].device
        self._copies = open_copies(self._paged.pages)
        self._stride = slot_stride(self.payload_bytes)
        shared = staging or Staging(self._device, self._stride)
        self._out, self._in = shared.out, shared.into
        self._loading, self._thread = shared.loading, shared.thread

    def fence(self) -> torch.cuda.Event:
        """An event after all that the engine queued on its stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> _Queued:
        """Begin copying behind the engine's work so far; the engine fences the blocks' reuse."""
        args = list(blocks), rows, list(slots), self.fence()
        queued = self._thread.submit(self._gather, *args)
        if self._in_step:
            wait([queued])
        return _Queued(queued, self._device)

    def _gather(
        self, blocks: list[int], rows: torch.Tensor, slots: list[int], after: torch.cuda.Event
    ) -> torch.cuda.Event:
        self._paged.require_in_range(blocks, rows, slots)
        slots, blocks = _by_slot(slots, blocks)
        ring, size = self._out, self._stride
        with torch.cuda.device(self._device):
            ring.filling.wait_event(after)
            numbers = self._send(blocks, ring.filling)
            try:
                ring.pass_through(
                    len(blocks),
                    self._copies.launches,
                    lambda first, last, staged: self._copies.gather(numbers, first, last, staged),
                    lambda first, last, staged: cross(
                        rows, slots[first:last], staged, _leave, size
                    ),
                )
            except RuntimeError:
                # What was queued must not arrive when the slots are another's.
                wait_for(ring.marks(), self._device)
                raise
            return mark(ring.emptying)

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: object
    ) -> None:
        """Queue the copies, those into the blocks behind `after`, and wait for them."""
        self._paged.require_in_range(blocks, rows, slots)
        assert isinstance(after, torch.cuda.Event), "the fence of another copier"
        with torch.cuda.device(self._device):
            try:
                with self._loading:
                    self._scatter(rows, *_by_slot(slots, blocks), after)
            finally:
                # Of a failed load, too, nothing may arrive when the engine has its blocks back.
                with self._loading:
                    marks = self._in.marks()
                wait_for(marks, self._device)

    def _scatter(
        self, rows: torch.Tensor, slots: list[int], blocks: list[int], after: torch.cuda.Event
    ) -> None:
        ring, size = self._in, self._stride
        ring.emptying.wait_event(after)
        numbers = self._send(blocks, ring.emptying)
        ring.pass_through(
            len(blocks),
            self._copies.launches,
            lambda first, last, staged: cross(rows, slots[first:last], staged, _arrive, size),
            lambda first, last, staged: self._copies.scatter(numbers, first, last, staged),
        )

    def _send(self, blocks: list[int], stream: torch.cuda.Stream) -> torch.Tensor:
        """The blocks' numbers on the device, made and used on `stream`, whose memory it is."""
        with torch.cuda.stream(stream):
            # From pageable memory the copy would make this thread wait for the stream.
            numbers = self._copies.numbers(blocks).pin_memory()
            return numbers.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Finish the gathers under way, of which nobody may have waited for the last: the memory of
        their slots goes away."""
        self._thread.shutdown(wait=True)
        with suppress(RuntimeError):  # a device that has failed copies no more
            wait_for(self._out.marks(), self._device)


def _by_slot(slots: Sequence[int], blocks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Both in the order of slots, so that neighbours cross the bus together."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    return [slots[i] for i in order], [blocks[i] for i in order]


def _leave(row: torch.Tensor, staged: torch.Tensor) -> None:
    row.copy_(staged, non_blocking=True)


def _arrive(row: torch.Tensor, staged: torch.Tensor) -> None:
    staged.copy_(row, non_blocking=True)


def cross(
    rows: torch.Tensor, slots: Sequence[int], staged: torch.Tensor, copy: _Copy, width: int
) -> None:
    """Call `copy` for each run of neighbouring rows that are pinned together, and the staged ones,
    contiguous both: what is not would pass through pageable memory, and wait. `width`: bytes of a
    row that are copied."""
    if not width == rows.stride(0) == staged.stride(0):  # rows that are longer than the block
        width = min(width, rows.shape[1])
        for i, slot in enumerate(slots):
            copy(rows[slot, :width], staged[i, :width])
        return
    first, together = 0, pinned_together(rows.stride(0))
    for last in range(1, len(slots) + 1):
        if last == len(slots) or slots[last] != slots[last - 1] + 1 or slots[last] % together == 0:
            copy(rows[slots[first] : slots[last - 1] + 1], staged[first:last])
            first = last


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
