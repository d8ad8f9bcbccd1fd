"""The `vllm.general_plugins` entry point: makes our connector known to vLLM by name."""

from __future__ import annotations

import logging
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
    log_with_engine()

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "tiers.engine.vllm", CONNECTOR)


def log_with_engine() -> None:
    """Send our log lines where vLLM sends its own: with its format, from its level on.

    A logger that is no child of vLLM's has no handler: its warnings would be bare lines on stderr,
    and what is below a warning would be lost. As a child it follows vLLM's configuration, also one
    that is loaded later.
    """
    for name in ("tiers", "spec"):
        logging.getLogger(name).parent = logging.getLogger("vllm")
