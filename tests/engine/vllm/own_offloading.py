"""vLLM's own offloading, on the CPU, whose copies vLLM has for GPUs alone: those are ours."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiers.engine.vllm_offloading import KVTiersOffloadingSpec


class OffloadingOnCpu(TieringOffloadingSpec):  # type: ignore[misc]
    """All is vLLM's, but for the copies of one worker."""

    _rows = KVTiersOffloadingSpec._rows

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        worker = KVTiersOffloadingSpec.worker_on_cpu(self, kv_caches)
        worker._region._creator = True  # vLLM's spec leaves the file to its worker
        return worker
