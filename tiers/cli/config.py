"""`kvtiers config`: the argument that makes vLLM use a chain."""

from __future__ import annotations

import json

import typer

from tiers.cli.arguments import ChainFile, refused


def config(file: ChainFile) -> None:
    """Print the JSON that makes vLLM use a chain.

    It is the value of --kv-transfer-config; the chain is checked first.
    """
    from spec.load import load_chain
    from tiers.engine.plugin import transfer_config

    load_chain(file)
    if not file.is_file():
        raise refused(f"{file}: found no file; vLLM opens it again, so write the chain to a file")
    typer.echo(json.dumps(transfer_config(file), separators=(",", ":")))
