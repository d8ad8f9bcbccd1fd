"""vLLM's offloading on its CPU platform, for which it has no copies: those are the tests'."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiers.engine.vllm_offloading import KVTiersOffloadingSpec


class OffloadingOnCpu(TieringOffloadingSpec):  # type: ignore[misc]
    """All is vLLM's, but for the copies of one worker, of chunks of one block."""

    _rows = KVTiersOffloadingSpec._rows

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        row, page = self.kv_bytes_per_chunk, self.cpu_page_size_per_worker
        region = SharedOffloadRegion(self.config.engine_id, self._rows, rank, row, page)
        region._creator = True  # vLLM's spec leaves the file to its worker
        return CpuPlatformWorker(kv_caches, region)


class HostedOnCpu(KVTiersOffloadingSpec, OffloadingOnCpu):
    """Ours, over those copies."""


class CpuPlatformWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks within the engine's step. Owns `region`."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._mmap_region = region
        self._groups = kv_caches.group_data_refs
        self._paged = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors
        ]
        self._rows = [
            region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, src_spec, dst_spec, stores=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # vLLM 0.33 and later pass it
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, stores=False)

    def _copy(self, job_id: int, paged: Any, host: Any, stores: bool) -> bool:
        began, start, num_bytes = time.perf_counter(), 0, 0
        for size, refs in zip(paged.group_sizes, self._groups, strict=True):
            blocks = paged.block_ids[start : start + size].tolist()
            rows = host.block_ids[start : start + size].tolist()
            start += size
            for ref in refs if size else ():
                num_bytes += size * ref.page_size_bytes
                # Pages of states are padded to the length of others: only a part of each is theirs.
                ours = self._paged[ref.tensor_idx][:, : ref.page_size_bytes]
                theirs = self._rows[ref.tensor_idx][:, : ref.page_size_bytes]
                if stores:
                    theirs[rows] = ours[blocks]
                else:
                    ours[blocks] = theirs[rows]
        seconds = time.perf_counter() - began
        self._ended.append(TransferResult(job_id, True, num_bytes, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Every copy has ended."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._mmap_region.cleanup()
