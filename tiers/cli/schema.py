"""`kvtiers schema`: what editors need to complete and check a chain."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of a chain's YAML.

    Tiers are of the types installed here; those of a broken package are named and left out.

    \b
    kvtiers schema > chain.schema.json
    """
    from spec.schema import chain_schema

    found = chain_schema(lambda told: typer.echo(told, err=True))
    typer.echo(json.dumps(found, indent=2))
