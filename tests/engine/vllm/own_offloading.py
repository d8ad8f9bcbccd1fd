"""vLLM's own offloading to host memory, on the CPU, whose copies vLLM has for GPUs alone."""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class OffloadingOnCpu(CPUOffloadingSpec):  # type: ignore[misc]
    """All is vLLM's, but for the copies."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Copies:
        return Copies(kv_caches, self.num_chunks)


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, on the thread that asks for it."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._refs = kv_caches.group_data_refs
        self._paged = [one.tensor for one in kv_caches.tensors]
        self._host = [torch.empty(chunks, one.shape[1], dtype=one.dtype) for one in self._paged]
        self._ended: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        return self._copy(job_id, src_spec, self._paged, src_spec, self._host, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: BlockIDsLoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._copy(job_id, dst_spec, self._host, src_spec, self._paged, dst_spec)

    def _copy(
        self,
        job_id: int,
        paged: GPULoadStoreSpec,
        sources: list[torch.Tensor],
        source: BlockIDsLoadStoreSpec,
        targets: list[torch.Tensor],
        target: BlockIDsLoadStoreSpec,
    ) -> bool:
        start = 0
        for refs, size in zip(self._refs, paged.group_sizes, strict=True):
            read = torch.from_numpy(source.block_ids[start : start + size])
            written = torch.from_numpy(target.block_ids[start : start + size])
            for ref in refs if size else ():
                page = slice(ref.page_size_bytes)
                copied = sources[ref.tensor_idx][read, page]
                targets[ref.tensor_idx][written, page] = copied
            start += size
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""
