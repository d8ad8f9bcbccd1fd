"""Batched copies between paged KV and rows of host memory, on the CPU and on CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import torch

from tiers.concurrency.executors import io_executor
from tiers.gpu.pages import block_pages, layout_digest


class _Done:
    """A copy that a worker thread makes."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class CpuCopier:
    """Copies for an engine whose paged KV is in host memory; gathers run on one thread.

    One memmove per page: 5.4 GB/s each way with 30 pages of 48 KiB per block, one thread, where
    one memcpy of all the bytes makes 7.1; `index_copy_` made 1.4, and is no faster on two.
    """

    pin = False

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self._pages = block_pages(kv_caches, num_blocks)
        self._num_blocks = num_blocks
        self.layout = layout_digest(kv_caches, num_blocks)
        self.payload_bytes = sum(page.shape[1] for page in self._pages)
        self._thread = io_executor(1, "gather")

    def fence(self) -> object:
        """Nothing to mark: the engine's work on the CPU is done when it calls us."""
        return None

    def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> _Done:
        """Begin copying paged blocks to rows; the engine fences their reuse."""
        return _Done(self._thread.submit(self._gather, list(blocks), rows, list(slots)))

    def _gather(self, blocks: list[int], rows: torch.Tensor, slots: list[int]) -> None:
        for paged, slot, length in self._addresses(blocks, rows, slots):
            ctypes.memmove(slot, paged, length)

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: object
    ) -> None:
        """Copy rows to paged blocks on the calling thread."""
        for paged, slot, length in self._addresses(blocks, rows, slots):
            ctypes.memmove(paged, slot, length)

    def _addresses(
        self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        """(address in the paged KV, address in the row, bytes) of every page of every block."""
        self._require_in_range(blocks, rows, slots)
        pairs = list(zip(blocks, slots, strict=True))
        row, row_stride = rows.data_ptr(), rows.stride(0)
        for page in self._pages:
            start, stride, length = page.data_ptr(), page.stride(0), page.shape[1]
            for block, slot in pairs:
                yield start + block * stride, row + slot * row_stride, length
            row += length

    def _require_in_range(
        self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]
    ) -> None:
        """Raise IndexError where memory of others would be copied; a CUDA device would end the
        engine."""
        if not all(0 <= block < self._num_blocks for block in blocks) or not all(
            0 <= slot < rows.shape[0] for slot in slots
        ):
            raise IndexError(f"blocks {blocks} or slots {slots} are out of range")

    def close(self) -> None:
        """Finish the gathers under way."""
        self._thread.shutdown(wait=True)


class _Recorded:
    """A copy queued on a CUDA stream. Keeps its staging tensors until the device is done."""

    def __init__(self, event: torch.cuda.Event, keep: list[torch.Tensor]) -> None:
        self._event = event
        self._keep = keep

    def wait(self) -> None:
        self._event.synchronize()
        self._keep.clear()


class CudaCopier(CpuCopier):
    """Copies for paged KV on a CUDA device: side streams, so that compute never waits for them.

    Rows must be pinned. A run of rows is put together on the device and crosses the bus in one
    contiguous copy.
    """

    pin = True

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        super().__init__(kv_caches, num_blocks)
        self._device = self._pages[0].device
        self._store_stream = torch.cuda.Stream(self._device)
        self._load_stream = torch.cuda.Stream(self._device)

    def fence(self) -> object:
        """An event after all that the engine queued on its stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(  # type: ignore[override]
        self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]
    ) -> _Recorded:
        """Queue the copies behind the engine's work so far; the engine fences block reuse."""
        self._require_in_range(blocks, rows, slots)
        self._store_stream.wait_event(self.fence())  # type: ignore[arg-type]
        keep: list[torch.Tensor] = []
        done = _event()
        with torch.cuda.stream(self._store_stream):
            for part, (first, last) in _slot_runs(slots):
                index = self._index([blocks[i] for i in part])
                together = torch.empty_like(rows[first:last], device=self._device)
                for page, column in self._columns(together):
                    column.copy_(page.index_select(0, index))
                rows[first:last].copy_(together, non_blocking=True)
                keep.append(together)
            done.record(self._store_stream)
        return _Recorded(done, keep)

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: object
    ) -> None:
        """Queue the copies behind `after` and wait for them on the calling thread."""
        self._require_in_range(blocks, rows, slots)
        done = _event()
        with torch.cuda.device(self._device), torch.cuda.stream(self._load_stream):
            self._load_stream.wait_event(after)  # type: ignore[arg-type]
            try:
                for part, (first, last) in _slot_runs(slots):
                    index = self._index([blocks[i] for i in part])
                    together = rows[first:last].to(self._device, non_blocking=True)
                    for page, column in self._columns(together):
                        page.index_copy_(0, index, column)
            finally:
                # Of a failed load, too, nothing may arrive when the engine has its blocks back.
                done.record(self._load_stream)
                done.synchronize()

    def _columns(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for page in self._pages:
            stop = start + page.shape[1]
            yield page, rows[:, start:stop]
            start = stop

    def _index(self, blocks: list[int]) -> torch.Tensor:
        # From pageable memory the copy would make this thread wait for the stream.
        return torch.tensor(blocks).pin_memory().to(self._device, non_blocking=True)


def _event() -> torch.cuda.Event:
    """One that whoever waits for it sleeps for, rather than take a core from the engine."""
    return torch.cuda.Event(blocking=True)


def open_copier(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> CpuCopier:
    """The copier for the device that holds these tensors."""
    device = next(iter(kv_caches.values())).device
    if device.type == "cuda":
        return CudaCopier(kv_caches, num_blocks)
    if device.type == "cpu":
        return CpuCopier(kv_caches, num_blocks)
    raise ValueError(f"KV on device {device.type!r}; cpu and cuda are supported")


def _slot_runs(slots: Sequence[int]) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Split positions of `slots` into runs of consecutive slots: (positions, (first, last+1))."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    run: list[int] = []
    for i in order:
        if run and slots[i] != slots[run[-1]] + 1:
            yield run, (slots[run[0]], slots[run[-1]] + 1)
            run = []
        run.append(i)
    if run:
        yield run, (slots[run[0]], slots[run[-1]] + 1)
