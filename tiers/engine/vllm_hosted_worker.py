"""HostedWorker: copies between paged KV and host slots, under vLLM's OffloadingConnector."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker, TransferResult

from tiers.concurrency.executors import io_executor
from tiers.connector.hosted.shared_slots import SlotRegion, stamp
from tiers.connector.worker.weight_watch import WeightVerdict, WeightWatch
from tiers.contract.block_copier import Copier, Copy
from tiers.contract.weight_reports import WeightOrders, Weights

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

logger = logging.getLogger(__name__)

COPIERS = 2
"""Loads that a worker copies at once."""


@dataclass
class SlotsSpec(LoadStoreSpec):  # type: ignore[misc]
    """The host slots of a transfer, in the order of its paged blocks, and the generation of its
    keys; of a store also the keys."""

    slots: list[int]
    keys: list[bytes]
    generation: bytes = b""


class HostedWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between paged KV and the slots of `region`, which it owns, by the copier of each KV
    cache group. vLLM calls every member from one thread."""

    def __init__(
        self, region: SlotRegion, copiers: Sequence[Copier], weights: Weights | None = None
    ) -> None:
        """`weights`: those of the worker. A block that others computed is not held."""
        # What one rank alone has is held nowhere, so that ranks need not agree.
        self._watch = WeightWatch(weights or Weights(), ranks=1)
        self._watch.begin()
        self._region = region
        self._copiers = copiers
        self._jobs: dict[int, Future[TransferResult]] = {}
        self._loader = io_executor(COPIERS, "load")
        # A step waits for what is expedited, which must not wait for loads that none waits for.
        self._expedited = io_executor(1, "load-now")
        self._gatherer = io_executor(1, "gather-end")

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: SlotsSpec) -> bool:
        rows = self._region.memory.rows
        self._region.clear(dst_spec.slots)
        copies = [
            copier.gather(blocks, rows, slots)
            for copier, blocks, slots in self._parts(src_spec, dst_spec.slots)
        ]
        self._watch.bind(WeightOrders())
        verdict = self._watch.stores(dst_spec.generation)
        end = partial(self._end_store, copies, dst_spec, verdict, time.perf_counter())
        self._submit(self._gatherer, job_id, src_spec, end)
        return True

    def _end_store(
        self, copies: list[Copy], slots: SlotsSpec, verdict: WeightVerdict, began: float
    ) -> float:
        held = [stamp(key) for key in slots.keys]
        try:
            for copy in copies:
                copy.wait()
        except (RuntimeError, IndexError) as error:
            # vLLM asserts that a store succeeds. The scheduler's half sees the missing stamps.
            logger.error("blocks were not copied to host memory: %s", error)
            held = [b""] * len(held)
        if not verdict.unchanged():
            held = [b""] * len(held)
            self._region.ends(slots.generation)
        self._region.end(slots.slots, held)
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
        self._watch.bind(WeightOrders())
        verdict = self._watch.loads(src_spec.generation)
        load = partial(self._load, parts, fences, src_spec, verdict)
        self._submit(self._expedited if expedited else self._loader, job_id, dst_spec, load)
        return True

    def _load(
        self,
        parts: list[tuple[Copier, list[int], list[int]]],
        fences: list[object],
        slots: SlotsSpec,
        verdict: WeightVerdict,
    ) -> float:
        began = time.perf_counter()
        for (copier, blocks, rows), fence in zip(parts, fences, strict=True):
            copier.scatter(self._region.memory.rows, rows, blocks, fence)
        if not verdict.unchanged():
            logger.error(
                "the weights changed without a reset, and a request is served KV of the old ones: "
                "vLLM's OffloadingConnector accepts no failed load. Nothing more is loaded until a "
                "reset with reset_connector=True: send one before each change of the weights"
            )
            self._region.ends(slots.generation)
        self._region.end(slots.slots)
        return time.perf_counter() - began

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

    def _submit(
        self, executor: Executor, job_id: int, paged: GPULoadStoreSpec, work: Callable[[], float]
    ) -> None:
        """Let `executor` do `work`, which returns the seconds that the transfer took."""
        sizes = zip(self._copiers, paged.group_sizes, strict=True)
        num_bytes = sum(copier.payload_bytes * size for copier, size in sizes)
        self._jobs[job_id] = executor.submit(
            lambda: TransferResult(job_id, True, num_bytes, work())
        )

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call. After a load that failed vLLM ends:
        the device is broken."""
        done = [job_id for job_id, future in self._jobs.items() if future.done()]
        return [self._result(job_id, self._jobs.pop(job_id)) for job_id in done]

    def _result(self, job_id: int, future: Future[TransferResult]) -> TransferResult:
        error = future.exception()
        if error is None:
            return future.result()
        logger.error("a transfer between device and host memory failed: %s", error)
        return TransferResult(job_id, success=False)

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        self._loader.shutdown(wait=True)
        self._expedited.shutdown(wait=True)
        self._gatherer.shutdown(wait=True)
        for copier in self._copiers:
            copier.close()
        self._region.close()
