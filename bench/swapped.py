"""A vLLM engine whose connector can be taken out and put back: parts that `bench.serve` gives it.

Two engines that do the same differ by up to 6%, by how each happened to start. So what a connector
costs is measured in one engine, with the connector named in each request: `chain` is the engine's
own, `idle` one that does nothing, `none` none.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.scheduler import Scheduler


class _NoOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Of a step in which nobody does anything."""


class IdleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Has the members that vLLM wants, and answers as one that has no blocks and takes none."""

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return _NoOrders()

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return False, None

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Of a request, a step or a layer."""

    update_state_after_alloc = start_load_kv = wait_for_layer_load = _nothing
    save_kv_layer = wait_for_save = _nothing


class SwappedScheduler(Scheduler):  # type: ignore[misc]
    """Schedules with the connector that the first of its requests names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        idle = IdleConnector(self.vllm_config, KVConnectorRole.SCHEDULER, self.kv_cache_config)
        self._connectors = {"chain": self.get_kv_connector(), "idle": idle, "none": None}

    def add_request(self, request: Any) -> None:
        if not self.requests:
            named = request.sampling_params.extra_args["connector"]
            self.connector = self._connectors[named or "chain"]
        super().add_request(request)


class SwappedWorker:
    """What a worker has besides; its model runner is vLLM's first."""

    vllm_config: Any
    _connectors: dict[str, Any] | None = None

    def use_connector(self, name: str) -> None:
        """Run the steps from now on with this one."""
        if self._connectors is None:
            chain = kv_transfer_state.get_kv_transfer_group()
            config = chain._kv_cache_config
            idle = IdleConnector(self.vllm_config, KVConnectorRole.WORKER, config)
            self._connectors = {"chain": chain, "idle": idle, "none": None}
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connectors[name]
