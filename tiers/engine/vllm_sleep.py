"""Copies of an engine that sleeps: its paged KV goes away, and comes back with other bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tiers.connector.contract.copier import OpenCopier
from tiers.gpu.copier import open_copier


def tells_connectors() -> bool:
    """Whether this vLLM calls a connector before the paged KV goes away, as 0.33 does."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def copier_of(vllm_config: Any, told: bool) -> OpenCopier:
    """Return what opens a worker's copier. An engine that sleeps, and by which nobody is `told`,
    waits for its device alone: what a step copies must be queued there when the step ends."""
    sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    return partial(open_copier, in_step=bool(sleeps) and not told)
