"""`kvtiers new-tier`: the start of a tier of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiers.cli.arguments import refused


def new_tier(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tier type, like my-tier.")],
    folder: Annotated[
        Path | None, typer.Option(help="Write it here; by default into kvtiers-NAME.")
    ] = None,
) -> None:
    """Write a Python package with a tier that works, its tests, CI and a chain.

    \b
    kvtiers new-tier my-tier
    """
    from spec.registry import tier_types
    from tiers.testing.new_tier import CannotWrite, write_tier

    if name in tier_types():
        raise refused(f"{name}: an installed package provides this tier type; take another name")
    place = folder or Path(f"kvtiers-{name}")
    try:
        made = write_tier(name, place)
    except CannotWrite as error:
        raise refused(error) from None
    for path in made:
        typer.echo(str(path))
    typer.echo(f"next: cd {place} && pip install -e '.[test]' && pytest && kvtiers try chain.yaml")
