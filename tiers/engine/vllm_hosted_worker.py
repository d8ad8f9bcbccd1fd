"""HostedWorker: copies between paged KV and host slots, under vLLM's OffloadingConnector."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker, TransferResult

from tiers.concurrency.executors import io_executor
from tiers.connector.contract.copier import Copier, Copy
from tiers.connector.hosted.shared_slots import SlotRegion, stamp

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

logger = logging.getLogger(__name__)

COPIERS = 2
"""Loads that a worker copies at once."""


@dataclass
class SlotsSpec(LoadStoreSpec):  # type: ignore[misc]
    """The host slots of a transfer, in the order of its paged blocks.

    `keys`: of the blocks, in the same order; empty for a load.
    """

    slots: list[int]
    keys: list[bytes]


@dataclass
class _Job:
    """A transfer under way; `future` returns the seconds that it took."""

    future: Future[float]
    is_load: bool
    num_bytes: int


class HostedWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between paged KV and the slots of `region`, which it owns.

    `copiers`: one for each KV cache group. vLLM calls every member from one thread.
    """

    def __init__(self, region: SlotRegion, copiers: Sequence[Copier]) -> None:
        self._region = region
        self._copiers = copiers
        self._jobs: dict[int, _Job] = {}
        self._loader = io_executor(COPIERS, "load")
        self._gatherer = io_executor(1, "gather-end")
        # Two loads from one slot may end at once: both would read the same count of ended
        # transfers, and one end would be lost.
        self._marking = threading.Lock()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: SlotsSpec) -> bool:
        rows = self._region.memory.rows
        with self._marking:
            self._region.clear(dst_spec.slots)
        copies = [
            copier.gather(blocks, rows, slots)
            for copier, blocks, slots in self._parts(src_spec, dst_spec.slots)
        ]
        future = self._gatherer.submit(self._end_store, copies, dst_spec, time.perf_counter())
        self._note(job_id, future, False, src_spec)
        return True

    def _end_store(self, copies: list[Copy], slots: SlotsSpec, began: float) -> float:
        held = [stamp(key) for key in slots.keys]
        try:
            for copy in copies:
                copy.wait()
        except RuntimeError as error:
            # vLLM asserts that a store succeeds. The scheduler's half sees the missing stamps.
            logger.error("blocks were not copied to host memory: %s", error)
            held = [b""] * len(held)
        self._mark(slots.slots, held)
        return time.perf_counter() - began

    def submit_load(
        self,
        job_id: int,
        src_spec: SlotsSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # vLLM 0.33 and later pass it
    ) -> bool:
        parts = list(self._parts(dst_spec, src_spec.slots))
        fences = [copier.fence() for copier, _, _ in parts]
        future = self._loader.submit(self._load, parts, fences, src_spec.slots)
        self._note(job_id, future, True, dst_spec)
        return True

    def _load(
        self,
        parts: list[tuple[Copier, list[int], list[int]]],
        fences: list[object],
        slots: list[int],
    ) -> float:
        began = time.perf_counter()
        for (copier, blocks, rows), fence in zip(parts, fences, strict=True):
            copier.scatter(self._region.memory.rows, rows, blocks, fence)
        self._mark(slots, None)
        return time.perf_counter() - began

    def _mark(self, slots: Iterable[int], held: Iterable[bytes] | None) -> None:
        """Count an ended transfer of each slot. `held`: their new stamps; None: unchanged."""
        with self._marking:
            if held is None:
                for slot in slots:
                    self._region.count_end(slot)
                return
            for slot, one in zip(slots, held, strict=True):
                self._region.mark(slot, self._region.ended(slot) + 1, one)

    def _parts(
        self, paged: GPULoadStoreSpec, slots: list[int]
    ) -> Iterator[tuple[Copier, list[int], list[int]]]:
        """Yield the copier, paged blocks and slots of each KV cache group that has blocks."""
        start = 0
        for copier, size in zip(self._copiers, paged.group_sizes, strict=True):
            stop = start + size
            if size:
                yield copier, paged.block_ids[start:stop].tolist(), slots[start:stop]
            start = stop
        assert start == len(slots), f"{start} paged blocks for {len(slots)} slots"

    def _note(
        self, job_id: int, future: Future[float], is_load: bool, paged: GPULoadStoreSpec
    ) -> None:
        sizes = zip(self._copiers, paged.group_sizes, strict=True)
        num_bytes = sum(copier.payload_bytes * size for copier, size in sizes)
        self._jobs[job_id] = _Job(future, is_load, num_bytes)

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call.

        A failed load is reported as failed, and vLLM ends: the device is broken.
        """
        done = [job_id for job_id, job in self._jobs.items() if job.future.done()]
        return [self._result(job_id, self._jobs.pop(job_id)) for job_id in done]

    def _result(self, job_id: int, job: _Job) -> TransferResult:
        error = job.future.exception()
        if error is not None:
            logger.error("a %s failed: %s", "load" if job.is_load else "store", error)
            return TransferResult(job_id, success=False)
        return TransferResult(job_id, True, job.num_bytes, job.future.result())

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job_id].future for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        self._loader.shutdown(wait=True)
        self._gatherer.shutdown(wait=True)
        for copier in self._copiers:
            copier.close()
        self._region.close()
