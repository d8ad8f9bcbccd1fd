"""`kvtiers validate`, `config` and `schema`: commands about the YAML of a chain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from spec.errors import SpecError, one_line
from spec.text import aligned
from tiers.cli.arguments import ChainFile, refused, say

if TYPE_CHECKING:
    from spec.offloading import OffloadingSpec

COLUMNS = ("order", "name", "type", "settings")


def validate(
    file: ChainFile,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it, or what is wrong with it, as JSON.")
    ] = False,
) -> None:
    """Check a chain and print it.

    Names and defaults are filled in; nothing is opened or connected to.

    \b
    kvtiers validate chain.yaml
    kvtiers validate --json - < chain.yaml
    """
    from spec.chain import shown_chain
    from spec.load import load_chain
    from spec.plugins import stdout_to_stderr

    try:
        chain = load_chain(file)
    except SpecError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"problems": error.problems}, indent=1))
        raise typer.Exit(2) from None
    with stdout_to_stderr():  # plugins' serializers run
        whole = shown_chain(chain)
        rows = [
            (str(order), str(tier.name), tier.type, _settings(tier))
            for order, tier in enumerate(chain.tiers, 1)
        ]
    if as_json:
        typer.echo(json.dumps({"chain": whole}, indent=1))
        return
    lines = aligned([COLUMNS, *rows])
    for line in lines:
        say(line, indent=lines[0].index(COLUMNS[-1]))
    left_out = ("tiers",) if whole["ghosts"] else ("tiers", "ghosts")
    settings = (f"{key} {_text(value)}" for key, value in whole.items() if key not in left_out)
    typer.echo(", ".join(settings))


def _settings(tier: OffloadingSpec) -> str:
    from spec.fields import mask_secrets
    from spec.offloading import StoreSpec

    # The JSON form, since in it sizes have units and secrets are masked.
    dumped = tier.model_dump(mode="json", exclude={"type", "name"}, exclude_none=True)
    # Its own settings first, then those that every tier has.
    keys = sorted(dumped, key=lambda key: key in StoreSpec.model_fields)
    return one_line(", ".join(f"{key} {mask_secrets(_text(dumped[key]))}" for key in keys))


def _text(value: object) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_text(item)}' for key, item in value.items())})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


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


def schema() -> None:
    """Print the JSON Schema of a chain's YAML.

    Tiers are of the types installed here; those of a broken package are named and left out.

    \b
    kvtiers schema > chain.schema.json
    """
    from spec.schema import chain_schema

    found = chain_schema(lambda problem: typer.echo(problem, err=True))
    typer.echo(json.dumps(found, indent=2))
