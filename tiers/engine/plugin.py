"""The `vllm.general_plugins` entry point: makes our connector known to vLLM by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONNECTOR = "KVTiersConnector"


def transfer_config(chain: Path) -> dict[str, Any]:
    """What vLLM's `kv_transfer_config` must be to use the chain in a file.

    It holds the file's path and not its content: command lines show in process lists, and a
    chain may hold a password.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"chain": str(chain.absolute())},
    }


def register() -> None:
    """Register the connector in this process; vLLM calls it in each of its own, perhaps twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "tiers.engine.vllm", CONNECTOR)
