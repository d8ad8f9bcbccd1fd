"""The `vllm.general_plugins` entry point: makes our connector known to vLLM by name."""

from __future__ import annotations

CONNECTOR = "KVTiersConnector"


def register() -> None:
    """Register the connector in this process; vLLM calls it in each of its own, perhaps twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "tiers.engine.vllm", CONNECTOR)
