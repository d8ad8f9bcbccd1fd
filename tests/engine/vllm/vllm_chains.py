"""KV transfer settings for real vLLM engines, and the prompts that they are asked one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.vllm.tiny_vllm import documents

PROMPTS = [(prompt, 8) for prompt in documents(4, 600)]
ONE_BY_ONE = [[prompt] for prompt in PROMPTS]
"""Four prompts of 18 full blocks each, of which an engine of 40 blocks keeps two."""
COMPLETE = 4 * 18 * 32
IN_PROCESS = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}


def transfer(connector: str, connectors: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def tiers(*chain: dict[str, Any], **more: Any) -> dict[str, Any]:
    spec = {"version": 1, "load_when": "always", "staging": "64MiB", "tiers": list(chain)}
    return {
        "kv_connector": "KVTiersConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"chain": spec},
        **more,
    }


def cpu(capacity: str = "64MiB") -> dict[str, Any]:
    return {"type": "cpu", "capacity": capacity}


def disk(path: Path) -> dict[str, Any]:
    return {"type": "disk", "capacity": "64MiB", "path": str(path)}
