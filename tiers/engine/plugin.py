"""The `vllm.general_plugins` entry point: registers our connector with vLLM by name."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

CONNECTOR = "KVTiersConnector"
GROUP = "vllm.general_plugins"
PLUGIN = "kvtiers"
"""Our entry point of the group, by which VLLM_PLUGINS may allow it."""
BOOTED = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
"""When the machine was started, by its clock as this process began: somebody may set it since."""


def transfer_config(chain: Path) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for the chain in the file `chain`: with its path, since
    command lines are visible in process lists, and a chain may contain a password."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"chain": str(chain.absolute())},
    }


def register() -> None:
    """Register the connector in this process. vLLM calls this in each process, perhaps twice."""
    # Without a handler warnings would be bare lines on stderr, and all below a warning would be
    # lost. A child of vLLM's logger also follows a configuration that vLLM loads later.
    for name in ("tiers", "spec"):
        logging.getLogger(name).parent = logging.getLogger("vllm")

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "tiers.engine.vllm", CONNECTOR)
