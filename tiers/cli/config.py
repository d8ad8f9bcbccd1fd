"""`kvtiers config`: the argument that makes vLLM use a chain."""

from __future__ import annotations

import json

import typer

from tiers.cli.arguments import ChainFile


def config(file: ChainFile) -> None:
    """Print the JSON that makes vLLM use a chain.

    It is the value of --kv-transfer-config; the chain is checked first.
    """
    from spec.load import load_chain
    from tiers.engine.plugin import CONNECTOR

    load_chain(file)
    # A path and not the content: command lines show in process lists, and a chain may hold a
    # password.
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"chain": str(file.absolute())},
    }
    typer.echo(json.dumps(transfer, separators=(",", ":")))
