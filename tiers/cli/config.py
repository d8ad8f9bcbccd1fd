"""`kvtiers config`: the argument that makes vLLM use a chain."""

from __future__ import annotations

import json

import typer

from tiers.cli.arguments import ChainFile, refused


def config(file: ChainFile) -> None:
    """Print the JSON that makes vLLM use a chain.

    It is the value of --kv-transfer-config; the chain is checked first.

    \b
    vllm serve MODEL --kv-transfer-config "$(kvtiers config chain.yaml)"
    """
    from spec.load import load_chain
    from tiers.engine.plugin import transfer_config

    load_chain(file)
    # /dev/stdin may stand for a file here, and for nothing in vLLM's processes.
    if not file.is_file() or file.absolute().parts[1] in ("dev", "proc"):
        raise refused(f"{file}: found no file; vLLM opens it again, so write the chain to a file")
    typer.echo(json.dumps(transfer_config(file), separators=(",", ":")))
