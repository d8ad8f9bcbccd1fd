"""A vLLM engine whose connector can be taken out and put back: parts that `bench.serve` gives it.

Two engines that do the same differ by up to 6%, by how each happened to start. So what a connector
costs is measured in one engine, with the connector named in each request: `chain` is the engine's
own, `idle` one that does nothing, `native` vLLM's own offloading, which here copies nothing (its
worker wants a GPU), and `none` none.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


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


class UncopiedSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's host memory, of which the scheduler has all and workers have nothing."""

    def get_worker(self, _: Any) -> OffloadingWorker:
        return _NoCopies()


class _NoCopies(OffloadingWorker):  # type: ignore[misc]
    """Says of each job that it is done."""

    def __init__(self) -> None:
        self._ended: list[int] = []

    def submit_store(self, job: int, *_: Any) -> bool:
        self._ended.append(job)
        return True

    submit_load = submit_store

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return [TransferResult(job_id=job, success=True) for job in ended]

    def wait(self, _: set[int]) -> None: ...


class NativeConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's own, whose figures go nowhere: an engine reads them by its one connector's class."""

    def get_kv_connector_stats(self) -> None:
        super().get_kv_connector_stats()


def connectors(chain: Any, role: KVConnectorRole, config: Any, caches: Any) -> dict[str, Any]:
    """Those that a request may name. `config`: vLLM's, of the engine; `caches`: of its KV."""
    extra = {
        "cpu_bytes_to_use": 1 << 30,
        "offload_prompt_only": False,  # as a chain does
        "spec_name": UncopiedSpec.__name__,
        "spec_module_path": __name__,
    }
    apart = copy.copy(config)
    apart.kv_transfer_config = replace(
        config.kv_transfer_config,
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config=extra,
    )
    native = NativeConnector(apart, role, caches)
    idle = IdleConnector(config, role, caches)
    return {"chain": chain, "idle": idle, "native": native, "none": None}


HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "take_events",
)
"""What the scheduler calls of a connector; the first four before the model is launched."""


class HookTimes:
    """How long the engine's thread ran in a connector's scheduler hooks: here, for an engine's
    scheduler and its one worker are in one process."""

    spent = dict.fromkeys(HOOKS, 0.0)

    @classmethod
    def wrap(cls, connector: Any) -> Any:
        """Count what this one's hooks take from now on; itself."""
        for name in HOOKS:
            setattr(connector, name, cls._timed(getattr(connector, name), name))
        return connector

    @classmethod
    def _timed(cls, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                cls.spent[name] += time.thread_time() - began

        return call

    @classmethod
    def take(cls) -> Mapping[str, float]:
        """Seconds by hook, since the last time."""
        spent, cls.spent = cls.spent, dict.fromkeys(HOOKS, 0.0)
        return spent


class SwappedScheduler(Scheduler):  # type: ignore[misc]
    """Schedules with the connector that the first of its requests names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        role, chain = KVConnectorRole.SCHEDULER, self.get_kv_connector()
        found = connectors(chain, role, self.vllm_config, self.kv_cache_config)
        self._connectors = {n: c and HookTimes.wrap(c) for n, c in found.items()}

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
            role, caches = KVConnectorRole.WORKER, chain._kv_cache_config
            self._connectors = connectors(chain, role, self.vllm_config, caches)
            layers = self.vllm_config.compilation_config.static_forward_context
            self._connectors["native"].register_kv_caches(
                {name: layer.kv_cache for name, layer in layers.items()}
            )
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connectors[name]

    def take_hook_times(self) -> Mapping[str, float]:
        """Seconds by scheduler hook, since the last time."""
        return HookTimes.take()
