"""What vLLM's workers call on `KVTiersConnector`: each member hands the call on to the chain."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tiers.connector.multi.connector import MultiConnector
from tiers.connector.multi.metadata import MultiHandshakeMetadata, MultiWorkerMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults


class WorkerMembers(KVConnectorBase_V1):  # type: ignore[misc]
    """The worker half of the adapter; the other half sets `_chain`."""

    _chain: MultiConnector

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._chain.register_kv_caches(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Asked by vLLM before 0.29."""
        return self._chain.prefer_cross_layer_blocks

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Called by vLLM before 0.29."""
        self._chain.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._chain.set_host_xfer_buffer_ops(copy_operation)

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._chain.get_mem_pool_context()

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        return self._chain.get_handshake_metadata()

    def get_finished_count(self) -> int | None:
        return self._chain.get_finished_count()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._chain.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._chain.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._chain.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._chain.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._chain.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._chain.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        self._chain.finish_forward()

    def reset_capture_state(self) -> None:
        self._chain.reset_capture_state()

    def wait_for_save(self) -> None:
        self._chain.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._chain.get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._chain.get_transfer_results(finished_req_ids)
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
        except ImportError:
            # vLLM before 0.30 does not call this; an outer connector of ours does.
            return results
        return KVConnectorTransferResults(**vars(results))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._chain.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        return self._chain.build_connector_worker_meta()

    def get_kv_connector_kv_cache_events(self) -> Any:
        return self._chain.get_kv_connector_kv_cache_events()
