"""`kvtiers schema`: what editors need to complete and check a chain."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of a chain's YAML.

    Tiers are of the types installed here.
    """
    from spec.schema import chain_schema

    typer.echo(json.dumps(chain_schema(), indent=2))
