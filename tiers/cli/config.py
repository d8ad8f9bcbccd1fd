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
    from tiers.engine.plugin import transfer_config

    load_chain(file)
    typer.echo(json.dumps(transfer_config(file), separators=(",", ":")))
