"""Copies of an engine that sleeps: its paged KV goes away, and comes back with other bytes."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def tells_connectors() -> bool:
    """Whether this vLLM calls a connector before the paged KV goes away, as 0.33 does."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def copies_in_step(vllm_config: Any, told: bool) -> bool:
    """Whether what a step copies must be queued on the device when the step ends: an engine that
    sleeps, and by which nobody is `told`, waits for its device alone."""
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)) and not told
